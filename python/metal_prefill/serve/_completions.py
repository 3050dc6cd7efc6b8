"""Endpoints ``/v1/completions``, ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from metal_prefill.generation._stream import Stream, check_size, make_streams
from metal_prefill.serve._chat import chat_tokens
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._errors import ApiError, unsupported
from metal_prefill.serve._forms import ChatForm, CompletionForm, DetokenizeForm, TokenizeForm, TokenOrText
from metal_prefill.serve._generation import (
    MOST_ANSWER,
    MOST_ESCAPED,
    Choice,
    check_count,
    constraint_errors,
    head_of,
    logprob,
    options_of,
    scores_of,
    send_choices,
    spelling,
)
from metal_prefill.serve._service import Service
from metal_prefill.session import Piece
from metal_prefill.text._tokenizer import Tokenizer
from metal_prefill.text._vocabulary import TokenDecoder

DEFAULT_MAX_TOKENS = 16  # OpenAI's default
MOST_ECHOED = MOST_ANSWER // MOST_ESCAPED  # bytes of the prompts in an answer


def prompts_of(prompt: str | list[TokenOrText], param: str) -> list[str | list[int]]:
    """Return the prompts in a field, which is a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # a list may have millions of items
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if not prompt or int in kinds:
        raise ApiError(f"{param} must be a text, token ids, or a list of either", param=param)
    return cast("list[str | list[int]]", prompt)


async def complete(service: Service, form: CompletionForm, reply: Reply) -> None:
    prompts = prompts_of(form.prompt, "prompt")
    made = candidates_of(form)
    count = check_count(service, made * len(prompts), "n" if form.best_of is None else "best_of")
    max_tokens = DEFAULT_MAX_TOKENS if form.max_tokens is None else form.max_tokens
    scored = bool(form.echo) and form.logprobs is not None
    options = {
        **options_of(form, service.engine.tokenizer),
        "logprobs": 0 if form.logprobs is None and made > (form.n or 1) else form.logprobs,
        "echo": bool(form.echo),
        "prompt_logprobs": scored,
        "prefix_namespace": reply.namespace,
    }
    if max_tokens == 0 and not scored:
        raise ApiError("max_tokens may be 0 only with echo and logprobs", param="max_tokens")

    def streams_of(prompt: str | list[int]) -> list[Stream]:
        engine = service.engine
        ids = _prompt_tokens(service, form, prompt) if isinstance(prompt, str) else prompt
        with constraint_errors(form):
            streams = make_streams(engine, ids, made, max_tokens, **options)
        if form.echo and isinstance(prompt, str):
            for stream in streams:
                stream.text.echo = prompt
        return streams

    def all_streams() -> list[Stream]:
        streams = [stream for prompt in prompts for stream in streams_of(prompt)]
        token_bytes = service.engine.tokenizer.token_bytes
        if form.echo and sum(len(token_bytes(t)) for s in streams for t in s.prompt.tolist()) > MOST_ECHOED:
            raise ApiError(
                f"echo: more than {MOST_ECHOED} bytes of prompts", param="echo", code="answer_too_large"
            )
        return streams

    with service.admitted(count):
        streams = await service.streams(all_streams)
        reply.end_turn()
        with scores_of(service, streams, form.logprobs) as scores:
            choices = [
                CompletionChoice(i, s, scores[i], known=s.prompt_tokens if scored else 0)
                for i, s in enumerate(streams)
            ]
            head = head_of("cmpl", "text_completion", reply.model)
            best = partial(best_texts, made, form.n or 1)
            answer = await send_choices(service, form, reply, choices, head, best)
    if answer is not None:
        await reply.encoded(answer)


def candidates_of(form: CompletionForm) -> int:
    """Return the number of texts to generate for each prompt, of which `n` are returned."""
    n, made = form.n or 1, form.best_of or form.n or 1
    if made < n:
        raise ApiError(f"best_of must be at least n, which is {n}; got {made}", param="best_of")
    if made > n and form.stream:
        raise unsupported(f"best_of must be n, which is {n}, in a stream; got {made}", "best_of")
    return made


def best_texts(made: int, n: int, choices: Sequence[CompletionChoice]) -> list[CompletionChoice]:
    """Return the `n` of the texts of each prompt with the highest mean log probabilities, best first."""
    if n == made:
        return list(choices)
    kept: list[CompletionChoice] = []
    for i in range(0, len(choices), made):
        kept += sorted(choices[i : i + made], key=lambda choice: choice.mean_logprob, reverse=True)[:n]
    return [replace(choice, index=i) for i, choice in enumerate(kept)]


