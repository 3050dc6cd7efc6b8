"""Argument checks, whose errors name the argument, its value and the limit."""

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill.errors import ContextOverflowError

TokenIds: TypeAlias = "npt.NDArray[np.integer[Any]] | Sequence[int] | range"
Progress: TypeAlias = Callable[[int, int], object]
Logits: TypeAlias = npt.NDArray[np.float32]

FEW_TOKENS = 8  # checking these one by one is faster than a NumPy call
MAX_INTEGER = 2**63 - 1  # the largest integer that the engines accept, such as a memory size
MOST_ANSWERS = 4096  # per prompt; each has separate memory


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return an integer between `least` and `most`, or raise TypeError or ValueError, also for booleans."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the error is caught
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        limit = f"must be between {least} and {most}"
        if most is None:
            limit = f"must be at least {least}" if least else "must not be negative"
        raise ValueError(f"{name} {limit}, got {number}")
    return number


def number(name: str, value: object) -> float:
    """Convert a real number to float; a number too large for a float becomes infinite."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # all of them compare


def check_prompt_options(reuse: object, progress: object) -> None:
    """Raise TypeError if `reuse` is not a bool, or `progress` is neither a callable nor None."""
    if not isinstance(reuse, bool):
        raise TypeError(f"reuse must be a bool, got {type(reuse).__name__}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable or None, got {type(progress).__name__}")


def one_of(name: str, value: str, choices: Collection[str]) -> Any:
    """Return `value`, or its item in the mapping `choices`; raise ValueError for an unknown name."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return choices[value] if isinstance(choices, Mapping) else value


def items_of(name: str, values: Any) -> list[Any]:
    """Copy the items of a list, tuple, generator, array or column of a table into a list."""
    kind = type(values).__name__
    columns = values if isinstance(values, Mapping) else getattr(values, "columns", None)
    columns = getattr(values, "column_names", columns)
    if columns is not None:
        first = next(map(repr, islice(columns, 1)), "...")
        raise TypeError(
            f"{name} must be one column of strings, got a {kind}: pass one, such as {name}[{first}]"
        )
    if isinstance(values, Set):
        raise TypeError(f"{name} must be a sequence of strings, got a {kind}, which has no order")
    single = isinstance(values, (str, bytes)) or (isinstance(values, np.ndarray) and not values.ndim)
    if single or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of strings, got one {kind}")
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    return list(values.to_pylist() if hasattr(values, "to_pylist") else values)  # Arrow's items are scalars


def stops_of(stop: str | int | Iterable[str | int]) -> list[str | int]:
    """Return the items of a `stop`, which may be a single one; raise TypeError for another type."""
    if isinstance(stop, (str, int, np.integer)):
        return [stop]
    if isinstance(stop, (bytes, bytearray)) or not isinstance(stop, Iterable):
        kind = type(stop).__name__
        raise TypeError(f"stop must be a str, a token id or a sequence of them, got {kind}")
    return list(stop)


def token_id(token: object, vocab_size: int) -> int:
    """Return a token id, or raise TypeError for another type, ValueError outside the vocabulary."""
    value = token if type(token) is int else integer("a token id", token)
    if not 0 <= value < vocab_size:
        raise ValueError(f"token id {value} is outside the vocabulary of {vocab_size}")
    return value


def token_array(
    tokens: TokenIds, vocab_size: int, *, context: int | None = None, position: int = 0, unread: int = 0
) -> npt.NDArray[np.int32]:
    """Copy token ids to int32, without integer overflow; `position` appears in messages only.

    The copy is made before the checks and is read-only: its owner, a callback or another thread may change or
    unmap `tokens` at any time, and engines read ids again for each pass. The length is checked against the
    context before any token is read; the last `unread` tokens need no space in it. Booleans are rejected.
    """
    if isinstance(tokens, (str, bytes)) or tokens is None:
        kind = type(tokens).__name__
        raise TypeError(f"tokens must be a sequence of token ids, got {kind}: encode text with the tokenizer")
    if context is not None and (count := length_of(tokens) - unread) > context:
        raise ContextOverflowError(f"position {position} + {count} tokens exceeds the context of {context}")
    masked = sys.modules.get("numpy.ma")  # importing it takes 10 ms
    if masked is not None and isinstance(tokens, masked.MaskedArray) and masked.is_masked(tokens):
        raise TypeError(f"token ids must be integers, got an array with {int(np.sum(tokens.mask))} masked")
    if isinstance(tokens, list):
        tokens = tuple(tokens)
    kinds = set(map(type, tokens)) if isinstance(tokens, tuple) else set()
    if not kinds.isdisjoint((bool, np.bool_)):
        raise TypeError("token ids must be integers, got bool among them")
    try:
        array = np.array(tokens)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"tokens cannot be converted to an array: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got {array.ndim} dimensions")
    if array.size == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    if array.dtype.kind == "f" and kinds and all(issubclass(kind, (int, np.integer)) for kind in kinds):
        array = np.array(tokens, object)  # integers whose only common NumPy type is float
    if array.dtype == object:  # Python integers, which may exceed all NumPy integer types
        ids = [integer(f"the token id at index {i}", token) for i, token in enumerate(array)]
        for i, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                raise ValueError(f"token id {token} at index {i} is outside the vocabulary of {vocab_size}")
        array = np.array(ids, np.int64)
    if array.dtype.kind not in "iu":
        kind = "str" if array.dtype.kind == "U" else str(array.dtype)
        raise TypeError(f"token ids must be integers, got {kind}")
    bad: Sequence[int] | npt.NDArray[np.intp]
    if array.size <= FEW_TOKENS:
        bad = [i for i, token in enumerate(array.tolist()) if not 0 <= token < vocab_size]
    else:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(bad):
        raise ValueError(
            f"token id {array[bad[0]]} at index {bad[0]} is outside the vocabulary of {vocab_size}"
        )
    result = np.ascontiguousarray(array, dtype=np.int32)
    result.flags.writeable = False
    return result


def length_of(tokens: TokenIds) -> int:
    """Return the number of tokens, at most `MAX_INTEGER`; 0 for objects without a length."""
    try:
        return len(tokens)
    except OverflowError:  # a range longer than sys.maxsize
        return MAX_INTEGER
    except TypeError:
        return 0
