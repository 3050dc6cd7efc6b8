"""Log probabilities of texts that continue others, such as labels and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from metal_prefill.engine import Engine
from metal_prefill.tasks._text_passes import Ids, TextJob, TextPasses, compute, shared_prefix


def encode_continuation(
    engine: Engine, context: str, continuation: str, encode: Callable[[str], list[int]] | None = None
) -> tuple[Ids, Ids]:
    """Return the tokens of a text and of its continuation, which are encoded together and then divided.

    Spaces at the end of the text become part of the continuation, to whose first token they belong. A text
    without tokens becomes the token that begins texts, or the one that ends them.
    """
    tokenizer = engine.tokenizer
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    encode = tokenizer.encode if encode is None else encode
    before = encode(context)
    whole = encode(context + continuation)
    if not before:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if start is None:
            raise ValueError("there is no token before it")
        before, whole = [start], [start, *whole]
    after = whole[len(before) :]
    if not after:
        raise ValueError("it has no tokens")
    return np.array(whole[: len(before)], np.int32), np.array(after, np.int32)


def score_continuations(
    passes: TextPasses, pairs: Sequence[tuple[Ids, Ids]], names: Sequence[str]
) -> list[npt.NDArray[np.float32]]:
    """Return the log probability of each token of each continuation, given its context.

    The prefix that all contexts share is computed once, and each context once for all of its continuations.
    The head is computed only for the rows whose next token belongs to a continuation.
    """
    if not pairs:
        return []
    contexts = [context for context, _ in pairs]
    shared = shared_prefix(contexts)
    root = TextJob(contexts[0][:shared], "none", name=names[0]) if shared else None
    jobs: list[TextJob] = [] if root is None else [root]
    scored: list[TextJob] = []
    groups: dict[bytes, list[int]] = {}
    for i, context in enumerate(contexts):
        groups.setdefault(context.tobytes(), []).append(i)
    for members in groups.values():
        context = contexts[members[0]][shared:]
        parent = root
        if len(members) > 1 and len(context) > 1:
            parent = TextJob(context[:-1], "none", parent=root, name=names[members[0]])
            jobs.append(parent)
            context = context[-1:]
        for i in members:
            continuation = pairs[i][1]
            job = TextJob(
                np.concatenate([context, continuation]), "log_probs", len(continuation), parent, names[i]
            )
            jobs.append(job)
            scored.append(job)
    order = [i for members in groups.values() for i in members]
    place = {id(job): i for job, i in zip(scored, order, strict=True)}
    results: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(pairs)
    for job in compute(passes, jobs):
        if id(job) in place:
            results[place[id(job)]] = job.result
    return results
