"""``/v1/chat/completions``."""

import json
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from metal_prefill.errors import ChatTemplateError, ContextOverflowError
from metal_prefill.generation._stream import Stream, check_size, make_streams
from metal_prefill.serve._endpoint import Reply
from metal_prefill.serve._errors import ApiError, missing, unsupported
from metal_prefill.serve._forms import ChatForm, Message, text_of
from metal_prefill.serve._generation import (
    Choice,
    check_count,
    constraint_errors,
    head_of,
    logprob,
    most_tokens,
    options_of,
    scores_of,
    send_choices,
    spelling,
)
from metal_prefill.serve._service import Service
from metal_prefill.serve._tools import (
    RequiredCalls,
    call_constraint,
    call_prefix,
    possible_calls,
    single_call,
    written_call,
)
from metal_prefill.session import Piece
from metal_prefill.text._reasoning import ReasoningGate, ReasoningParser
from metal_prefill.text._tokenizer import Tokenizer
from metal_prefill.text._tool_calls import ToolCall, ToolCallParser, new_call_id, tool_names

_T = TypeVar("_T")
Pieces = list[tuple[str, bool]]  # of a prompt, with flags for control tokens

DROPPED_TURNS = 4  # turns that are dropped together
_ROLES = {"developer": "system"}  # templates lack this role


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the format of templates: join text parts, reject other parts."""
    plain = []
    for i, message in enumerate(messages):
        fields: dict[str, Any] = msgspec.to_builtins(message)
        fields["role"] = _ROLES.get(message.role, message.role)
        fields["content"] = text_of(message.content, f"messages[{i}].content")
        plain.append(fields)
    return plain


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    for i, tool in enumerate(tools):
        if (kind := tool.get("type") or "function") != "function":
            raise unsupported(
                f"tools[{i}]: the type {kind!r:.80} is not supported; tools must be functions",
                f"tools[{i}].type",
            )
        try:
            tool_names([tool])
        except ValueError:
            raise missing(f"tools[{i}].function.name") from None


def fitting_tokens(service: Service, form: ChatForm) -> tuple[list[int], int]:
    """Return the tokens of a conversation, and the number of messages that do not fit and were dropped.

    If `truncation` allows it, the oldest turns are dropped in groups, so that the prompts of several requests
    of a conversation begin with the same messages, whose cache they reuse.
    """
    if form.truncation != "auto":
        return chat_tokens(service, form), 0
    whole, context = form.messages, service.engine.max_context
    room = context - min(form.max_completion_tokens or form.max_tokens or context, context // 4)
    first = next((i for i, m in enumerate(whole) if m.role not in ("system", "developer")), len(whole))
    turns = [i for i, message in enumerate(whole) if message.role == "user" and i > first]
    begins = sorted({first, *turns[DROPPED_TURNS - 1 :: DROPPED_TURNS], *turns[-1:]})

    def encoded(begin: int) -> list[int]:
        return chat_tokens(service, msgspec.structs.replace(form, messages=whole[:first] + whole[begin:]))

    def fits(begin: int) -> bool:
        with suppress(ContextOverflowError):
            return len(encoded(begin)) <= room
        return False

    dropped = 0 if fits(first) else bisect_left(begins[:-1], True, lo=1, key=fits)
    begin = begins[min(dropped, len(begins) - 1)]
    return encoded(begin), begin - first


def chat_tokens(service: Service, form: ChatForm, *, fits: bool = True) -> list[int]:
    """Encode a conversation with the template of the file; `fits`: first check that it fits the context."""
    variables: dict[str, Any] = dict(form.chat_template_kwargs or {})
    if reserved := sorted(set(variables) & {"messages", "tools", "documents", "add_generation_prompt"}):
        raise ApiError(f"chat_template_kwargs: {reserved[0]} is reserved", param="chat_template_kwargs")
    _check_tools(form.tools or ())
    tokenizer, tools = service.engine.tokenizer, form.offered_tools
    continues = form.continue_final_message or (form.messages[-1].prefix or False)
    adds_prompt = not continues if form.add_generation_prompt is None else form.add_generation_prompt
    if continues and adds_prompt:
        raise ApiError(
            "continue_final_message continues the last message, and add_generation_prompt begins another one",
            param="add_generation_prompt",
        )
    if continues and form.messages[-1].role != "assistant":
        raise ApiError(
            "only a last message of the assistant can be continued",
            param=f"messages[{len(form.messages) - 1}].role",
        )
    param = "tools"
    try:
        tokenizer.check_tools(tools)
        unread = form.documents and not tokenizer.template_reads("documents", bool(tools))
        param = "documents" if unread else "messages"
        render = partial(
            tokenizer.chat_pieces,
            tools=tools,
            add_generation_prompt=adds_prompt,
            variables={},
            documents=form.documents,
            untrusted={**_effort(form, tokenizer), **variables},
            continues=continues,
        )
        pieces = _rendered(render, plain_messages(form.messages))
        if form.requires_call and (name := single_call(form)) is not None:
            pieces = _until_call(partial(render, add_generation_prompt=False), form, pieces, name)
    except ChatTemplateError as error:
        raise ApiError(str(error), param=param, code="invalid_messages") from None
    except ValueError as error:
        place = str(error).partition(" ")[0]
        raise ApiError(str(error), param=place if place.startswith("messages[") else None) from None
    texts = [text for text, _ in pieces]
    if fits:
        check_size(service.engine, sum(map(tokenizer.least_tokens, texts)))
    for text in texts if fits else ["".join(texts)]:
        service.check_text(text, "messages")
    return tokenizer.encode_chat(pieces)


def _until_call(
    render: Callable[[list[dict[str, Any]]], Pieces], form: ChatForm, prompt: Pieces, name: str
) -> Pieces:
    """Return a prompt with the tags that the template writes before a call, if it writes calls as JSON."""
    call = {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        written = _rendered(render, [*plain_messages(form.messages), called])
    except ChatTemplateError:
        return prompt
    asked, text = ("".join(piece for piece, _ in pieces) for pieces in (prompt, written))
    end = text.find(call_prefix(name), len(asked))
    if not text.startswith(asked) or end < 0:
        return prompt
    until: Pieces = []
    for piece, special in written:
        if end > 0:
            until.append((piece[:end], special))
        end -= len(piece)
    return until


def _rendered(render: Callable[[list[dict[str, Any]]], _T], messages: list[dict[str, Any]]) -> _T:
    """Render messages; if the template rejects a system message, its text begins that of the user."""
    try:
        return render(messages)
    except ChatTemplateError as error:
        if [message["role"] for message in messages[:2]] != ["system", "user"]:
            raise
        system, first, *others = messages
        merged = {**first, "content": f"{system['content']}\n\n{first['content']}"}
        try:
            return render([merged, *others])
        except ChatTemplateError:
            raise error from None


def _effort(form: ChatForm, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template variable by which a template follows `reasoning_effort`."""
    effort, tools = form.reasoning_effort, bool(form.offered_tools)
    if effort is None:
        return {}
    if tokenizer.template_reads("reasoning_effort", tools):
        return {"reasoning_effort": effort}
    if tokenizer.template_reads("enable_thinking", tools):
        return {"enable_thinking": effort != "none"}
    raise unsupported(
        "reasoning_effort: this model's chat template reads neither reasoning_effort nor enable_thinking",
        "reasoning_effort",
    )