def _prompt_tokens(service: Service, form: CompletionForm, prompt: str) -> list[int]:
    """Encode a prompt, with the suffix of a text to fill in."""
    tokenizer = service.engine.tokenizer
    for text, param in ((prompt, "prompt"), (form.suffix or "", "suffix")):
        check_size(service.engine, tokenizer.least_tokens(text))
        service.check_text(text, param)

    def encode(text: str, add_bos: bool | None) -> list[int]:
        return tokenizer.encode(text, add_bos=add_bos, parse_special=form.parse_special is not False)

    add_bos = None if form.add_special_tokens is not False else False
    if not form.suffix:
        return encode(prompt, add_bos)
    if (fill := tokenizer.fill_tokens) is None:
        raise unsupported("suffix: this model has no tokens to fill in the middle", "suffix")
    before, between, after = fill
    return [*encode("", add_bos), before, *encode(prompt, False), between, *encode(form.suffix, False), after]


@dataclass
class CompletionChoice(Choice):
    known: int = 0  # prompt tokens at the start of the text
    reported: int = 0  # tokens whose log probabilities were reported
    length: int = 0  # characters of their text
    decoder: TokenDecoder | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the generated tokens, if it was requested; 0 if there are none."""
        made = [logprob(piece.logprob) for piece in self.pieces[self.stream.scored_tokens :]]
        return sum(made) / len(made) if made else 0.0

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the event of a pass, if it has anything to report."""
        if not any(piece.text for piece in pieces) and not self.ended and self.scores is None:
            return []
        scores = None if self.scores is None else self.logprobs(self.scores.tokenizer, pieces)
        return [self._choice(pieces, scores)]

    def whole(self) -> dict[str, Any]:
        self.score([])
        return self._choice(self.pieces, None if self.scores is None else self.scores.whole())

    def logprobs(self, tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        tokens: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        best: list[dict[str, float] | None] = []

        def add(token: int) -> None:
            if self.reported == self.known:
                self.length += 0 if self.decoder is None else len(self.decoder.flush())
                self.decoder = tokenizer.decoder()
            elif self.decoder is None:
                self.decoder = tokenizer.decoder(whole=True)
            tokens.append(spelling(tokenizer, token)[0])
            offsets.append(self.length)
            self.reported += 1
            self.length += len(self.decoder.step(token))

        if self.known and self.reported == 0:
            add(int(self.stream.prompt[0]))  # the first token has no log probability
            values.append(None)
            best.append(None)
        for piece in pieces:
            add(piece.token)
            values.append(logprob(piece.logprob))
            best.append({spelling(tokenizer, token)[0]: logprob(p) for token, p in piece.top_logprobs})
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}

    def _choice(self, pieces: Sequence[Piece], logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}


async def tokenize(service: Service, form: TokenizeForm, reply: Reply) -> None:
    """Return the tokens of a text (`prompt` or `content`) or of a conversation."""
    given = [value for value in (form.prompt, form.content, form.messages) if value is not None]
    if len(given) != 1:
        raise ApiError(f"pass exactly one of prompt, content and messages; got {len(given)}", param="prompt")
    tokenizer = service.engine.tokenizer

    def encode() -> list[int]:
        if form.messages is not None:
            return chat_tokens(
                service,
                ChatForm(
                    messages=form.messages,
                    tools=form.tools,
                    chat_template_kwargs=form.chat_template_kwargs,
                    add_generation_prompt=form.add_generation_prompt,
                    continue_final_message=form.continue_final_message,
                ),
                fits=False,
            )
        adds = form.add_special_tokens is not False and form.add_special is not False
        text = form.prompt if form.prompt is not None else form.content or ""
        service.check_text(text, "content" if form.prompt is None else "prompt")
        parses = form.parse_special is not False
        if adds and not service.engine.config.generates:  # as in embeddings
            return tokenizer.frame.text(tokenizer.encode(text, add_bos=False, parse_special=parses))
        return tokenizer.encode(text, add_bos=None if adds else False, parse_special=parses)

    ids = await service.prepare(encode)
    reply.end_turn()
    await reply.json({"tokens": ids, "count": len(ids), "max_model_len": service.engine.max_context})


async def detokenize(service: Service, form: DetokenizeForm, reply: Reply) -> None:
    def decode() -> str:
        service.check_size(len(form.tokens), "tokens")
        token_bytes = service.engine.tokenizer.token_bytes
        service.check_size(sum(len(token_bytes(token)) for token in form.tokens), "tokens")
        return service.engine.tokenizer.decode(form.tokens)

    text = await service.prepare(decode)
    reply.end_turn()
    await reply.json({"prompt": text, "content": text})
