"""Prompts that repeat an earlier one but for an early change, such as the time in a system message.

Everything after the change is computed again, because the states of a token depend on all tokens before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill import _core

Ids = npt.NDArray[np.int32]

LEAST_TOKENS = 64  # repeated after a change; fewer cost little
_MOST_SHIFT = 16  # tokens by which a change lengthens or shortens a prompt


class Change(NamedTuple):
    """The first difference of a prompt from earlier ones."""

    position: int  # number of tokens before it
    tokens: int  # tokens after it that an earlier prompt has, too, and that are computed again


def change_of(prompt: Ids, earlier: Sequence[Ids]) -> Change | None:
    """Return the change with which a prompt repeats one of the earlier ones; None if it repeats none.

    At least half of what follows the longest prefix that it shares with any must be the same, at places that
    differ by up to 16.
    """
    shared = [_core.common_prefix(prompt, other) for other in earlier]
    position = max(shared, default=0)
    rest = prompt[position:]
    repeated = 0
    for other, begin in zip(earlier, shared, strict=True):
        if begin == position < len(other):
            after = other[position:]
            repeated = max(
                repeated,
                *(_equal(rest[shift:], after) for shift in range(_MOST_SHIFT + 1)),
                *(_equal(rest, after[shift:]) for shift in range(1, _MOST_SHIFT + 1)),
            )
    if repeated < max(LEAST_TOKENS, len(rest) / 2):
        return None
    return Change(position, repeated)


def _equal(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    return int(np.count_nonzero(a[:n] == b[:n]))
