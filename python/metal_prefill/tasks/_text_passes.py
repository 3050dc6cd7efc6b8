"""Passes over many texts that are each computed once, without keeping their K and V."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.engine import Engine
from metal_prefill.errors import NumericalError
from metal_prefill.files._task_config import Pooling
from metal_prefill.generation._batch_call import BatchCall, BatchOutput
from metal_prefill.generation._text_call import TextCall
from metal_prefill.tasks._query_expansion import query_expansion

Ids = npt.NDArray[np.int32]
# Vectors of several texts, [texts, dim], or an array for each text.
Block: TypeAlias = npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]

# Computes a batch and returns a result or an exception for each of its sessions.
RunBatch: TypeAlias = Callable[[BatchCall | TextCall], list[Any]]

# Fewest tokens of a text that fill the rest of a pass: shorter pieces use other kernels.
LEAST_PIECE = 16
# Poolings of a text that the engine computes.
_ENGINE_POOLINGS = ("none", "mean", "cls", "last")
# Fewest tokens of a shared prefix that are worth a copied page.
WORTH_SHARING = 16


@dataclass(eq=False)
class TextJob:
    """Tokens to compute, and their output.

    Attributes
    ----------
    tokens : int32 [n]
        Tokens after those of the parent. For log probabilities, the last one is only predicted.
    output, rows
        As in :meth:`metal_prefill.Model.forward_batch`.
    parent : TextJob or None
        Job with the prefix that several jobs share, which is computed before them.
    name : str
        In errors, such as "text 3".
    """

    tokens: Ids
    output: BatchOutput
    rows: int = 1
    parent: TextJob | None = None
    name: str = ""
    done: int = field(default=0, init=False)
    session: _core.Session | None = field(default=None, init=False)
    heirs: int = field(default=0, init=False)  # jobs that continue it
    parts: list[Any] = field(default_factory=list, init=False)

    @property
    def computed(self) -> int:
        """Number of tokens that go through the model."""
        return len(self.tokens) - (self.output == "log_probs")

    @property
    def result(self) -> Any:
        """Output: an array with a row for each of `rows`."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


class TextPasses:
    """An engine, and the function that computes its batches.

    Parameters
    ----------
    engine
        Engine that computes.
    run
        Function that computes a batch; by default at once. A server shares the passes of its engine loop.
    rows
        Function that returns how many rows the next batch should have; by default as many as a pass.
    """

    def __init__(
        self, engine: Engine, run: RunBatch | None = None, rows: Callable[[], int] | None = None
    ) -> None:
        self.engine = engine
        self.rows: Callable[[], int] = rows or (lambda: engine.core.pass_rows)
        self.run: RunBatch = run or (lambda call: engine.core.forward_batch(call.take_requests()))


def compute(passes: TextPasses, jobs: Sequence[TextJob]) -> Iterator[TextJob]:
    """Compute jobs in order and yield each when it is done; parents precede their heirs.

    A pass takes as many jobs as fit. At most one job continues in the next pass; only that job and parents
    with heirs keep K and V.
    """
    # Where every token sees all others, they go through the layers together.
    whole = not passes.engine.config.causal
    for job in jobs:
        if job.parent is not None:
            job.parent.heirs += 1
    waiting = deque(jobs)
    try:
        while waiting:
            chosen: list[tuple[TextJob, int]] = []
            room = passes.rows()
            if whole:  # it is not divided
                room = max(room, waiting[0].computed)
            for job in waiting:
                n = min(job.computed - job.done, room)
                cut = n < job.computed - job.done
                if (cut and chosen and (whole or n < LEAST_PIECE)) or not _is_ready(job):
                    break
                chosen.append((job, n))
                room -= n
                if room == 0:
                    break
            _run_pass(passes, chosen)
            while waiting and waiting[0].done == waiting[0].computed:
                job = waiting.popleft()
                _release(job)
                yield job
    finally:
        for job in jobs:
            job.session = None


