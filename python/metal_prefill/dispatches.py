"""What a GPU engine sends to the GPU: its dispatches, as the engine or a plan lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from metal_prefill import _core

_STACKED_WEIGHTS = [("offset", np.uint64, 3), ("rows", np.uint32, 3), ("row_bytes", np.uint32)]


def _struct(*fields: Any) -> npt.DTypeLike:
    return np.dtype([(field, np.uint32) if isinstance(field, str) else field for field in fields], align=True)


_WEIGHTS = ("weights", np.dtype(_STACKED_WEIGHTS, align=True))
_EPS = ("eps", np.float32)
_ATTENTION = _struct(
    *("n_heads", "n_kv_heads", "key_dim", "value_dim", "tokens", "position", "q_stride", "window"),
    *("splits", "split_keys"),
    ("scale", np.float32),
)
_MATVEC = _struct(_WEIGHTS, "in_dim", "out_dim", "lanes_per_row", "accumulate", "activation", _EPS)
_MATMUL = _struct(_WEIGHTS, "in_dim", "out_dim", "tokens", "out_stride", "accumulate", "activation")
_MULTI_TOKEN = _struct(_WEIGHTS, "in_dim", "out_dim", "batch_size", "out_stride")
_ROPE = _struct(
    *("n_heads", "n_kv_heads", "key_dim", "value_dim", "rope_dim", "style", "position"),
    *("has_bias", "has_q_norm", "has_k_norm"),
    _EPS,
    "skip_queries",
)

# The argument struct of each kernel, as `shaders/args.h` lays it out, by the beginning of the kernel's name;
# the first that fits counts.
STRUCTS: dict[str, npt.DTypeLike] = {
    "embed": _struct("dim", "row_bytes", "tokens", ("scale", np.float32)),
    "matvec": _MATVEC,
    "rmsnorm_matvec": _MATVEC,
    "silu_matvec": _MATVEC,
    "multi_token_matvec": _MULTI_TOKEN,
    "matmul": _MATMUL,
    "rmsnorm": _struct("dim", _EPS),
    "rope_append": _ROPE,
    "rope_attention": _struct(("rope", _ROPE), ("attention", _ATTENTION)),
    "attention": _ATTENTION,
    "swiglu": _struct("ffn_dim", "tokens", "activation"),
    "argmax": _struct("n"),
    "log_prob": _struct("vocab_size"),
}


@dataclass(frozen=True)
class Dispatch:
    """One dispatch.

    Attributes
    ----------
    kernel
        Name of the function in the shaders.
    layer
        Of the model; -1 before the layers and behind them.
    grid
        Threadgroups, (x, y, z).
    threads
        Of a threadgroup.
    threadgroup_bytes
        Of threadgroup memory, as far as the host decides it.
    after_barrier
        Whether it waits for those before it.
    args
        The kernel's arguments, by the names in ``shaders/args.h``; those of stacked weights as ``rows`` and
        ``row_bytes``, those of structs in a struct as if they stood there themselves.
    buffers
        Labels of what is bound, by binding; empty in a plan that no engine made.
    start, end
        Seconds of the GPU's clock; 0 where it was not run.
    """

    kernel: str
    layer: int
    grid: tuple[int, int, int]
    threads: int
    threadgroup_bytes: int
    after_barrier: bool
    args: dict[str, Any]
    buffers: tuple[str, ...] = ()
    start: float = 0.0
    end: float = 0.0

    @property
    def groups(self) -> int:
        """Threadgroups in all."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def stem(self) -> str:
        """The beginning of the kernel's name that its arguments and its work go by."""
        return stem_of(self.kernel)


def stem_of(kernel: str) -> str:
    """Return the key of `STRUCTS` that a kernel belongs to.

    Raises
    ------
    ValueError
        If there is none.
    """
    for stem in STRUCTS:
        if kernel.startswith(stem):
            return stem
    raise ValueError(f"unknown kernel {kernel!r}; known are {', '.join(STRUCTS)}")


def decode_args(kernel: str, data: bytes) -> dict[str, Any]:
    """Return the arguments of a kernel by name.

    Raises
    ------
    ValueError
        If `data` has another size than the kernel's struct.
    """
    dtype = np.dtype(STRUCTS[stem_of(kernel)])
    if len(data) != dtype.itemsize:
        raise ValueError(f"arguments of {kernel} have {dtype.itemsize} bytes, got {len(data)}")
    return _named(np.frombuffer(data, dtype)[0])


def _named(record: Any) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for name in record.dtype.names:
        if name == "weights":
            args["rows"] = [int(rows) for rows in record[name]["rows"]]
            args["row_bytes"] = int(record[name]["row_bytes"])
        elif record.dtype[name].names:
            args |= _named(record[name])
        else:
            args[name] = record[name].item()
    return args


def from_core(dispatches: Sequence[_core.Dispatch]) -> list[Dispatch]:
    """Convert what the engine gives."""
    return [
        Dispatch(
            kernel=d.kernel,
            layer=d.layer,
            grid=d.grid,
            threads=d.threads,
            threadgroup_bytes=d.threadgroup_bytes,
            after_barrier=d.after_barrier,
            args=decode_args(d.kernel, d.args),
            buffers=tuple(d.buffers),
            start=d.start,
            end=d.end,
        )
        for d in dispatches
    ]
