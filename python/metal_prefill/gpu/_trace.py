"""Timelines of single dispatches, in the format of chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from metal_prefill import _core

SERIALIZED = (
    "every dispatch ran in a separate command buffer: its time includes the cost of starting one, "
    "and dispatches do not overlap"
)
GPU_CLOCK = "GPUStartTime and GPUEndTime of each command buffer"
HOST_CLOCK = "host clock, on the CPU emulator: durations do not represent a GPU"


@dataclass(frozen=True)
class Step:
    """Trace of one call: the prompt, or a token after it."""

    tokens: int  # number of tokens
    dispatches: Sequence[Dispatch]  # dispatches in execution order


def runs_on_host(device_name: str) -> bool:
    """Return whether dispatches run on the emulator's CPU executor."""
    return _core.has_emulator and "(CPU)" in device_name


def chrome_trace(steps: Sequence[Step], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a trace in Chrome's JSON object format: complete events in microseconds.

    An event is named after its kernel. Its ``args`` contain the layer (-1 outside the layers), step (0 is the
    prompt), geometry, buffers and arguments of the dispatch.
    """
    origin = min((d.start for step in steps for d in step.dispatches), default=0.0)
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": metadata.get("device", "GPU")}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "dispatches"}},
    ]
    for number, step in enumerate(steps):
        for d in step.dispatches:
            args = {"step": number, "tokens": step.tokens, "arguments": d.args}
            args |= {name: getattr(d, name) for name in _WRITTEN}
            events.append(
                {
                    "name": d.kernel,
                    "cat": "prompt" if number == 0 else "decode",
                    "ph": "X",
                    "pid": 1,
                    "tid": 1,
                    "ts": (d.start - origin) * 1e6,
                    "dur": (d.end - d.start) * 1e6,
                    "args": args,
                }
            )
    return {"displayTimeUnit": "ns", "otherData": metadata, "traceEvents": events}


def read_trace(path: str | os.PathLike[str]) -> tuple[list[Step], dict[str, Any]]:
    """Read the steps and metadata from a file written with `chrome_trace`."""
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
        steps: dict[int, Step] = {}
        for event in trace["traceEvents"]:
            if event["ph"] != "X":
                continue
            a = event["args"]
            x, y, z = a["grid"]
            runs = tuple((position, rows) for position, rows in a["runs"])
            given = {**{name: a[name] for name in _WRITTEN}, "grid": (x, y, z), "runs": runs}
            given |= {"buffers": tuple(a["buffers"]), "args": a["arguments"]}
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            dispatch = Dispatch(event["name"], **given, start=start, end=start + seconds)
            before = steps.get(a["step"], Step(a["tokens"], []))
            steps[a["step"]] = Step(a["tokens"], [*before.dispatches, dispatch])
        return [steps[number] for number in sorted(steps)], dict(trace["otherData"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} is not a metal-prefill trace: {error!r}") from error


# Fields of a dispatch that a trace has under the same names.
_WRITTEN = ("layer", "grid", "threads", "threadgroup_bytes", "after_barrier", "buffers", "runs")
_FORMATS = {"u32_t": "u4", "float": "f4"}


@dataclass(frozen=True)
class Dispatch:
    kernel: str  # name of the shader function
    layer: int  # index of the layer; -1 before and after the layers
    grid: tuple[int, int, int]  # number of threadgroups, (x, y, z)
    threads: int  # number of threads per threadgroup
    threadgroup_bytes: int  # size of the threadgroup memory that the host allocates
    after_barrier: bool  # whether the dispatch waits for the dispatches before it
    # Arguments of the kernel, by their names in ``shaders/args_fields.h``; fields of nested structs have
    # unqualified names. Offsets into the weights are omitted.
    args: dict[str, Any]
    buffers: tuple[str, ...] = ()  # labels of the buffers, by binding
    # Rows of a dispatch that reads or writes K and V: (position, rows) of each run of consecutive rows of a
    # sequence.
    runs: tuple[tuple[int, int], ...] = ()
    # Times in seconds on the GPU's clock; 0 for a dispatch that has not run.
    start: float = 0.0
    end: float = 0.0

    @property
    def groups(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


def _fields(struct: str, base: int) -> Iterator[tuple[str, Any, int]]:
    """Yield name, format and offset of each field, also of nested structs."""
    for name, kind, offset, count in _core.args_structs[struct][1]:
        if kind in _FORMATS:
            yield name, (_FORMATS[kind], count) if count > 1 else _FORMATS[kind], base + offset
        elif kind != "u64_t":  # offsets into the weights
            yield from _fields(kind, base + offset)


@cache
def layout_of(struct: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a struct that kernels read or write, without offsets into the weights."""
    # Nested structs repeat some fields, with the same values.
    fields = {name: (format, offset) for name, format, offset in _fields(struct, 0)}
    formats, offsets = zip(*fields.values(), strict=True)
    size = _core.args_structs[struct][0]
    return np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": size})


def decode_args(args_struct: str, data: bytes) -> dict[str, Any]:
    """Return the fields of an argument struct by name."""
    layout = layout_of(args_struct)
    if len(data) != layout.itemsize:
        raise ValueError(f"{args_struct} must have {layout.itemsize} bytes, got {len(data)}")
    (values,) = np.frombuffer(data, layout)
    return {name: values[name].tolist() for name in layout.names or ()}


def from_core(dispatches: Sequence[_core.Dispatch]) -> list[Dispatch]:
    given = [field.name for field in fields(Dispatch) if field.name not in ("args", "buffers", "runs")]
    return [
        Dispatch(
            args=decode_args(d.args_struct, d.args),
            buffers=tuple(d.buffers),
            runs=tuple(d.runs),
            **{name: getattr(d, name) for name in given},
        )
        for d in dispatches
    ]
