"""Plots of results."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metal_prefill._support.atomic_write import check_target, replacing
from metal_prefill.bench._errors import BenchError
from metal_prefill.bench._machine import counted
from metal_prefill.bench._rows import Row, Rows
from metal_prefill.errors import MissingExtraError

# The first is for metal_prefill. Colours that colour-blind readers can distinguish (Okabe and Ito).
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v")


def check(path: str | os.PathLike[str]) -> None:
    """Raise the error that writing a picture would raise, before anything is drawn.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    ValueError
        If the suffix of `path` is not a supported format.
    FileNotFoundError
        Its folder does not exist.
    OutputError
        If `path` is a device, a FIFO or a socket.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "plots need matplotlib, which is not installed: pip install 'metal_prefill[plot]'"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") not in formats:
        raise ValueError(f"{path}: the ending of a picture is one of {', '.join(sorted(formats))}")
    check_target(path)


def _errors(rows: list[Row]) -> list[list[float]]:
    return [
        [row.spread.median - row.spread.low for row in rows],
        [row.spread.high - row.spread.median for row in rows],
    ]


def _label(row: Row) -> str:
    emulated = " (emulator)" if "emulat" in row.device.lower() else ""
    return row.engine + emulated


def _is_prompt(row: Row) -> bool:
    return bool(row.n_prompt) and not row.n_streams


def _is_decode(row: Row) -> bool:
    return bool(row.n_gen) and not row.n_streams and not row.choice


def _is_stream(row: Row) -> bool:
    return bool(row.n_gen and row.n_streams) and row.measured


def _draw_lines(axes: Any, results: Rows, shown: Callable[[Row], bool], x: Callable[[Row], int]) -> None:
    """Draw a line for each engine with rows, over a logarithmic axis with a tick at each length."""
    from matplotlib.ticker import ScalarFormatter

    for engine, colour, marker in zip(results.engines, COLOURS, MARKERS, strict=False):
        rows = sorted((row for row in results.rows if row.engine == engine and shown(row)), key=x)
        if rows:
            axes.errorbar(
                [x(row) for row in rows],
                [row.median_ts for row in rows],
                yerr=_errors(rows),
                color=colour,
                marker=marker,
                capsize=3,
                label=_label(rows[0]),
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({x(row) for row in results.rows if shown(row)}))
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _draw_prompts(axes: Any, results: Rows) -> None:
    _draw_lines(axes, results, _is_prompt, lambda row: row.n_prompt)
    limits = {row.n_prompt: row.limit_ts for row in results.rows if _is_prompt(row) and row.limit_ts}
    if limits:
        axes.plot(
            sorted(limits),
            [limits[n] for n in sorted(limits)],
            color="black",
            linestyle="--",
            linewidth=1,
            label="limit of 8-bit products",
        )
    axes.set_xlabel("prompt length, tokens")
    axes.set_ylabel("prefill, tok/s (median, min to max)")
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper center", ncols=2)


def _draw_decode(axes: Any, results: Rows) -> None:
    rows = [row for row in results.rows if _is_decode(row)]
    names = [_label(row) for row in rows]
    axes.bar(
        names, [row.median_ts for row in rows], yerr=_errors(rows), color=COLOURS[: len(rows)], capsize=3
    )
    axes.set_ylabel("decode, tok/s (median, min to max)")
    axes.tick_params(axis="x", rotation=20)


def _draw_streams(axes: Any, results: Rows) -> None:
    _draw_lines(axes, results, _is_stream, lambda row: row.n_streams)
    axes.set_xlabel("streams")
    axes.set_ylabel("decode of all streams, tok/s (median, min to max)")
    axes.legend()


def draw(results: Rows, path: str | os.PathLike[str]) -> None:
    """Draw prefill speed over prompt length, with decoding next to it; peers and limit in the same axes.

    Parameters
    ----------
    results
        Of `metal_prefill.bench.run`.
    path
        Picture to write; the ending chooses the format.

    Raises
    ------
    MissingExtraError, ValueError, FileNotFoundError, OutputError
        See `check`.
    BenchError
        If there are no results.
    """
    check(path)
    panels = [
        (panel, width)
        for panel, width, present in (
            (_draw_prompts, 2, any(map(_is_prompt, results.rows))),
            (_draw_decode, 1, any(map(_is_decode, results.rows))),
            (_draw_streams, 2, any(map(_is_stream, results.rows))),
        )
        if present
    ]
    if not panels:
        raise BenchError("there are no results to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * sum(width for _, width in panels), 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), width_ratios=[width for _, width in panels], squeeze=False)
    for axes, (panel, _) in zip(grid[0], panels, strict=True):
        panel(axes, results)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    first = results.rows[0]
    figure.suptitle(
        f"{first.model_type}, {counted(first.n_threads, 'thread')}, {first.cpu_info}", fontsize=10
    )
    with replacing(path) as part:
        figure.savefig(part, dpi=150)
