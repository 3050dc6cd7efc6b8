"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from metal_prefill.generation._stream import Stream, check_size, make_streams
from metal_prefill.serve._bodies import Sender
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import ChatForm, Message
from metal_prefill.serve._generation import (
    Choice,
    check_count,
    head_of,
    logprob,
    options_of,
    send_choices,
    spelling,
)
from metal_prefill.serve._reply import Reply
from metal_prefill.serve._scores import most_tokens, scores_of
from metal_prefill.serve._service import Service
from metal_prefill.serve._tools import (
    call_constraint,
    call_message,
    offered_tools,
    possible_calls,
    required_call,
)
from metal_prefill.session import Piece
from metal_prefill.text._reasoning import END, ReasoningParser, begins_in
from metal_prefill.text._tokenizer import Tokenizer
from metal_prefill.text._tool_calls import ToolCall, ToolCallParser

_LAST_TOKENS = 8  # of a prompt, enough for the tag that begins reasoning
_ROLES = {"developer": "system"}  # templates do not define it


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the format of templates: join text parts, reject other parts."""
    plain = []
    for i, message in enumerate(messages):
        fields: dict[str, Any] = msgspec.to_builtins(message)
        fields["role"] = _ROLES.get(message.role, message.role)
        if isinstance(message.content, list):
            for part in message.content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ApiError(
                        400,
                        f"messages[{i}] has a part of type {part.get('type')!r}: only 'text' is supported",
                        param=f"messages[{i}].content",
                    )
            fields["content"] = "".join(part["text"] for part in message.content)
        elif message.content is None:
            fields["content"] = ""
        plain.append(fields)
    return plain


def chat_tokens(service: Service, form: ChatForm) -> list[int]:
    """Encode a conversation with the template of the file."""
    variables: dict[str, Any] = dict(form.chat_template_kwargs or {})
    if reserved := sorted(set(variables) & {"messages", "tools", "documents", "add_generation_prompt"}):
        raise ApiError(400, f"chat_template_kwargs: {reserved[0]} is reserved", param="chat_template_kwargs")
    tokenizer = service.model.tokenizer
    pieces = tokenizer.chat_pieces(
        plain_messages(form.messages), offered_tools(form), True, variables, form.documents
    )
    check_size(service.model.engine, sum(tokenizer.least_tokens(text) for text, _ in pieces))
    for text, _ in pieces:
        service.check_text(text, "messages")
    return tokenizer.encode_chat(pieces)


def constraint_of(form: ChatForm) -> dict[str, Any]:
    """Return the constrained-decoding option of a request, or an empty dict."""
    if (schema := call_constraint(form)) is not None:
        return {"json_schema": schema}
    format_ = form.response_format
    if format_ is None or format_.type == "text":
        return {}
    if format_.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if format_.json_schema is None or format_.json_schema.schema is None:
        param = "response_format.json_schema.schema"
        raise ApiError(400, f"you must provide {param}", param=param)
    return {"json_schema": format_.json_schema.schema}


def _is_constrained(form: ChatForm) -> bool:
    """Return whether a constraint may have to be compiled."""
    return (
        form.regex is not None
        or form.grammar is not None
        or (form.response_format is not None and form.response_format.type != "text")
        or form.tool_choice not in (None, "auto", "none")
    )


def _streams(service: Service, form: ChatForm, n: int, namespace: str) -> list[Stream]:
    ids = chat_tokens(service, form)
    options = {**options_of(form), **constraint_of(form)}
    options["stop"] = [*options["stop"], *service.model.tokenizer.chat_stop]
    max_tokens = form.max_completion_tokens or form.max_tokens or service.model.max_context
    if form.logprobs:
        options["logprobs"] = form.top_logprobs or 0
        if form.max_completion_tokens is None and form.max_tokens is None:
            max_tokens = min(max_tokens, most_tokens(n, options["logprobs"]))
    return make_streams(service.model.engine, ids, n, max_tokens, prefix_namespace=namespace, **options)


def _reasoning_parser(form: ChatForm, tokenizer: Tokenizer, stream: Stream) -> ReasoningParser | None:
    """Return a parser of the reasoning in an answer; None if the model's template knows none."""
    if form.reasoning_format == "none" or END not in (tokenizer.chat_template or ""):
        return None
    prompt = tokenizer.decode(stream.prompt[-_LAST_TOKENS:].tolist(), skip_special=False)
    # A constraint holds for the whole text, which therefore has no end of reasoning that it does not mention.
    return ReasoningParser(begun=begins_in(prompt) and not _is_constrained(form))


