"""A pass of three sequences, as the kernels of recurrent layers read it."""

import numpy as np

from support.kernel_harness import CONSTANTS, STRUCTS, Array

NONE = CONSTANTS["STATE_NONE"]
LENGTHS, DIVIDED = (6, 1, 9), (2, 0, 8)  # tokens of each sequence; those that follow the other sequences
BEFORE, SLOTS = (3, NONE, NONE), 7  # slot of the state before each sequence; number of slots
TOKENS = sum(LENGTHS)
# Slots of the states after tokens: (sequence, token).
_AFTER = {(0, 1): 0, (0, 5): 5, (1, 0): 6, (2, 7): 2, (2, 8): 1}


def state_rows() -> tuple[Array, list[list[int]]]:
    """Return the table of the rows, and the rows of each sequence.

    The first row of each sequence is in the table once more, after all rows.
    """
    leading = [n - d for n, d in zip(LENGTHS, DIVIDED, strict=True)]
    first, rest = np.cumsum([0, *leading]), np.cumsum([sum(leading), *DIVIDED])
    table = np.zeros(TOKENS + len(LENGTHS), STRUCTS["StateRow"])
    rows = []
    for i, n in enumerate(LENGTHS):
        own = [*range(first[i], first[i] + leading[i]), *range(rest[i], rest[i] + DIVIDED[i])]
        for token, row in enumerate(own):
            after = _AFTER.get((i, token), NONE)
            table[row] = (token, first[i], leading[i], rest[i], BEFORE[i], after, n)
        table[TOKENS + i] = table[own[0]]
        rows.append(own)
    return table, rows