def _is_ready(job: TextJob) -> bool:
    return job.parent is None or job.parent.done == job.parent.computed


def _run_pass(passes: TextPasses, chosen: Sequence[tuple[TextJob, int]]) -> None:
    sessions, tokens, rows = [], [], []
    outputs: list[BatchOutput] = []
    for job, n in chosen:
        if job.session is None:
            if job.parent is None:
                job.session = passes.engine.session()
            else:
                assert job.parent.session is not None
                job.session = job.parent.session.fork()
        end = job.done + n
        wanted = 0 if job.output == "none" else max(0, end - max(job.done, job.computed - job.rows))
        sessions.append(job.session)
        tokens.append(job.tokens[job.done : end + (job.output == "log_probs" and wanted > 0)])
        outputs.append(job.output if wanted else "none")
        rows.append(wanted or None)
    call = BatchCall(passes.engine.config, sessions, tokens, outputs, rows)
    results = call.results(passes.run(call), return_errors=True)
    for (job, n), result in zip(chosen, results, strict=True):
        if isinstance(result, Exception):
            raise _named(result, job.name, passes.engine) from result
        job.done += n
        if result is not None:
            job.parts.append(result)


def _named(error: Exception, name: str, engine: Engine) -> Exception:
    """Return an error of a text with its name, and if values are too large with what stores them."""
    hint = "; if keys or values exceed 65504, kv_dtype='f32' stores them"
    too_narrow = isinstance(error, NumericalError) and engine.kv_dtype == "f16"
    return type(error)(f"{name}: {error}{hint if too_narrow else ''}")


def _release(job: TextJob | None) -> None:
    """Release K and V of a job without heirs, and of parents whose last heir it was."""
    while job is not None and job.heirs == 0 and job.session is not None and job.done == job.computed:
        job.session = None
        if job.parent is not None:
            job.parent.heirs -= 1
        job = job.parent


def shared_prefix(prompts: Sequence[Ids]) -> int:
    """Return the length of the prefix that all prompts share, at most all but the last token of each.

    0 if it is too short to be computed separately.
    """
    if len(prompts) < 2:
        return 0
    first, last = min(prompts, key=lambda p: p.tolist()), max(prompts, key=lambda p: p.tolist())
    n = min(map(len, prompts)) - 1
    different = np.flatnonzero(first[:n] != last[:n])
    shared = int(different[0]) if different.size else n
    return shared if shared >= WORTH_SHARING else 0


