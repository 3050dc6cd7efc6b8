"""The page of the site that lists which models of other libraries' lists open, and why others do not.

A row of ``coverage.csv`` has the class of a model's ``config.json``, its modules of sentence-transformers,
the lists that name it, and what else it needs. The verdict follows from the tables that conversion uses. A
row of ``downloads.csv`` has the published downloads of one of these models.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from metal_prefill.conversion._modules import KINDS
from metal_prefill.conversion._sources import BIDIRECTIONAL, COLBERT, SOURCES, TASKS

DATA, DOWNLOADS = (Path(__file__).parent / name for name in ("coverage.csv", "downloads.csv"))
# Pages with downloads. The first ranks ten embedding models, and states the millions of all.
PAGES = {
    "q4km": "https://q4km.ai/blog/top-10-embedding-models.html",
    "gigarouter": "https://gigarouter.ai/models",
}
RANKED, RANKED_MILLIONS = 10, 247.0
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


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shares() -> Iterator[tuple[str, int, int]]:
    """Yield the name of each list, the number of its models that open, and of all."""
    for key, name in LISTS.items():
        listed = [row for row in rows(DATA) if key in row["lists"].split()]
        yield name, sum(not missing(row) for row in listed), len(listed)


class Weights(NamedTuple):
    """Downloads in millions."""

    open: float  # published ones of models that open
    refused: float  # and of others
    unpublished: list[str]  # other embedding models that do not open
    most: float  # bound of the downloads of these, at most as many as the ranked ones that are not published


def weights() -> Weights:
    """Return the downloads of models that open, and of others."""
    lacking = {row["model"]: row["class"] for row in rows(DATA) if missing(row)}
    published = {row["model"]: float(row["millions"]) for row in rows(DOWNLOADS)}
    ranked = sum(published[row["model"]] for row in rows(DOWNLOADS) if row["page"] == "q4km")
    refused = sum(millions for model, millions in published.items() if model in lacking)
    unpublished = [model for model, kind in lacking.items() if model not in published and kind != ENTITIES]
    return Weights(sum(published.values()) - refused, refused, unpublished, RANKED_MILLIONS - ranked)


def _downloads() -> Iterator[str]:
    """Yield the lines about downloads."""
    lacking = {row["model"] for row in rows(DATA) if missing(row)}
    known = weights()
    all_known = known.open + known.refused
    yield from (
        "## Downloads",
        "",
        "Downloads of some of these models from the Hugging Face Hub are published on two pages without a",
        f"date: [a ranking]({PAGES['q4km']}) of {RANKED} embedding models, which does not state the period,",
        f"and [pages of models]({PAGES['gigarouter']}), per month, of April 2026 or later. Of these",
        f"downloads, **{known.open / all_known:.1%}** are of models that open.",
        "",
        "| model | millions | page | opens |",
        "| --- | --- | --- | --- |",
    )
    for row in rows(DOWNLOADS):
        opens = "no" if row["model"] in lacking else "yes"
        yield f"| {row['model']} | {float(row['millions']):.2f} | {row['page']} | {opens} |"
    yield from (
        "",
        f"The {RANKED} ranked models have {RANKED_MILLIONS:.0f} million downloads in all, of which those of",
        f"the table leave {known.most:.1f} million. That bounds the downloads of embedding models that do",
        f"not open and of which none were found: {', '.join(known.unpublished)}. With as many, the share",
        f"of models that open would be {known.open / (all_known + known.most):.1%}. GLiNER is not ranked.",
        "",
    )


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
        *_downloads(),
        "## Models",
        "",
        "| model | class | modules | lists | missing |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows(DATA), key=lambda row: (bool(missing(row)), row["model"].lower())):
        lists = ", ".join(LISTS[key] for key in row["lists"].split())
        modules = ", ".join(row["modules"].split())
        lines.append(f"| {row['model']} | {row['class']} | {modules} | {lists} | {missing(row)} |")
    return "\n".join(lines) + "\n"
