"""Requests of evaluation harnesses, computed together: likelihoods of continuations and of whole texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from metal_prefill.tasks._classification import encode_pair, score_continuations
from metal_prefill.tasks._text_passes import TextJob, TextPasses, compute

if TYPE_CHECKING:
    from metal_prefill.model import Model
    from metal_prefill.text._tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


def loglikelihood(
    model: Model, pairs: Sequence[tuple[str, str]], *, templated: bool = False
) -> list[tuple[float, bool]]:
    """Log likelihood of continuations, and whether each is what greedy decoding would write.

    Parameters
    ----------
    pairs
        Context and continuation of each. Contexts that are too long lose their beginning.
    templated
        Whether a chat template made the contexts: see `encode_templated`.
    """
    encode = partial(encode_templated, model.tokenizer) if templated else model.tokenizer.encode
    encoded = []
    for i, (context, continuation) in enumerate(pairs):
        try:
            encoded.append(_cut(model, *encode_pair(model.engine, context, continuation, encode)))
        except ValueError as error:
            raise ValueError(f"request {i}: {error}") from None
    return loglikelihood_of_tokens(model, encoded)


def loglikelihood_of_tokens(model: Model, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
    """As `loglikelihood`, of token ids that fit in the context."""
    names = [f"request {i}" for i in range(len(pairs))]
    scores = score_continuations(TextPasses(model.engine), pairs, names)
    greedy = _are_greedy(model, pairs, scores, names)
    return [
        (float(score.sum(dtype=np.float64)), is_greedy)
        for score, is_greedy in zip(scores, greedy, strict=True)
    ]


def encode_templated(tokenizer: Tokenizer, text: str) -> list[int]:
    """Turn text that a chat template made into tokens, with its control tokens.

    A template that spells the token that begins texts gets no second one.
    """
    ids = tokenizer.encode(text, add_bos=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids


def _are_greedy(
    model: Model,
    pairs: Sequence[tuple[Ids, Ids]],
    scores: Sequence[npt.NDArray[np.float32]],
    names: Sequence[str],
) -> list[bool]:
    """Whether each token of a continuation is the one of the largest logit.

    One of more than half of the probability is, and one that another continuation beats at its place is not.
    Only of the others the model is asked.
    """
    best: dict[bytes, float] = {}
    places = [
        [np.concatenate([context, continuation[:i]]).tobytes() for i in range(len(continuation))]
        for context, continuation in pairs
    ]
    for of_pair, score in zip(places, scores, strict=True):
        for place, value in zip(of_pair, score.tolist(), strict=True):
            best[place] = max(best.get(place, value), value)
    greedy = []
    jobs: dict[int, TextJob] = {}
    for i, (context, continuation) in enumerate(pairs):
        score = scores[i].tolist()
        greedy.append(all(best[place] == value for place, value in zip(places[i], score, strict=True)))
        if greedy[i] and min(score) <= np.log(0.5):
            tokens = np.concatenate([context, continuation[:-1]])
            jobs[i] = TextJob(tokens, "greedy", len(continuation), name=names[i])
    for _ in compute(TextPasses(model.engine), list(jobs.values())):
        pass
    for i, job in jobs.items():
        greedy[i] = bool((job.result == pairs[i][1]).all())
    return greedy


def _cut(model: Model, context: Ids, continuation: Ids) -> tuple[Ids, Ids]:
    """Drop the beginning of a context where both do not fit; the last token is only predicted."""
    most = model.max_context + 1 - len(continuation)
    if most < 1:
        raise ValueError(
            f"a continuation of {len(continuation)} tokens does not fit in the context of {model.max_context}"
        )
    return context[-most:], continuation


def loglikelihood_rolling(model: Model, texts: Sequence[str]) -> list[float]:
    """Log likelihood of whole texts, in windows as long as the context. See `rolling_windows`."""
    pairs: list[tuple[Ids, Ids]] = []
    owners: list[int] = []
    for i, text in enumerate(texts):
        for pair in rolling_windows(model, text):
            pairs.append(pair)
            owners.append(i)
    sums = [0.0] * len(texts)
    scores = score_continuations(TextPasses(model.engine), pairs, [f"text {i}" for i in owners])
    for i, score in zip(owners, scores, strict=True):
        sums[i] += float(score.sum(dtype=np.float64))
    return sums


def rolling_windows(model: Model, text: str) -> Iterator[tuple[Ids, Ids]]:
    """Yield the known tokens and those to predict, one window after another, as lm-eval defines them.

    The first token is predicted from the one that begins texts, or that ends them where there is none.
    Each other token is predicted once; the last window reaches back to fill the context.
    """
    tokenizer = model.tokenizer
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise ValueError("the vocabulary has no token that begins or ends a text")
    ids = np.array([start, *tokenizer.encode(text, add_bos=False)], np.int32)
    most = model.max_context
    for first in range(1, len(ids), most):
        end = min(first + most, len(ids))
        yield ids[max(0, end - 1 - most) : first], ids[first:end]


def generate_until(
    model: Model, requests: Sequence[tuple[str, int, Sequence[str]]], *, templated: bool = False
) -> list[str]:
    """Continue prompts greedily, each up to its number of tokens or one of its strings.

    Prompts that leave no room for the tokens lose their beginning. `templated`: see `loglikelihood`.
    """
    tokenizer = model.tokenizer
    answers = [""] * len(requests)
    prompts = []
    for prompt, max_tokens, stop in requests:
        ids = encode_templated(tokenizer, prompt) if templated else tokenizer.encode(prompt)
        most = model.max_context - min(max_tokens, model.max_context - 1)
        prompts.append((ids[-most:], {"max_tokens": max_tokens, "stop": tuple(stop)}))
    for i, piece in model.generate_many(prompts):
        answers[i] += str(piece)
    return answers
