"""Text generation for completions and chat: options, streams, choices, usage."""

import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from metal_prefill.errors import ConstraintError
from metal_prefill.generation._constraint_process import NoWorkerError
from metal_prefill.generation._sampling import SAMPLING
from metal_prefill.generation._stream import Stream
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._errors import ApiError, unsupported
from metal_prefill.serve._forms import StructuredOutputs, TextForm
from metal_prefill.serve._service import Held, Service
from metal_prefill.session import Piece
from metal_prefill.text._tokenizer import Tokenizer

# Finish reasons of this package and OpenAI's names for them.
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}
# Limits of a request: each character is compared with each stop string, which holds back up to its length.
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 1000
MOST_ANSWER = 1 << 27  # bytes of an answer, besides the text that a model generates
MOST_ESCAPED = 6  # bytes in JSON of a byte of text
# Of a request: 1 + `logprobs` for each token of its prompts, if they are scored, and of its answers.
# 8,192 tokens with the 20 best have a sixth.
MOST_SCORES = 1 << 20
_SCORE_BYTES = 32  # of one in JSON, at most, if its token is a word
LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent


def options_of(form: TextForm, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return generation options with OpenAI's defaults: temperature 1, no filter."""
    options: dict[str, Any] = {
        "temperature": 1.0,
        "seed": None if form.seed is None else form.seed % 2**64,
        "stop": _stops(form),
    }
    for name in (*SAMPLING, "min_tokens", "regex", "grammar"):
        if (value := getattr(form, name)) is not None:
            options[name] = value
    if form.repetition_penalty is not None:
        options["repeat_penalty"] = form.repetition_penalty
    if form.ignore_eos:
        ignored = dict.fromkeys(tokenizer.stop_ids, -math.inf)
        options["logit_bias"] = {**options.get("logit_bias", {}), **ignored}
    return options | constraint_of(form.structured_outputs)


def constraint_of(outputs: StructuredOutputs | None) -> dict[str, Any]:
    """Return the option for a constraint in vLLM's form."""
    if outputs is None:
        return {}
    given = {
        "json_schema": {"type": "object"} if outputs.json_object else outputs.json,
        "regex": outputs.regex,
        "grammar": outputs.grammar,
    }
    if outputs.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        given["grammar"] = f"start: {choices}"
    return {kind: source for kind, source in given.items() if source is not None}


@contextmanager
def constraint_errors(form: TextForm, field: str | None = None) -> Iterator[None]:
    """Name the field that has the constraint of a text, by default one of the form, in errors about it."""
    try:
        yield
    except NoWorkerError:
        raise
    except ConstraintError as error:
        given = (
            name for name in ("regex", "grammar", "structured_outputs") if getattr(form, name) is not None
        )
        raise ApiError(str(error), param=field or next(given, None), code="invalid_constraint") from None


def _stops(form: TextForm) -> list[str]:
    stops = [form.stop] if isinstance(form.stop, str) else form.stop or []
    if len(stops) > MOST_STOPS:
        raise ApiError(
            f"stop: {len(stops)} stop strings; the limit is {MOST_STOPS}", param="stop", code="invalid_value"
        )
    for i, stop in enumerate(stops):
        if len(stop) > MOST_STOP_CHARACTERS:
            param = "stop" if isinstance(form.stop, str) else f"stop[{i}]"
            raise ApiError(
                f"{param}: a stop string of {len(stop)} characters; the limit is {MOST_STOP_CHARACTERS}",
                param=param,
                code="invalid_value",
            )
    return stops


def check_count(service: Service, texts: int, param: str = "n") -> int:
    """Return the number of texts; raise `ApiError` if there are too many or the model is an encoder."""
    if texts > service.settings.max_texts:
        raise ApiError(
            f"the request asks for {texts} texts; the limit is {service.settings.max_texts}",
            code="too_many_texts",
            param=param,
        )
    if service.no_text:
        raise unsupported(f"{service.names[0]} does not generate text: {service.no_text}")
    return texts


def most_tokens(texts: int, logprobs: int) -> int:
    """Return the maximum number of tokens of each text if the prompts are not scored."""
    return max(MOST_SCORES // (texts * (1 + logprobs)), 1)


class Scores:
    """JSON lists of the log probabilities of a text, encoded as they grow.

    Encoded, they take a tenth of the memory of Python objects.
    """

    def __init__(self, tokenizer: Tokenizer, held: Held) -> None:
        self.tokenizer = tokenizer
        self._held = held  # by all texts of the request
        self._chunks: dict[str, list[bytes]] = {}

    def extend(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append items to the list of each name."""
        for name, items in lists.items():
            chunks = self._chunks.setdefault(name, [])
            if items:
                chunks.append(msgspec.json.encode(items)[1:-1])
                self._held.add(len(chunks[-1]))
                self._held.check()

    def whole(self) -> dict[str, msgspec.Raw]:
        """Return the list of each name, and release the chunks."""
        chunks, self._chunks = self._chunks, {}
        return {name: msgspec.Raw(b"[%b]" % b",".join(chunks.pop(name))) for name in list(chunks)}


@contextmanager
def scores_of(
    service: Service, streams: Sequence[Stream], logprobs: int | None
) -> Iterator[Sequence[Scores | None]]:
    """Return lists for each text; their bytes count as in flight until the end of the context.

    They are None if no log probabilities are requested. Memory for those of prompts, which arrive
    fast, is reserved from the start.
    """
    if logprobs is None:
        yield [None] * len(streams)
        return
    count = sum(stream.text.most_pieces for stream in streams) * (1 + logprobs)
    if count > MOST_SCORES:
        raise ApiError(
            f"logprobs: up to {count} log probabilities of prompts and answers; the limit is {MOST_SCORES}",
            param="logprobs",
            code="too_many_logprobs",
        )
    reserved = sum(stream.scored_tokens for stream in streams) * (1 + logprobs) * _SCORE_BYTES
    in_flight = service.scores
    with in_flight.holding(reserved) as held:
        in_flight.check()
        yield [Scores(service.engine.tokenizer, held) for _ in streams]


@dataclass
class Choice:
    """Text of an answer as far as the engine loop has reported; its stream may be ahead."""

    index: int
    stream: Stream
    scores: Scores | None  # None unless log probabilities are requested
    pieces: list[Piece] = field(default_factory=list)  # without the most probable tokens
    ended: bool = False

    @property
    def finish_reason(self) -> str | None:
        """Reason that the text ended, with OpenAI's name; None while it continues."""
        return FINISH_REASONS.get(self.stream.finish_reason or "") if self.ended else None

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning, with its tags."""
        return 0

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the events of a pass, whose pieces were already added to `pieces`."""
        raise NotImplementedError

    def logprobs(self, tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        """Return the log probabilities of a pass as lists by name."""
        raise NotImplementedError

    def score(self, pieces: Sequence[Piece]) -> None:
        """Keep the log probabilities of a pass, if requested, for an answer that is not streamed."""
        if self.scores is not None:
            self.scores.extend(self.logprobs(self.scores.tokenizer, pieces))

    def whole(self) -> dict[str, Any]:
        """Return the complete text, for answers that are not streamed."""
        raise NotImplementedError


async def generate(
    service: Service, choices: Sequence[Choice], request: str, begin: float
) -> AsyncGenerator[list[tuple[Choice, list[Piece]]], None]:
    """Generate texts and yield the pieces of each pass by text; closing the iterator cancels them.

    `request` is the id of the answer, and `begin` the time of the request. The first error in a text is
    raised and ends the others.
    """
    metrics, activity = service.metrics, service.activity
    streams = [choice.stream for choice in choices]
    metrics.count_change(activity.enter(request, streams))
    texts = service.loop.enter(streams)
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
                if choice.stream.first and not choice.pieces:
                    metrics.count_prompt(choice.stream)
                choice.pieces += [
                    replace(piece, top_logprobs=()) if piece.top_logprobs else piece for piece in text.pieces
                ]
                metrics.generated_tokens.inc(len(text.pieces))
            yield [(choices[text.text], text.pieces) for text in made]
        service.note_prompts(streams)
    finally:
        texts.cancel()
        activity.leave(streams)


def head_of(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields common to all pieces of an answer."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


_Choice = TypeVar("_Choice", bound=Choice)


async def send_choices(
    service: Service,
    form: TextForm,
    reply: Reply,
    choices: Sequence[_Choice],
    head: Mapping[str, Any],
    select: Callable[[Sequence[_Choice]], Sequence[_Choice]] = tuple,
) -> bytes | None:
    """Generate texts, and send them as a stream of events or return the answer, with those that are selected.

    A client may take long to receive an answer, of texts that have ended.
    """
    with_usage = form.stream_options is not None and form.stream_options.include_usage
    no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
    async with aclosing(generate(service, choices, head["id"], reply.begin)) as passes:
        async for made in passes:
            if form.stream:
                chunks = [chunk for choice, pieces in made for chunk in choice.chunks(pieces)]
                await reply.events(*({**head, "choices": [chunk], **no_usage} for chunk in chunks))
            else:
                for choice, pieces in made:
                    choice.score(pieces)

    def last(texts: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": usage_of(choices), "timings": timings_of(choices, reply.begin)}
        return {**head, "choices": texts, **usage}

    if not form.stream:

        def assembled() -> bytes:
            return msgspec.json.encode(last([choice.whole() for choice in select(choices)]))

        # Log probabilities of many texts take seconds, in which the event loop serves other clients.
        return await service.prepare(assembled)
    if with_usage:
        await reply.events(last([]))
    await reply.end_of_events()
    return None


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return token counts; each prompt counts once."""
    streams = [choice.stream for choice in choices if choice.stream.first]
    prompt = sum(s.prompt_tokens for s in streams)
    made = sum(len(c.pieces) - c.stream.scored_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in streams)},
        "completion_tokens_details": {"reasoning_tokens": sum(c.reasoning_tokens for c in choices)},
    }


def timings_of(choices: Sequence[Choice], begin: float) -> dict[str, float]:
    """Return the parts of the time from a request at `begin` to its last token, in seconds.

    They follow one another: the wait for the first pass with a part of the prompts; the passes until each
    text has its first token; the passes of further tokens. Passes are shared with other requests.
    """
    streams = [choice.stream for choice in choices]
    started = min((s.started for s in streams if s.started is not None), default=begin)
    first = max((s.first_token for s in streams if s.first_token is not None), default=started)
    last = max((s.last_token for s in streams if s.last_token is not None), default=first)
    return {
        "queue_seconds": round(started - begin, 6),
        "prefill_seconds": round(first - started, 6),
        "decode_seconds": round(last - first, 6),
    }


def spelling(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Return a token's text, with incomplete characters in OpenAI's notation, and its bytes."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode(), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def logprob(value: float | None) -> float:
    """Return a log probability that JSON can represent."""
    return LEAST_LOGPROB if value is None else max(value, LEAST_LOGPROB)
