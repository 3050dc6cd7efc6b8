"""Many prompts at once: what they share is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import (
    Logits,
    Progress,
    TokenIds,
    check_prompt_options,
    length_of,
    token_array,
)
from metal_prefill.engine import Engine, EngineOwner
from metal_prefill.errors import ContextOverflowError
from metal_prefill.generation._batch_call import BatchCall, BatchOutput, OutputRows
from metal_prefill.session import Session

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
    model: EngineOwner, prompts: Sequence[TokenIds], *, progress: Progress | None = None
) -> list[Logits]:
    """Return the log probabilities of many prompts' tokens, and compute common prefixes once.

    Prompts with a common prefix, such as a question before its possible answers, may be in any order. The
    default session does not change.

    Parameters
    ----------
    prompts
        Token ids of each prompt, at least two.
    progress
        Called after each prompt with the number of prompts done and their total. An exception that it
        raises stops the call.

    Returns
    -------
    list of numpy.ndarray
        Result of :meth:`Model.score` for each prompt: float32, ``[n - 1]``.

    Raises
    ------
    ValueError, TypeError, ContextOverflowError
        As in :meth:`Model.score`, before any prompt is computed; the message has the prompt's index.
    """
    engine = model.engine
    limit = engine.max_context + 1  # the last token is only predicted
    return _score(engine, check_prompts(prompts, engine.config.vocab_size, least=2, limit=limit), progress)


def _score(engine: Engine, prompts: Prompts, progress: Progress | None) -> list[Logits]:
    """Score prompts: those that do not continue another one of their group are computed in one batch."""
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


def score(model: EngineOwner, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
    """Return the log probability of each token, given the tokens before it, from an empty context.

    The default session does not change. See :meth:`Session.score`.
    """
    with Session(model.engine, model.engine.session()) as scratch:
        return scratch.score(tokens, progress=progress)


def forward_prompts(
    model: EngineOwner,
    prompts: Sequence[TokenIds],
    *,
    return_logits: bool = False,
    progress: Progress | None = None,
) -> npt.NDArray[np.int64] | Logits:
    """Process many independent prompts in batches, and return the greedy next token of each.

    Common prefixes are computed once. The default session does not change.

    Parameters
    ----------
    prompts
        Token ids of each prompt.
    return_logits
        Return the logits after the last token of each prompt instead of the token.
    progress
        Called with the number of prompts done and their total. An exception that it raises stops the call.

    Returns
    -------
    numpy.ndarray
        int64 ``[len(prompts)]``, or float32 ``[len(prompts), vocab_size]``.

    Raises
    ------
    ValueError, TypeError, ContextOverflowError
        As in :meth:`Model.forward_prompt`, before any prompt is computed; the message has the index of the
        prompt.
    """
    engine = model.engine
    vocab_size = engine.config.vocab_size
    checked = check_prompts(prompts, vocab_size, least=1, limit=engine.max_context)
    output: BatchOutput = "logits" if return_logits else "greedy"
    results: dict[int, Any] = {}
    for group in groups(checked):
        sessions = [engine.session() for _ in group]
        call = BatchCall(engine.config, sessions, [checked[i] for i in group], output, None)
        del sessions
        computed = engine.core.forward_batch(call.take_requests(reuse=True))
        results.update(zip(group, call.results(computed, return_errors=False), strict=True))
        if progress is not None:
            progress(len(results), len(checked))
    ordered = [results[i] for i in range(len(checked))]
    if return_logits:
        return np.array(ordered, np.float32).reshape(len(checked), vocab_size)
    return np.array(ordered, np.int64)


def forward_batch(
    model: EngineOwner,
    sessions: Sequence[Session],
    tokens: Sequence[TokenIds],
    *,
    output: BatchOutput | Sequence[BatchOutput] = "greedy",
    rows: OutputRows | Sequence[OutputRows] = None,
    reuse: bool = False,
    return_errors: bool = False,
    progress: Progress | None = None,
) -> list[Any]:
    """Append tokens to several sessions in one batch.

    The building block of a scheduler. Prompts and single tokens may be mixed. The result of a session
    does not depend on the others, on the CPU bit for bit.

    Parameters
    ----------
    sessions
        Sessions of this model, each at most once.
    tokens
        Token ids for each session, ``[n]``, appended at its position.
    output
        One value for all sessions, or one for each: ``"greedy"``, the id of the largest logit after the
        last token; ``"logits"``, float32 ``[vocab_size]`` after the last token; ``"log_probs"``, float32
        ``[n - 1]``, as of :meth:`Model.score`; ``"hidden"`` and ``"residual"``, the hidden state after the
        last layer, with and without the output norm, float32 ``[dim]``; ``"none"``.
    rows
        One value for all sessions, or one for each: number of last tokens to return the output of, or
        ``"all"``. Hidden states then have the shape ``[rows, dim]``, and greedy ids are int32 ``[rows]``.
        None selects the last token, and all tokens for log probabilities. Logits are returned for the
        last token only.
    reuse
        Treat `tokens` as the whole context of each session, as in :meth:`Model.forward_prompt`.
    return_errors
        Return the exception of a failed session in place of its result. If False, the first exception is
        raised after the other sessions are computed.
    progress
        Called after each pass with the number of tokens done and their total.

    Returns
    -------
    list
        Result of each session, as `output` defines it.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid. Nothing was computed.
    ContextOverflowError, KVMemoryError, NumericalError, DeviceError
        The first session that failed raised it; that session is unchanged.
    SessionBusyError
        Called from the progress callback of another call on one of the sessions.
    """
    check_prompt_options(reuse, progress)
    for i, session in enumerate(sessions):
        if not isinstance(session, Session):
            raise TypeError(f"sessions[{i}] must be a Session, got {type(session).__name__}")
    engine = model.engine
    call = BatchCall(engine.config, [session.native for session in sessions], tokens, output, rows)
    results = engine.core.forward_batch(call.take_requests(reuse=reuse), progress)
    return call.results(results, return_errors=return_errors)