@dataclass
class ChatChoice(Choice):
    """Chat answer in progress."""

    reasoning_parser: ReasoningParser | None = None
    parser: ToolCallParser | None = None
    required: Collection[str] = ()  # names of tools; the answer must call one of them
    tokenizer: Tokenizer | None = None  # set if log probabilities are requested
    reasoning: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False  # the only call is incomplete

    def _take(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Add the pieces of a pass, and return parsed parts: reasoning, texts, and calls with their index."""
        if self.required:
            return self._take_required() if self.ended else []
        text, made = "".join(piece.text for piece in pieces), []
        if self.reasoning_parser is not None:
            reasoning, text = self.reasoning_parser.step(text, last=self.ended)
            self.reasoning += reasoning
            made += [{"reasoning_content": reasoning}] if reasoning else []
        parts: list[str | ToolCall] = [text]
        if self.parser is not None:
            parts = self.parser.step(text) + (self.parser.flush() if self.ended else [])
        for part in parts:
            if isinstance(part, ToolCall):
                made.append(self._add_call(call_message(part)))
            elif part:
                self.text += part
                made.append({"content": part})
        return made

    def _take_required(self) -> list[dict[str, Any]]:
        """Parse the whole answer, a possibly truncated call."""
        text = "".join(piece.text for piece in self.pieces)
        if (call := required_call(text, self.required)) is None:
            self.text = text
            return [{"content": text}] if text else []
        message, whole = call
        self.cut = not whole
        return [self._add_call(message)]

    def _add_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Append a call, and return the part of a stream that has it with its index."""
        self.calls.append(message)
        return {"tool_calls": [{"index": len(self.calls) - 1, **message}]}

    @property
    def finish_reason(self) -> str | None:
        """Reason that the answer ended, ``"tool_calls"`` if it ends with calls; None while it continues."""
        reason = super().finish_reason
        return "tool_calls" if self.calls and not self.cut and reason == "stop" else reason

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the events of a pass: the role at the start, new text and calls, the finish reason."""
        chunks: list[dict[str, Any]] = []

        def add(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            chunks.append({"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason})
            return chunks[-1]

        if len(pieces) == len(self.pieces):  # the first ones
            add({"role": "assistant", "content": ""})
        for part in self._take(pieces):
            add(part)
        content = [] if self.tokenizer is None else _logprobs(self.tokenizer, pieces)
        if content:
            texts = [chunk for chunk in chunks if "content" in chunk["delta"]]
            (texts[-1] if texts else add({"content": ""}))["logprobs"] = {"content": content, "refusal": None}
        if self.finish_reason is not None:
            add({}, reason=self.finish_reason)
        return chunks

    def score(self, pieces: Sequence[Piece]) -> None:
        """Keep the log probabilities of a pass, if requested."""
        if self.tokenizer is not None:
            self.scores.extend({"content": _logprobs(self.tokenizer, pieces)})

    def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        self.score([])
        self._take(self.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.calls}
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self.tokenizer is None else {**self.scores.whole(), "refusal": None},
            "finish_reason": self.finish_reason,
        }


async def chat(service: Service, form: ChatForm, reply: Reply, sender: Sender) -> None:
    """Answer a conversation."""
    begin = time.perf_counter()
    name = service.check_model(form.model)
    n = check_count(service, form.n or 1)
    tools = offered_tools(form)
    with service.admitted(n):
        streams = await service.streams(
            lambda: _streams(service, form, n, sender.namespace), constrained=_is_constrained(form)
        )
        sender.turn.end()
        logprobs = (form.top_logprobs or 0) if form.logprobs else None
        with scores_of(service.bodies.scores, streams, logprobs) as scores:
            choices = [ChatChoice(i, stream, i == 0, scores[i]) for i, stream in enumerate(streams)]
            for choice in choices:
                choice.reasoning_parser = _reasoning_parser(form, service.model.tokenizer, choice.stream)
                choice.parser = ToolCallParser(tools) if tools else None
                choice.required = possible_calls(form)
                choice.tokenizer = service.model.tokenizer if form.logprobs else None
            form.messages, form.tools, form.documents = [], None, None  # may be large
            head = head_of("chatcmpl", "chat.completion.chunk" if form.stream else "chat.completion", name)
            answer = await send_choices(service, form, reply, choices, head, begin)
    if answer is not None:
        await reply.encoded(answer)


def _logprobs(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    def entry(token: int, value: float | None) -> dict[str, Any]:
        text, raw = spelling(tokenizer, token)
        return {"token": text, "logprob": logprob(value), "bytes": raw}

    return [
        {**entry(p.token, p.logprob), "top_logprobs": [entry(token, v) for token, v in p.top_logprobs]}
        for p in pieces
        if p.token not in tokenizer.stop_ids  # the end-of-text token is not part of the answer
    ]
