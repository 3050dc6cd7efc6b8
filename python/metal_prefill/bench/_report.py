"""Benchmark results and their tables for terminals and HTML."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from metal_prefill.bench._cases import COMPARED, LONGEST_TEXT, SAMPLING, SHORTEST_TEXT
from metal_prefill.bench._engines import OURS
from metal_prefill.bench._machine import counted
from metal_prefill.bench._rows import Row, Rows

MIB = 1 << 20
_CHOICES = {
    "argmax": "the most probable tokens, chosen by the engine",
    "sampled": "tokens sampled by the engine, " + ", ".join(f"{k} {v}" for k, v in SAMPLING.items()),
    "greedy": "a text copied, one token at a time",
    "lookup": "the same with drafts from the text so far",
}


class Grid(NamedTuple):
    """Table of text cells, in which the first column names the row."""

    title: str
    header: list[str]
    rows: list[list[str]]


def rate(value: float) -> str:
    """Format tokens per second with about four digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _headline(results: Rows) -> str:
    row = results.rows[0]
    threads = counted(row.n_threads, "thread")
    return f"{row.model_type}, {row.model_size / MIB:.0f} MiB, {threads}, {row.cpu_info}"


def _single(results: Rows) -> Grid:
    header = ["test", "tok/s median", "min", "max", "mean ± sd", "ms median", "load s", "peak MiB"]
    rows = [
        [
            row.test,
            rate(row.median_ts),
            rate(row.spread.low),
            rate(row.spread.high),
            f"{rate(row.avg_ts)} ± {rate(row.stddev_ts)}",
            f"{row.median_ns / 1e6:.2f}",
            _load_cell(row),
            f"{row.peak_rss / MIB:.0f}",
        ]
        for row in results.rows
    ]
    return Grid(f"{_headline(results)}\n{results.rows[0].device}", header, rows)


def _speeds(results: Rows) -> Grid:
    rows = []
    for engine in results.engines:
        of_engine = [results.row(engine, test) for test in results.tests]
        cells = [_speed_cell(row) for row in of_engine]
        first = of_engine[0]
        rows.append([engine, *cells, _load_cell(first), f"{first.peak_rss / MIB:.0f}"])
    title = f"{_headline(results)}\ntok/s, median (min-max)"
    return Grid(title, ["engine", *results.tests, "load s", "peak MiB"], rows)


def _load_cell(row: Row) -> str:
    return f"{row.load_ns / 1e9:.2f}"


def _speed_cell(row: Row) -> str:
    if not row.measured:
        return ""
    return f"{rate(row.median_ts)} ({rate(row.spread.low)}-{rate(row.spread.high)})"


def _ratio_cell(row: Row) -> str:
    if row.ratio is None:
        return ""
    return f"{row.ratio.median:.2f}x ({row.ratio.low:.2f}-{row.ratio.high:.2f})"


def _ratios(results: Rows) -> Grid:
    ours = results.row(OURS, results.tests[0])
    rows = []
    for engine in results.engines:
        if engine == OURS:
            continue
        of_engine = [results.row(engine, test) for test in results.tests]
        first = of_engine[0]
        rows.append(
            [
                engine,
                *(_ratio_cell(row) for row in of_engine),
                f"{first.load_ns / ours.load_ns:.2f}x",
                f"{first.peak_rss / ours.peak_rss:.2f}x",
            ]
        )
    title = "metal_prefill against each: speed ratio, median (min-max); below 1 is a loss"
    return Grid(title, ["peer", *results.tests, "load", "memory"], rows)


def _grids(results: Rows) -> Iterator[Grid]:
    if len(results.engines) == 1:
        yield _single(results)
    else:
        yield _speeds(results)
        yield _ratios(results)


def _captions(results: Rows) -> Iterator[str]:
    for engine in results.engines:
        row = results.row(engine, results.tests[0])
        yield f"{engine}: {row.build}, {row.device}, {row.settings}"
    for row in results.rows:
        if row.n_depth and not row.n_streams and not row.choice:
            yield f"{row.test}: tokens one by one, from a context of {row.n_depth} on"
            break
    streams = max((row.n_streams for row in results.rows), default=0)
    if streams:
        yield f"x{streams}: {counted(streams, 'sequence')} in each pass; tok/s counts the tokens of all"
    for choice, meaning in _CHOICES.items():
        if test := next((row.test for row in results.rows if row.choice == choice), None):
            yield f"{test}: {meaning}"
    if test := next((row.test for row in results.rows if row.n_texts and not row.text_tokens), None):
        yield f"{test}: vectors of texts of {SHORTEST_TEXT} to {LONGEST_TEXT} tokens"
    if test := next((row.test for row in results.rows if row.text_tokens), None):
        yield f"{test}: vectors of texts, tokens of each and number of texts in a call"
    for row in results.rows:
        if row.of_compared is not None:
            share, compared = row.of_compared, COMPARED[row.choice]
            test = next(other.test for other in results.rows if other.choice == compared)
            ratio = f"{share.median:.3f} ({share.low:.3f}-{share.high:.3f})"
            yield f"{row.engine} {row.test}: {ratio} of the speed of {test}, samples in turns"
    yield from (f"note: {note}" for note in results.notes())


def render(results: Rows) -> RenderableType:
    if not results.rows:
        return Text("no results")
    parts: list[RenderableType] = []
    for grid in _grids(results):
        table = Table(title=grid.title, title_justify="left")
        for i, name in enumerate(grid.header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for cells in grid.rows:
            table.add_row(*cells)
        parts.append(table)
    parts += [Text(line, style="dim") for line in _captions(results)]
    return Group(*parts)


class BenchResults(Rows):
    """Rows of one benchmark; a table in a terminal and in a notebook.

    Attributes
    ----------
    rows : list of Row
        By engine, ours first, then by test.
    """

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as JSON objects."""
        return [asdict(row) for row in self.rows]

    def to_json(self) -> str:
        """Return the rows as a JSON array."""
        return json.dumps(self.to_dicts(), indent=2)

    @classmethod
    def from_dicts(cls, rows: Iterable[dict[str, Any]]) -> BenchResults:
        """Read what `to_dicts` wrote."""
        return cls([Row(**(row | {"ratio": None})) for row in rows])

    def __rich__(self) -> Any:
        return render(self)

    def _repr_html_(self) -> str:
        console = Console(record=True, width=1000, file=io.StringIO())
        console.print(render(self))
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