def constraint_of(form: ChatForm) -> tuple[str | None, dict[str, Any]]:
    """Return the field that has the schema of a request, and the option for it; None without one."""
    if form.requires_call:
        return "tools", {"json_schema": call_constraint(form)}
    format_ = form.response_format
    if format_ is None or format_.type == "text":
        return None, {}
    if format_.type == "json_object":
        return "response_format", {"json_schema": {"type": "object"}}
    param = "response_format.json_schema.schema"
    if format_.json_schema is None or format_.json_schema.schema is None:
        raise missing(param)
    return param, {"json_schema": format_.json_schema.schema}


def _streams(service: Service, form: ChatForm, ids: list[int], n: int, namespace: str) -> list[Stream]:
    field, constraint = constraint_of(form)
    options = {**options_of(form, service.engine.tokenizer), **constraint}
    options["stop"] = service.engine.tokenizer.chat_stop(options["stop"])
    options["reasoning"] = service.engine.tokenizer.reasoning_tags is not None
    options["calls"] = form.offered_tools is not None
    max_tokens = form.max_completion_tokens or form.max_tokens or service.engine.max_context
    if form.logprobs:
        options["logprobs"] = form.top_logprobs or 0
        if form.max_completion_tokens is None and form.max_tokens is None:
            max_tokens = min(max_tokens, most_tokens(n, options["logprobs"]))
    with constraint_errors(form, field):
        return make_streams(service.engine, ids, n, max_tokens, prefix_namespace=namespace, **options)


