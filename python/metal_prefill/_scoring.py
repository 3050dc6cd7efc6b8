"""Many prompts at once: what they share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill._tokens import Logits, TokenIds, token_array
from metal_prefill.errors import ContextOverflowError
from metal_prefill.session import Session

Prompts = Sequence[npt.NDArray[np.int32]]


def prefix_order(prompts: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return indices in lexicographic order: each prompt stands beside what it shares most with."""
    return sorted(range(len(prompts)), key=lambda i: prompts[i].tolist())


def common_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return how many leading tokens two prompts share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def check_prompt(prompt: TokenIds, vocab_size: int, least: int, limit: int) -> npt.NDArray[np.int32]:
    """Convert token ids to an array.

    Parameters
    ----------
    prompt
        Token ids.
    vocab_size
        Ids must lie in ``[0, vocab_size)``.
    least, limit
        How many tokens there must and may be.

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        As for a prompt to be processed.
    """
    array = token_array(prompt, vocab_size)
    if len(array) < least:
        raise ValueError(f"at least {least} tokens are needed, got {len(array)}")
    if len(array) > limit:
        raise ContextOverflowError(f"{len(array)} tokens exceed the limit of {limit}")
    return array


def check_prompts(prompts: Sequence[TokenIds], vocab_size: int, least: int, limit: int) -> Prompts:
    """Convert all prompts before anything is computed; an error names the prompt. See `check_prompt`."""
    arrays = []
    for i, prompt in enumerate(prompts):
        try:
            arrays.append(check_prompt(prompt, vocab_size, least, limit))
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompt {i}: {error}") from None
    return arrays


def score_many(
    session: Session, prompts: Prompts, progress: Callable[[int, int], object] | None = None
) -> list[Logits]:
    """Score checked prompts on a session of their own. See :meth:`metal_prefill.Model.score_many`."""
    results: dict[int, Logits] = {}
    before = np.empty(0, np.int32)
    scores = np.empty(0, np.float32)
    for done, index in enumerate(prefix_order(prompts), start=1):
        tokens = prompts[index]
        # The last shared token is computed again: what follows it is new. Element i is about token i + 1.
        start = max(common_prefix(before, tokens) - 1, 0)
        known = scores[:start]
        if start < len(tokens) - 1:
            session.rewind(start)
            scores = np.concatenate([known, session.score(tokens[start:])])
        else:  # a repetition
            scores = known.copy()
        before, results[index] = tokens, scores
        if progress is not None:
            progress(done, len(prompts))
    return [results[i] for i in range(len(prompts))]