def last_states(
    passes: TextPasses, prompts: Sequence[Ids], names: Sequence[str]
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the hidden state of the last token of each prompt; a shared prefix is computed once."""
    shared = shared_prefix(prompts)
    parent = TextJob(prompts[0][:shared], "none", name=names[0]) if shared else None
    jobs = [
        TextJob(ids[shared:], "hidden", 1, parent, name) for ids, name in zip(prompts, names, strict=True)
    ]
    for job in compute(passes, jobs if parent is None else [parent, *jobs]):
        if job is not parent:
            state = job.result[0]
            job.parts.clear()
            yield state


def pooled_states(
    passes: TextPasses,
    pooling: Pooling,
    prompts: Sequence[Ids],
    names: Sequence[str],
    pairs: Container[int] = (),
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the pooled hidden states of each prompt, ``[dim]``, or all of them, ``[n, dim]``.

    `pairs` are the indices of prompts with two texts.
    """
    for block in pooled_blocks(passes, pooling, prompts, names, pairs=pairs):
        yield from block


def pooled_blocks(
    passes: TextPasses,
    pooling: Pooling,
    prompts: Sequence[Ids],
    names: Sequence[str],
    expansions: Sequence[int] = (),
    pairs: Container[int] = (),
    unpooled: int = 0,
) -> Iterator[Block]:
    """Yield what `pooled_states` does for the prompts of each pass together.

    `expansions` are the numbers of last tokens that expand queries, if any prompt has some. Pooling leaves
    out the first `unpooled` tokens of each prompt.
    """
    if not prompts:
        return
    if pooling != "none" and (unpooled or pooling not in _ENGINE_POOLINGS):
        for block in pooled_blocks(passes, "none", prompts, names, expansions, pairs):
            yield [pooled(states, pooling, unpooled) for states in block]
        return
    if not passes.engine.config.causal:
        yield from _whole_blocks(passes, pooling, prompts, names, expansions, pairs)
        return
    if pooling == "last":
        for state in last_states(passes, prompts, names):
            yield [state]
        return
    jobs = [TextJob(ids, "hidden", len(ids), name=name) for ids, name in zip(prompts, names, strict=True)]
    for job in compute(passes, jobs):
        states = job.result
        job.parts.clear()
        if pooling == "mean":
            # The mean of all states at once, however passes divide them: sums of parts round differently.
            yield [pooled(states, pooling)]
        else:
            yield [states if pooling == "none" else states[0]]


def pooled(states: npt.NDArray[np.float32], pooling: Pooling, unpooled: int = 0) -> npt.NDArray[np.float32]:
    """Return the vector of a text, without the first tokens that are `unpooled`, unless it has no others."""
    first = min(unpooled, len(states) - 1)
    rows: npt.NDArray[np.float32] = states[first:]
    vector: npt.NDArray[np.float32]
    match pooling:
        case "cls":
            vector = rows[0]
        case "last":
            vector = rows[-1]
        case "max":
            vector = rows.max(axis=0)
        case "weighted_mean":  # arXiv:2202.08904, section 3.1: tokens count by their positions, from 1
            positions = np.arange(first + 1, len(states) + 1, dtype=np.float64)
            vector = (positions @ rows / positions.sum()).astype(np.float32)
        case _:
            divisor = len(rows) if pooling == "mean" else np.sqrt(len(rows))
            vector = (rows.sum(axis=0, dtype=np.float64) / divisor).astype(np.float32)
    return vector


def _whole_blocks(
    passes: TextPasses,
    pooling: Pooling,
    prompts: Sequence[Ids],
    names: Sequence[str],
    expansions: Sequence[int],
    pairs: Container[int],
) -> Iterator[Block]:
    """Yield the results of passes of whole prompts, as many as fit, in their order."""
    if any(expansions):
        expansion = query_expansion(passes.engine)
        seen = expansion is not None and expansion.seen
    else:
        expansions, seen = _of_one_type(passes.engine, prompts, pairs), True
    lengths = list(map(len, prompts))
    first = 0
    while first < len(prompts):
        room, end = max(passes.rows(), lengths[first]), first
        while end < len(prompts) and lengths[end] <= room:
            room -= lengths[end]
            end += 1
        call = TextCall(passes.engine.core, prompts[first:end], pooling, expansions[first:end], seen=seen)
        results = call.results(passes.run(call))
        if isinstance(results, list):
            for name, result in zip(names[first:end], results, strict=True):
                if isinstance(result, Exception):
                    raise _named(result, name, passes.engine) from result
        yield results
        first = end


def _of_one_type(engine: Engine, prompts: Sequence[Ids], pairs: Container[int]) -> list[int]:
    """Return how many last tokens of each prompt have the token type of its first.

    The engine counts types by separators, also by those that a single text spells.
    """
    config, frame = engine.config, engine.tokenizer.frame
    if config.token_types < 2 or config.separator_id < 0:
        return []
    usual = (frame.begin + frame.end).count(config.separator_id)
    if np.count_nonzero(np.concatenate(prompts) == config.separator_id) <= usual * len(prompts):
        return []
    spelled = (int(np.count_nonzero(ids == config.separator_id)) > usual for ids in prompts)
    return [len(prompts[i]) - 1 if more and i not in pairs else 0 for i, more in enumerate(spelled)]
