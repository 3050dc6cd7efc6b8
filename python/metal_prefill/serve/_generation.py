"""What completions and chat have in common: options, streams, choices, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from metal_prefill.generation._engine_loop import Made
from metal_prefill.generation._stream import Stream
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import TextForm
from metal_prefill.serve._reply import Reply
from metal_prefill.serve._service import Service
from metal_prefill.session import Piece
from metal_prefill.text._tokenizer import Tokenizer

# What a text of this package ends for, in OpenAI's words.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}
# Of a request: each is looked for in each character of a text, and that many characters may be held back.
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 1000
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no number for


def options_of(form: TextForm) -> dict[str, Any]:
    """Return the options of a text, with OpenAI's defaults: temperature 1, no filter."""
    options: dict[str, Any] = {
        "temperature": 1.0,
        "seed": None if form.seed is None else form.seed % 2**64,
        "stop": _stops(form),
    }
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "min_tokens",
        "regex",
        "grammar",
    ):
        if (value := getattr(form, name)) is not None:
            options[name] = value
    return options


def _stops(form: TextForm) -> list[str]:
    stops = [form.stop] if isinstance(form.stop, str) else form.stop or []
    if len(stops) > MOST_STOPS:
        raise ApiError(
            400,
            f"stop: {len(stops)} stop strings; the limit is {MOST_STOPS}",
            param="stop",
            code="invalid_value",
        )
    for i, stop in enumerate(stops):
        if len(stop) > MOST_STOP_CHARACTERS:
            param = "stop" if isinstance(form.stop, str) else f"stop[{i}]"
            raise ApiError(
                400,
                f"{param}: a stop string of {len(stop)} characters; the limit is {MOST_STOP_CHARACTERS}",
                param=param,
                code="invalid_value",
            )
    return stops


def check_count(service: Service, texts: int) -> int:
    """Return how many texts a request asks for; raises ApiError for too many, or for a model of none."""
    if texts > service.settings.max_texts:
        raise ApiError(
            400,
            f"{texts} texts are asked for; the limit of a request is {service.settings.max_texts}",
            code="too_many_texts",
            param="n",
        )
    if not service.model.config.causal:
        raise ApiError(400, f"{service.names[0]} makes vectors of texts, and no text", code="unsupported")
    return texts


@dataclass
class Choice:
    """A text of an answer, as far as the engine loop has told; its stream may be ahead."""

    index: int
    stream: Stream
    counts_prompt: bool  # the first text of its prompt
    pieces: list[Piece] = field(default_factory=list)
    ended: bool = False

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in OpenAI's words; None while it has not."""
        return FINISH_REASONS.get(self.stream.finish_reason or "") if self.ended else None

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return events of what a pass brought, which is among its pieces already."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """Return all of it, where there were no events."""
        raise NotImplementedError


async def generate(
    service: Service, choices: Sequence[Choice], begin: float
) -> AsyncGenerator[list[tuple[Choice, Made]], None]:
    """Compute texts and yield what each pass brings; closing the iterator cancels them.

    Raises the first error of a text, which ends the others.
    """
    metrics = service.metrics
    texts = service.loop.enter([choice.stream for choice in choices])
    first = True
    try:
        async for made in texts:
            if first:
                metrics.first_token_seconds.observe(time.perf_counter() - begin)
                first = False
            for text in made:
                choice = choices[text.text]
                choice.ended = text.ended
                if text.ended and choice.stream.error is not None:
                    raise choice.stream.error
                if choice.counts_prompt and not choice.pieces:
                    metrics.count_prompt(choice.stream)
                choice.pieces += text.pieces
                metrics.generated_tokens.inc(len(text.pieces))
            yield [(choices[text.text], text) for text in made]
        service.note_prompts(choice.stream for choice in choices)
    finally:
        texts.cancel()


def head_of(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return what every piece of an answer begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


async def send_choices(
    service: Service,
    form: TextForm,
    reply: Reply,
    choices: Sequence[Choice],
    head: Mapping[str, Any],
    begin: float,
) -> None:
    """Compute texts and send them, as events while they are made or as one answer."""
    with_usage = form.stream_options is not None and form.stream_options.include_usage
    no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
    async with aclosing(generate(service, choices, begin)) as passes:
        async for made in passes:
            for choice, text in made if form.stream else ():
                for chunk in choice.chunks(text.pieces):
                    await reply.event({**head, "choices": [chunk], **no_usage})
    usage = usage_of(choices)
    if not form.stream:
        await reply.json({**head, "choices": [choice.whole() for choice in choices], "usage": usage})
        return
    if with_usage:
        await reply.event({**head, "choices": [], "usage": usage})
    await reply.end_of_events()


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Count tokens, those of a prompt once."""
    streams = [choice.stream for choice in choices if choice.counts_prompt]
    prompt = sum(s.prompt_tokens for s in streams)
    made = sum(len(c.pieces) - c.stream.scored_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in streams)},
    }


def spelling(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Return a token's text, as OpenAI spells what is no whole character, and its bytes."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode(), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def logprob(value: float | None) -> float:
    """Return a log probability that JSON can hold."""
    return LEAST_LOGPROB if value is None else max(value, LEAST_LOGPROB)
