"""The page of the site that lists which models of other libraries' lists open, and why others do not.

A row of ``coverage.csv`` has the class of a model's ``config.json``, its modules of sentence-transformers,
the lists that name it, and what else it needs. The verdict follows from the tables that conversion uses.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from metal_prefill.conversion._modules import KINDS
from metal_prefill.conversion._sources import BIDIRECTIONAL, COLBERT, SOURCES, TASKS

DATA = Path(__file__).parent / "coverage.csv"
LISTS = {"s": "sentence-transformers", "t": "text-embeddings-inference", "f": "fastembed", "g": "GLiNER"}
ROUTER, ENTITIES = "Router", "GLiNER"


def missing(row: dict[str, str]) -> str:
    """Return what a model needs that conversion lacks; empty if its class and modules open."""
    if row["other"]:
        return row["other"]
    modules = row["modules"].split()
    unknown = [kind for kind in modules if kind not in (*KINDS, ROUTER)]
    if unknown:
        return f"module {unknown[0]}"
    if row["class"] in ("", COLBERT, ENTITIES):
        return ""
    match = re.fullmatch(rf"(.+?)(?:{BIDIRECTIONAL})?({'|'.join(TASKS)})", row["class"])
    if match is None or match[1] not in SOURCES:
        return f"class {row['class']}"
    task = "masked" if "SpladePooling" in modules else TASKS[match[2]]
    return "" if task in ("body", *SOURCES[match[1]].heads) else f"the head of {row['class']}"


def rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with open(DATA, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shares() -> Iterator[tuple[str, int, int]]:
    """Yield the name of each list, the number of its models that open, and of all."""
    for key, name in LISTS.items():
        listed = [row for row in rows() if key in row["lists"].split()]
        yield name, sum(not missing(row) for row in listed), len(listed)


def page() -> str:
    """Return the Markdown of the page."""
    lines = [
        "# Models that open",
        "",
        "Encoders on the lists of other libraries, by the class in `config.json` and the modules. The table",
        "follows from the classes and modules that [conversion](../install.md#model-files) knows. Tests open",
        "a folder of each class with random weights; the models themselves were not opened. The lists",
        "include vision models, and methods without a model, such as BM25.",
        "",
        "| list | open | of |",
        "| --- | --- | --- |",
        *(f"| {name} | {count} | {total} |" for name, count, total in shares()),
        "",
        "| model | class | modules | lists | missing |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows(), key=lambda row: (bool(missing(row)), row["model"].lower())):
        lists = ", ".join(LISTS[key] for key in row["lists"].split())
        modules = ", ".join(row["modules"].split())
        lines.append(f"| {row['model']} | {row['class']} | {modules} | {lists} | {missing(row)} |")
    return "\n".join(lines) + "\n"
