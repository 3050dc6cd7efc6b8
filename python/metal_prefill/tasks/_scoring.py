"""Many prompts at once: what they share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import Logits, TokenIds, length_of, token_array
from metal_prefill.engine import Engine
from metal_prefill.errors import ContextOverflowError
from metal_prefill.generation._batch_call import BatchCall

Prompts = Sequence[npt.NDArray[np.int32]]


def prefix_order(prompts: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Return indices in lexicographic order: each prompt is next to the one that it shares most with."""
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
        Ids must be in ``[0, vocab_size)``.
    least, limit
        How many tokens there must and may be.

    Raises
    ------
    TypeError, ValueError, ContextOverflowError
        As for a prompt to be processed.
    """
    if length_of(prompt) > limit:
        raise ContextOverflowError(f"{length_of(prompt)} tokens exceed the limit of {limit}")
    array = token_array(prompt, vocab_size)
    if len(array) < least:
        raise ValueError(f"at least {least} tokens are needed, got {len(array)}")
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


# Limits of prompts that are scored together: their number, and their tokens of K and V.
GROUP_PROMPTS, GROUP_TOKENS = 64, 16384


def leaders(lengths: Sequence[int]) -> list[int]:
    """Return for each of a sorted list of prompts which earlier one to begin from.

    `lengths` are those of what each shares with the one before it. Of all that share as much, the first is
    taken, so that as many as possible can begin at the same time. The first prompt's leader is itself.
    """
    found = [0]
    for i in range(1, len(lengths)):
        j = i - 1
        while j > 0 and lengths[j] >= lengths[i]:
            j = found[j]
        found.append(j)
    return found


def groups(prompts: Prompts) -> Iterator[list[int]]:
    """Divide prompts into groups that are computed together; prompts with a common prefix share a group."""
    group: list[int] = []
    tokens = 0
    for i in prefix_order(prompts):
        if group and (len(group) == GROUP_PROMPTS or tokens + len(prompts[i]) > GROUP_TOKENS):
            yield group
            group, tokens = [], 0
        group.append(i)
        tokens += len(prompts[i])
    if group:
        yield group


def score_many(
    engine: Engine,
    prompts: Prompts,
    progress: Callable[[int, int], object] | None = None,
) -> list[Logits]:
    """Score checked prompts; see :meth:`metal_prefill.Model.score_many`.

    Prompts that do not continue another one of their group are computed in one batch.
    """
    results: dict[int, Logits] = {}
    for group in groups(prompts):
        shared = [0, *(common_prefix(prompts[a], prompts[b]) for a, b in pairwise(group))]
        # The last shared token is computed again: what follows it is new. Element i is about token i + 1.
        starts = [min(max(n - 1, 0), len(prompts[i]) - 2) for n, i in zip(shared, group, strict=True)]
        leader = leaders(shared)
        sessions: dict[int, _core.Session] = {}
        waiting = list(range(len(group)))
        while waiting:
            ready = [i for i in waiting if starts[i] == 0 or leader[i] in sessions]
            waiting = [i for i in waiting if i not in ready]
            begun = {i: sessions[leader[i]].fork() if starts[i] else engine.session() for i in ready}
            for i in ready:
                begun[i].rewind(starts[i])
            rest = [prompts[group[i]][starts[i] :] for i in ready]
            call = BatchCall(engine.config, [begun[i] for i in ready], rest, "log_probs", None)
            computed = engine.core.forward_batch(call.take_requests(reuse=False))
            for i, scores in zip(ready, call.results(computed, return_errors=False), strict=True):
                known = results[group[leader[i]]][: starts[i]] if starts[i] else scores[:0]
                results[group[i]] = np.concatenate([known, scores])
            sessions |= begun
            if progress is not None:
                progress(len(results), len(prompts))
        sessions.clear()
    return [results[i] for i in range(len(prompts))]