def _reasoning_parser(form: ChatForm, tokenizer: Tokenizer, stream: Stream) -> ReasoningParser | None:
    """Return a parser of the reasoning in an answer; None if the model's template has none."""
    if form.reasoning_format == "none" or (tags := tokenizer.reasoning_tags) is None:
        return None
    # A constraint holds for the whole text, which therefore has no end of reasoning that it does not mention.
    is_free = stream.text.guide is None
    begun = is_free and tokenizer.ends_in_reasoning(stream.prompt.tolist())
    return ReasoningParser(ReasoningGate(begun=begun, tags=tags))


@dataclass
class Block:
    """Part of an answer."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call, its arguments as JSON
    # Of a call; `number` counts those before it.
    name: str = ""
    call_id: str = ""
    number: int = 0


class Added(NamedTuple):
    """Text that was added to a block."""

    block: int  # its index
    text: str
    begins: bool  # whether the block begins with it


@dataclass
class ChatChoice(Choice):
    reasoning_parser: ReasoningParser | None = None
    parser: ToolCallParser | None = None
    required: RequiredCalls | None = None
    blocks: list[Block] = field(default_factory=list)
    cut: bool = False  # the last call is incomplete
    dropped_messages: int = 0  # of the conversation

    def parts(self, pieces: Sequence[Piece]) -> list[Added]:
        """Add the pieces of a pass to the blocks."""
        text = "".join(piece.text for piece in pieces)
        if self.required is not None:
            return self._call_parts(self.required, text)
        made: list[Added] = []
        if self.reasoning_parser is not None:
            reasoning, text = self.reasoning_parser.step(text, last=self.ended)
            made += [self._add(Block("reasoning"), reasoning)] if reasoning else []
        parts: list[str | ToolCall] = [text]
        if self.parser is not None:
            parts = self.parser.step(text, last=self.ended)
        for part in parts:
            if isinstance(part, ToolCall):
                call = Block("call", name=part.name, call_id=part.id or new_call_id())
                made.append(self._add(call, json.dumps(part.arguments, ensure_ascii=False)))
            elif part:
                made.append(self._add(Block("text"), part))
        return made

    def _call_parts(self, required: RequiredCalls, text: str) -> list[Added]:
        """Add to the calls that are the whole answer, or to the text if it ends before its first tool."""
        made = []
        for name, arguments in required.step(text, last=self.ended):
            block = Block("call", name=name, call_id=new_call_id()) if name is not None else self.blocks[-1]
            made.append(self._add(block, arguments))
        self.cut = not required.whole
        if not self.blocks and self.ended and required.text:
            made.append(self._add(Block("text"), required.text))
        return made

    def _add(self, block: Block, text: str) -> Added:
        """Add text to the last block if it is this one or continues it, or to this one as a new block."""
        last = self.blocks[-1] if self.blocks else None
        continues = last is not None and (block is last or block.kind == last.kind != "call")
        if not continues:
            block.number = 0 if last is None else last.number + (last.kind == "call")
            self.blocks.append(block)
        self.blocks[-1].text += text
        return Added(len(self.blocks) - 1, text, not continues)

    def joined(self, kind: Literal["reasoning", "text"]) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls in OpenAI's format."""
        return [written_call(b.name, b.text, b.call_id) for b in self.blocks if b.kind == "call"]

    @property
    def finish_reason(self) -> str | None:
        """Reason that the answer ended, ``"tool_calls"`` if it ends with calls; None while it continues."""
        reason = super().finish_reason
        if reason != "stop" or self.cut or all(block.kind != "call" for block in self.blocks):
            return reason
        return "tool_calls"

    @property
    def reasoning_tokens(self) -> int:
        if self.reasoning_parser is None or not self.joined("reasoning"):
            return 0
        text, end = "", self.reasoning_parser.tags.end
        for i, piece in enumerate(self.pieces):
            text = text[1 - len(end) :] + piece.text
            if end in text:
                return i + 1
        return len(self.pieces)

    def chunks(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the events of a pass: the role at the start, new text and calls, the finish reason."""
        chunks: list[dict[str, Any]] = []

        def add(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            chunks.append({"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason})
            return chunks[-1]

        if len(pieces) == len(self.pieces):  # the first ones
            add({"role": "assistant", "content": ""})
        for added in self.parts(pieces):
            add(self._delta(*added))
        scores = {} if self.scores is None else self.logprobs(self.scores.tokenizer, pieces)
        if any(scores.values()):
            texts = [chunk for chunk in chunks if "content" in chunk["delta"]]
            (texts[-1] if texts else add({"content": ""}))["logprobs"] = {**scores, "refusal": None}
        if self.finish_reason is not None:
            add({}, reason=self.finish_reason)
        return chunks

    def _delta(self, index: int, text: str, begins: bool) -> dict[str, Any]:
        block = self.blocks[index]
        if block.kind != "call":
            return {"content" if block.kind == "text" else "reasoning_content": text}
        whole = written_call(block.name, text, block.call_id)
        return {
            "tool_calls": [
                {"index": block.number, **(whole if begins else {"function": {"arguments": text}})}
            ]
        }

    def logprobs(self, tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, list[Any]]:
        def entry(token: int, value: float | None) -> dict[str, Any]:
            text, raw = spelling(tokenizer, token)
            return {"token": text, "logprob": logprob(value), "bytes": raw}

        content = [
            {**entry(p.token, p.logprob), "top_logprobs": [entry(token, v) for token, v in p.top_logprobs]}
            for p in pieces
            if p.token not in tokenizer.stop_ids  # the end-of-text token is not part of the answer
        ]
        return {"content": content}

    def whole(self) -> dict[str, Any]:
        self.score([])
        self.parts(self.pieces)
        text = self.joined("text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := self.joined("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := self.calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self.scores is None else {**self.scores.whole(), "refusal": None},
            "finish_reason": self.finish_reason,
        }


@asynccontextmanager
async def conversation(service: Service, form: ChatForm, reply: Reply) -> AsyncIterator[list[ChatChoice]]:
    """Prepare the answers to a conversation, which may be generated within the context."""
    n = check_count(service, form.n or 1)
    dropped = 0

    def prepare() -> list[Stream]:
        nonlocal dropped
        ids, dropped = fitting_tokens(service, form)
        return _streams(service, form, ids, n, reply.namespace)

    with service.admitted(n):
        streams = await service.streams(prepare)
        reply.end_turn()
        logprobs = (form.top_logprobs or 0) if form.logprobs else None
        with scores_of(service, streams, logprobs) as scores:
            tokenizer, tools = service.engine.tokenizer, form.offered_tools
            choices = [
                ChatChoice(
                    i,
                    stream,
                    scores[i],
                    reasoning_parser=_reasoning_parser(form, tokenizer, stream),
                    parser=ToolCallParser(tools) if tools else None,
                    required=RequiredCalls(possible_calls(form)) if form.requires_call else None,
                    dropped_messages=dropped,
                )
                for i, stream in enumerate(streams)
            ]
            form.messages, form.tools, form.documents = [], None, None  # may be large
            yield choices


async def chat(service: Service, form: ChatForm, reply: Reply) -> None:
    async with conversation(service, form, reply) as choices:
        head = head_of("chatcmpl", "chat.completion.chunk" if form.stream else "chat.completion", reply.model)
        if form.truncation == "auto":
            head["dropped_messages"] = choices[0].dropped_messages
        answer = await send_choices(service, form, reply, choices, head)
    if answer is not None:
        await reply.encoded(answer)
