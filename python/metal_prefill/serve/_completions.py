"""``/v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from metal_prefill.scheduler import make_streams
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import CompletionForm, TokenOrText
from metal_prefill.serve._reply import Reply
from metal_prefill.serve._service import Service
from metal_prefill.serve._texts import (
    Choice,
    check_count,
    choices_of,
    generate,
    logprob,
    options_of,
    spelling,
    usage_of,
)
from metal_prefill.session import Piece
from metal_prefill.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def prompts_of(prompt: str | list[TokenOrText], param: str) -> list[str | list[int]]:
    """Return the prompts of a field that holds a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if not prompts or len(prompts) < len(prompt):
        raise ApiError(400, f"{param} is a text, token ids, or a list of either", param=param)
    return prompts


async def complete(service: Service, form: CompletionForm, reply: Reply) -> None:
    """Continue prompts."""
    begin = time.perf_counter()
    name = service.check_model(form.model)
    prompts = prompts_of(form.prompt, "prompt")
    n = form.n or 1
    if form.best_of not in (None, n):
        raise ApiError(400, f"best_of must be n, which is {n}; got {form.best_of}", param="best_of")
    if form.suffix:
        raise ApiError(400, "suffix: this model continues texts, and fills no gaps", param="suffix")
    count = check_count(service, n * len(prompts))
    max_tokens = DEFAULT_MAX_TOKENS if form.max_tokens is None else form.max_tokens
    scored = bool(form.echo) and form.logprobs is not None
    options = {
        **options_of(form),
        "logprobs": form.logprobs,
        "echo": bool(form.echo),
        "prompt_logprobs": scored,
    }
    if max_tokens == 0 and not scored:
        raise ApiError(
            400, "max_tokens may be 0 where the prompt is scored: with echo and logprobs", param="max_tokens"
        )
    with service.admitted(count):
        streams = await service.streams(
            lambda: [s for p in prompts for s in make_streams(service.model, p, n, max_tokens, **options)]
        )
        choices = choices_of(streams, n)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        head["model"] = name
        with_usage = form.stream_options is not None and form.stream_options.include_usage
        async with aclosing(generate(service, choices, begin)) as passes:
            async for made in passes:
                for choice, text in made if form.stream else ():
                    if (chunk := _chunk(service, form, choice, text.pieces)) is not None:
                        usage = {"usage": None} if with_usage else {}
                        await reply.event({**head, "choices": [chunk], **usage})
        usage = usage_of(choices)
        if form.stream:
            if with_usage:
                await reply.event({**head, "choices": [], "usage": usage})
            await reply.end_of_events()
            return
        whole = [_chunk(service, form, choice, choice.pieces) for choice in choices]
        await reply.json({**head, "choices": whole, "usage": usage})


def _chunk(
    service: Service, form: CompletionForm, choice: Choice, pieces: Sequence[Piece]
) -> dict[str, Any] | None:
    """Return a piece of a choice; None where there is nothing to tell of it."""
    text = "".join(piece.text for piece in pieces)
    reason = choice.finish_reason
    if not text and reason is None and form.logprobs is None:
        return None
    logprobs = None
    if form.logprobs is not None:
        logprobs = _logprobs(service.model.tokenizer, choice, pieces)
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(tokenizer: Tokenizer, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    best: list[dict[str, float] | None] = []

    def add(token: int) -> None:
        tokens.append(spelling(tokenizer, token)[0])
        offsets.append(choice.length)
        choice.length += len(tokens[-1])

    if choice.stream.scored_tokens and choice.length == 0:
        add(int(choice.stream.prompt[0]))  # which nothing was before to predict it
        values.append(None)
        best.append(None)
    for piece in pieces:
        add(piece.token)
        values.append(logprob(piece.logprob))
        best.append({spelling(tokenizer, token)[0]: logprob(p) for token, p in piece.top_logprobs})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}
