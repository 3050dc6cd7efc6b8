"""Batched requests of evaluation harnesses: likelihoods of continuations and of whole texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill.tasks._pairs import encode_continuation, score_continuations
from metal_prefill.tasks._prompts import numbered
from metal_prefill.tasks._text_passes import Ids, TextPasses

if TYPE_CHECKING:
    from metal_prefill.model import Model
    from metal_prefill.text._tokenizer import Tokenizer


def loglikelihood(
    model: Model, pairs: Sequence[tuple[str, str]], *, templated: bool = False
) -> list[tuple[float, bool]]:
    """Return the log likelihood of continuations, and whether greedy decoding would produce each.

    Contexts that are too long are truncated from the left. `templated`: whether a chat template rendered
    them; see `encode_templated`.
    """
    encode = partial(encode_templated, model.tokenizer) if templated else model.tokenizer.encode
    divided = (encode_continuation(model.engine, *pair, encode) for pair in pairs)
    encoded = list(numbered((_cut(model, *pair) for pair in divided), "request"))
    scores = score_continuations(TextPasses(model.engine), encoded, "request {}".format)
    greedy = _are_greedy(model, encoded, scores)
    return [
        (float(score.sum(dtype=np.float64)), is_greedy)
        for score, is_greedy in zip(scores, greedy, strict=True)
    ]


def encode_templated(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text that a chat template rendered, including its control tokens.

    The beginning-of-text token is added only if the template did not render it.
    """
    ids = tokenizer.encode(text, add_bos=False, parse_special=True)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids


def _are_greedy(
    model: Model, pairs: Sequence[tuple[Ids, Ids]], scores: Sequence[npt.NDArray[np.float32]]
) -> list[bool]:
    """Whether each token of a continuation has the largest logit, for each pair.

    A token with more than half of the probability has; a token that is less probable than that of another
    continuation at the same position has not. The model computes only the remaining cases.
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
    passes, unsure = TextPasses(model.engine), []
    for i, of_pair in enumerate(places):
        score = scores[i].tolist()
        greedy.append(all(best[place] == value for place, value in zip(of_pair, score, strict=True)))
        if greedy[i] and min(score) <= np.log(0.5):
            unsure.append(i)
    scratch = passes.scratch()
    requests = [
        _core.Request.greedy(scratch, np.concatenate([context, continuation[:-1]]), rows=len(continuation))
        for context, continuation in (pairs[i] for i in unsure)
    ]
    for i, chosen in zip(unsure, passes.compute(requests, lambda i: f"request {unsure[i]}"), strict=True):
        greedy[i] = chosen == pairs[i][1].tolist()
    return greedy


def _cut(model: Model, context: Ids, continuation: Ids) -> tuple[Ids, Ids]:
    """Truncate a context from the left to fit both; the last token is only predicted."""
    most = model.max_context + 1 - len(continuation)
    if most < 1:
        raise ValueError(
            f"a continuation of {len(continuation)} tokens does not fit in the context of {model.max_context}"
        )
    return context[-most:], continuation


def loglikelihood_rolling(model: Model, texts: Sequence[str]) -> list[float]:
    """Return the log likelihood of whole texts, in windows as long as the context; see `rolling_windows`."""
    windows = [(i, window) for i, text in enumerate(texts) for window in rolling_windows(model, text)]
    pairs, sums = [window for _, window in windows], [0.0] * len(texts)
    scores = score_continuations(TextPasses(model.engine), pairs, lambda i: f"text {windows[i][0]}")
    for (i, _), score in zip(windows, scores, strict=True):
        sums[i] += float(score.sum(dtype=np.float64))
    return sums


def rolling_windows(model: Model, text: str) -> Iterator[tuple[Ids, Ids]]:
    """Yield the known tokens and the tokens to predict of each window, as lm-eval defines them.

    The first token is predicted from the beginning-of-text token, or from the end-of-text token if there is
    none. Each other token is predicted once; the last window reaches back to fill the context.
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
    """Continue prompts greedily, each up to its number of tokens or one of its stop strings.

    Prompts that leave no room for the tokens are truncated from the left. `templated` is as for
    `loglikelihood`.
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
