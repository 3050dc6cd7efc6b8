"""Passes over many texts that are each computed once, without keeping their K and V."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import Progress
from metal_prefill.engine import Engine
from metal_prefill.errors import NumericalError
from metal_prefill.files._task_config import Pooling
from metal_prefill.tasks._prompts import query_expansion

Ids = npt.NDArray[np.int32]
# Vectors of several texts, [texts, dim], or an array for each text.
Block: TypeAlias = npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]
NameOf: TypeAlias = Callable[[int], str]  # returns the name of a text in errors, given its index
TEXT: NameOf = "text {}".format
Item = TypeVar("Item")
Array = TypeVar("Array", bound=npt.NDArray[Any])

# Poolings of a text that the engine computes.
_ENGINE_POOLINGS = ("none", "mean", "cls", "last")
# Texts, and tokens whose states are returned, that are computed in one call; these bound its memory.
MOST_TEXTS, MOST_STATES = 1024, 16384


class TextPasses:
    """Computes requests on an engine: at once, or in passes that a server shares among requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, requests: Sequence[_core.Computation], progress: Progress | None = None) -> list[Any]:
        """Compute requests, and return the result or exception of each."""
        return self.engine.core.forward_batch(list(requests), progress)

    def scratch(self) -> _core.Scratch:
        """Return an owner of requests without sessions, which share their prefixes."""
        return _core.Scratch(self.engine.core)

    def compute(
        self,
        requests: Sequence[_core.Request],
        name_of: NameOf,
        progress: Progress | None = None,
        first: int = 0,  # number of the first text in names
    ) -> list[Any]:
        """Return the result of each request; the first error is raised with the name of its text.

        `progress` is called after each pass with the number of requests done and their total.
        """
        results: list[Any] = []
        for part in _slices([1] * len(requests), MOST_TEXTS):
            some = requests[part]
            report = (
                None if progress is None else partial(_report, progress, some, len(results), len(requests))
            )
            results += self.run(some, report)
            self.check(results[part], name_of, first + part.start)
        return results

    def check(self, results: Sequence[Any], name_of: NameOf, first: int = 0) -> None:
        """Raise the first exception among results of texts from `first` on, with the name of its text."""
        for i, result in enumerate(results, first):
            if isinstance(result, Exception):
                too_narrow = isinstance(result, NumericalError) and self.engine.kv_dtype == "f16"
                hint = "; if keys or values exceed 65504, kv_dtype='f32' stores them" if too_narrow else ""
                raise type(result)(f"{name_of(i)}: {result}{hint}") from result


def reported(items: Iterable[Item], count: int, progress: Progress | None) -> Iterator[Item]:
    """Yield items, and report after each the number done."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, count)


def finite(values: Array, what: str) -> Array:
    """Return values; raise NumericalError, in which `what` names one, if one is infinite or NaN."""
    if not np.isfinite(values).all():
        raise NumericalError(f"{what} is {values[~np.isfinite(values)][0]}")
    return values


def _report(progress: Progress, some: Sequence[_core.Request], before: int, total: int, *_: int) -> None:
    progress(before + sum(request.finished for request in some), total)


def _slices(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Divide texts into parts of one text, or of a total size of at most `most`."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def pooled_states(
    passes: TextPasses,
    pooling: Pooling,
    prompts: Sequence[Ids],
    segments: Sequence[int] = (),
    name_of: NameOf = TEXT,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the pooled hidden states of each prompt, ``[dim]``, or all of them, ``[n, dim]``.

    If any prompt has two texts, `segments` are the numbers of tokens up to the second one. `name_of` returns
    the names of prompts in errors.
    """
    for block in pooled_blocks(passes, pooling, prompts, segments=segments, name_of=name_of):
        yield from block


def pooled_blocks(
    passes: TextPasses,
    pooling: Pooling,
    prompts: Sequence[Ids],
    expansions: Sequence[int] = (),
    segments: Sequence[int] = (),
    unpooled: int = 0,
    name_of: NameOf = TEXT,
) -> Iterator[Block]:
    """Yield the results of `pooled_states` for several prompts together; a shared prefix is computed once.

    `expansions` are the numbers of last tokens that expand queries, if any prompt has some. Pooling omits
    the first `unpooled` tokens of each prompt.
    """
    if pooling != "none" and (unpooled or pooling not in _ENGINE_POOLINGS):
        for block in pooled_blocks(passes, "none", prompts, expansions, segments, name_of=name_of):
            yield [pooled(states, pooling, unpooled) for states in block]
        return
    if not passes.engine.config.causal:  # each prompt goes through the layers whole
        expansion = query_expansion(passes.engine) if any(expansions) else None
        seen = expansion is not None and expansion.seen
        for part in _slices(list(map(len, prompts)), MOST_STATES):
            results = whole_texts(passes, prompts[part], pooling, expansions[part], segments[part], seen=seen)
            if isinstance(results, list):
                passes.check(results, name_of, part.start)
            yield results
        return
    rows = [1 if pooling == "last" else len(ids) for ids in prompts]
    for part in _slices(rows, MOST_TEXTS if pooling == "last" else MOST_STATES):
        scratch = passes.scratch()
        requests = [
            _core.Request.hidden(scratch, ids, n) for ids, n in zip(prompts[part], rows[part], strict=True)
        ]
        found = passes.compute(requests, name_of, first=part.start)
        states = [values.reshape(-1, passes.engine.config.dim) for values in found]
        if pooling == "none":
            yield states
        else:
            # The mean of all states at once, however passes divide them: sums of parts round differently.
            yield [pooled(values, pooling) for values in states]


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


def whole_texts(
    passes: TextPasses,
    texts: Sequence[Ids],  # token ids of each text, int32 ``[n]``, at least one
    pooling: Pooling,  # result of a text: one vector of its hidden states, or with ``"none"`` all of them
    # Number of last tokens of each text that expand a query; empty if no text has any.
    expansions: Sequence[int] = (),
    # Number of first tokens of each text with type 0; empty if all tokens have it.
    segments: Sequence[int] = (),
    *,
    seen: bool = False,  # whether tokens attend to the expansions
) -> Any:
    """Return the vectors of texts, float32 ``[texts, dim]``, each computed as a whole in one pass.

    With pooling ``"none"``, they are a list with float32 ``[n, dim]`` for each text. If a text failed, the
    result is a list with an exception in its place.
    """
    tokens, lengths = np.concatenate(texts), np.array([len(ids) for ids in texts], np.int32)
    first = np.array(segments, np.int32) if len(segments) else None
    added = np.array(expansions, np.int32) if any(expansions) else None
    request = _core.Texts(passes.engine.core, tokens, lengths, pooling, first, added, seen)
    ((values, errors),) = passes.run([request])
    if pooling != "none":
        vectors = values.reshape(len(lengths), -1)
        return [errors.get(i, vector) for i, vector in enumerate(vectors)] if errors else vectors
    states = np.split(values.reshape(len(tokens), -1), np.cumsum(lengths)[:-1])
    return [errors.get(i, found) for i, found in enumerate(states)]
