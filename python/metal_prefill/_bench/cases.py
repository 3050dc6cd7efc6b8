"""The tests of a benchmark: prompts of some lengths, and decoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DECODE_DEPTH = 32  # tokens in the context before decoding is timed


@dataclass(frozen=True)
class Case:
    """One test, named as llama-bench names it: ``pp512`` or ``tg64``.

    Attributes
    ----------
    n_prompt : int
        Tokens of the timed prompt, from an empty context; 0 in a decode test.
    n_gen : int
        Tokens that are timed one by one; 0 in a prompt test.
    n_depth : int
        Tokens in the context before the clock starts.
    """

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        """``pp<n>`` for a prompt, ``tg<n>`` for decoding."""
        return f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"

    @property
    def timed_tokens(self) -> int:
        """Tokens that go through the model while the clock runs."""
        return self.n_prompt + self.n_gen

    @property
    def context(self) -> int:
        """Positions that the test needs."""
        return self.n_depth + self.timed_tokens


def make_cases(prompts: Iterable[int], n_gen: int, depth: int = DECODE_DEPTH) -> list[Case]:
    """Return a test for each prompt length and, unless `n_gen` is 0, one for decoding.

    Raises
    ------
    ValueError
        A length is below 1, named twice, or there is nothing to measure.
    """
    lengths = list(prompts)
    if any(n < 1 for n in lengths):
        raise ValueError(f"a prompt has at least 1 token, got {min(lengths)}")
    if len(set(lengths)) != len(lengths):
        raise ValueError(f"a prompt length is named twice: {','.join(map(str, lengths))}")
    if n_gen < 0 or depth < 1:
        raise ValueError(f"decoding takes n_gen >= 0 and a depth >= 1, got {n_gen} and {depth}")
    cases = [Case(n, 0, 0) for n in lengths]
    if n_gen:
        cases.append(Case(0, n_gen, depth))
    if not cases:
        raise ValueError("there is nothing to measure: no prompt length and no token to decode")
    return cases


def token_ids(count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the ids that every engine gets, ``[count]``; a longer prompt begins with the shorter ones."""
    rng = np.random.default_rng(seed=135)
    return rng.integers(0, vocab_size, size=count, dtype=np.int32)
