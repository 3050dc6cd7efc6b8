"""The best sequence of tags of a text, by Viterbi decoding.

Tags are ``O``, outside of all parts of interest, and for each label ``B-``, ``I-``, ``E-`` and ``S-``: the
first token of a part, one inside, the last, and the only one.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metal_prefill.files._task_config import TransitionBiases

OUTSIDE = "O"
_TAG = re.compile(r"[BIES]-.+", re.DOTALL)
_Array = npt.NDArray[np.float64]


class Transitions(NamedTuple):
    """Scores of tags by those next to them; ``-inf`` if a sequence may not have them."""

    # Scores of the first and of the last tag of a text, ``[tags]``.
    first: _Array
    last: _Array
    between: _Array  # scores of a tag, the columns, after another one, ``[tags, tags]``


def stray_tag(labels: Sequence[str]) -> str | None:
    """Return the first label that is not a tag with which parts of a text begin and end; None if all are.

    That they end needs ``O``, and ``E-`` or ``S-``; without these, the result is empty.
    """
    stray = next((label for label in labels if label != OUTSIDE and not _TAG.fullmatch(label)), None)
    if stray is not None:
        return stray
    return None if OUTSIDE in labels and any(label[0] in "ES" for label in labels) else ""


@lru_cache(maxsize=16)
def transitions_of(labels: tuple[str, ...], biases: TransitionBiases) -> Transitions:
    """Return the scores of transitions between tags."""

    def score(before: str, after: str) -> float:
        if before[0] in "BI":
            inside = {"I": biases.inside_to_continue, "E": biases.inside_to_end}
            return inside.get(after[0], -np.inf) if before[2:] == after[2:] else -np.inf
        if after[0] in "IE":
            return -np.inf
        if before == OUTSIDE:
            return biases.background_stay if after == OUTSIDE else biases.background_to_start
        return biases.end_to_background if after == OUTSIDE else biases.end_to_start

    return Transitions(
        np.array([-np.inf if label[0] in "IE" else 0.0 for label in labels]),
        np.array([-np.inf if label[0] in "BI" else 0.0 for label in labels]),
        np.array([[score(before, after) for after in labels] for before in labels]),
    )


def best_path(
    logits: npt.NDArray[np.floating[Any]],  # ``[n, tags]``
    transitions: Transitions,
) -> list[int]:
    """Return the tags with the largest sum of log probabilities and transitions; of equal ones the first.

    Log probabilities are logits less a number that is the same for all tags of a token, and so for all
    sequences.
    """
    emissions = np.asarray(logits, np.float64)
    scores = emissions[0] + transitions.first
    before = np.zeros(emissions.shape, np.intp)
    for i in range(1, len(emissions)):
        sums = scores[:, None] + transitions.between
        before[i] = sums.argmax(axis=0)
        scores = sums.max(axis=0) + emissions[i]
    path = [int((scores + transitions.last).argmax())]
    for i in range(len(emissions) - 1, 0, -1):
        path.append(int(before[i, path[-1]]))
    return path[::-1]
