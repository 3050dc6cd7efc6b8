"""Token ids, checked before anything is computed; and the types that calls share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = "npt.NDArray[np.integer[Any]] | Sequence[int] | range"
Progress: TypeAlias = Callable[[int, int], object]
Logits: TypeAlias = npt.NDArray[np.float32]


def token_array(tokens: TokenIds, vocab_size: int) -> npt.NDArray[np.int32]:
    """Convert token ids to int32 without ever wrapping a value.

    Parameters
    ----------
    tokens
        One-dimensional integer array of any width, or a sequence of ints.
    vocab_size
        Ids must be in ``[0, vocab_size)``.

    Raises
    ------
    TypeError
        If the elements are not integers (booleans are not).
    ValueError
        If `tokens` is empty, not one-dimensional, or holds an id outside the vocabulary.
    """
    try:
        array = np.asarray(tokens)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"tokens cannot be made an array: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, got {array.ndim} dimensions")
    if array.size == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    if array.dtype == object and all(isinstance(t, int) and not isinstance(t, bool) for t in array):
        i, t = next((i, t) for i, t in enumerate(array) if not 0 <= t < vocab_size)
        raise ValueError(f"token id {t} at index {i} is outside the vocabulary of {vocab_size}")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"token ids must be integers, got {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if bad.size:
        raise ValueError(
            f"token id {array[bad[0]]} at index {bad[0]} is outside the vocabulary of {vocab_size}"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def token_id(token: int, vocab_size: int) -> int:
    """Check one token id.

    Raises
    ------
    TypeError
        If it is not an integer.
    ValueError
        If it is outside the vocabulary.
    """
    if isinstance(token, (bool, np.bool_)):
        raise TypeError("a token id must be an integer, got bool")
    value = operator.index(token)
    if not 0 <= value < vocab_size:
        raise ValueError(f"token id {value} is outside the vocabulary of {vocab_size}")
    return value
