"""Endpoint ``/v1/responses``, in OpenAI's format."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from metal_prefill.serve._blocks import answer_in_blocks
from metal_prefill.serve._chat import Block, ChatChoice
from metal_prefill.serve._endpoint import Reply, Style
from metal_prefill.serve._errors import ApiError, unsupported
from metal_prefill.serve._forms import (
    ChatForm,
    Form,
    JsonSchema,
    Message,
    NamedFunction,
    Positive,
    PositiveFraction,
    ResponseFormat,
    ToolChoice,
    required,
    text_of,
)
from metal_prefill.serve._service import Service
from metal_prefill.serve._tools import written_call

_TEXTS = ("input_text", "output_text", "text")


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None  # ignored: the reasoning is in the answer
    generate_summary: str | None = None  # its former name


class ResponsesForm(Form, kw_only=True):
    """Request of ``/v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: PositiveFraction | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None  # ignored: no obfuscation is added
    include: list[str] | None = None  # ignored
    top_logprobs: Literal[0] | None = None
    background: Literal[False] | None = None
    prompt_cache_retention: str | None = None  # ignored


def event_error(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "code": error.code, "message": str(error), "param": error.param}


STYLE = Style(event_error=event_error, named=True)


def chat_form(form: ResponsesForm, before: list[Message]) -> ChatForm:
    """Return the conversation as a request of ``/v1/chat/completions``; `before` are earlier messages."""
    messages = [*before, *_messages_of(form.input)]
    if form.instructions:
        messages.insert(0, Message(role="system", content=form.instructions))
    if not messages:
        raise ApiError("input has no messages", param="input")
    tools = None if form.tools is None else [_tool_of(tool) for tool in form.tools]
    return ChatForm(
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice_of(form.tool_choice),
        parallel_tool_calls=form.parallel_tool_calls,
        max_tokens=form.max_output_tokens,
        temperature=form.temperature,
        top_p=form.top_p,
        stream=form.stream,
        response_format=_format_of(form.text.format if form.text is not None else None),
        truncation=form.truncation,
        reasoning_effort=None if form.reasoning is None else form.reasoning.effort,
    )


def _tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    if (tool.get("type") or "function") != "function":
        return tool  # refused by name later
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice_of(
    choice: Literal["none", "auto", "required"] | dict[str, Any] | None,
) -> Literal["none", "auto", "required"] | ToolChoice | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ApiError("tool_choice must be a mode or a function with its name", param="tool_choice")
    return ToolChoice("function", NamedFunction(choice["name"]))


def _format_of(format_: dict[str, Any] | None) -> ResponseFormat | None:
    if format_ is None:
        return None
    kind = format_.get("type")
    if kind == "json_schema" and isinstance(format_.get("schema"), dict):
        return ResponseFormat("json_schema", JsonSchema(format_["schema"]))
    if kind == "text" or kind == "json_object":
        return ResponseFormat(kind)
    raise ApiError(
        f"text.format must be of type text, json_object or json_schema with a schema, got {format_!r:.80}",
        param="text.format",
    )


def _messages_of(input_: str | list[dict[str, Any]]) -> list[Message]:
    """Convert items to messages; calls and reasoning belong to the message of the assistant around them."""
    if isinstance(input_, str):
        return [Message(role="user", content=input_)]
    messages: list[Message] = []
    names: dict[str, str] = {}  # of called tools, by id

    def assistant() -> Message:
        """Return the assistant's message that the items so far belong to."""
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        return messages[-1]

    for i, item in enumerate(input_):
        where, kind = f"input[{i}]", item.get("type") or "message"
        if kind == "message":
            role = required(item, "role", where)
            text = text_of(item.get("content"), f"{where}.content", _TEXTS)
            if role == "assistant":
                message = assistant()
                message.content = f"{message.content or ''}{text}"
            else:
                messages.append(Message(role=role, content=text))
        elif kind == "function_call":
            call_id, name = required(item, "call_id", where), required(item, "name", where)
            names[call_id] = name
            message = assistant()
            call = written_call(name, item.get("arguments"), call_id)
            message.tool_calls = [*(message.tool_calls or ()), call]
        elif kind == "function_call_output":
            called = required(item, "call_id", where)
            text = text_of(item.get("output"), f"{where}.output", _TEXTS)
            messages.append(Message(role="tool", tool_call_id=called, name=names.get(called), content=text))
        elif kind == "reasoning":
            text = text_of(item.get("content"), f"{where}.content", ("reasoning_text", "text"))
            messages.append(Message(role="assistant", reasoning_content=text or None))
        else:
            raise unsupported(f"{where}: items of type {kind!r:.80} are not supported", f"{where}.type")
    return messages


class _Answer:
    def __init__(self, form: ResponsesForm, model: str) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.keep: Callable[[ChatChoice], None] | None = None
        self._ids: list[str] = []  # of items
        self._number = 0  # of events
        effort = None if form.reasoning is None else form.reasoning.effort
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": form.instructions,
            "max_output_tokens": form.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": form.parallel_tool_calls is not False,
            "previous_response_id": form.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": form.store is not False,
            "temperature": 1.0 if form.temperature is None else form.temperature,
            "text": {"format": (form.text and form.text.format) or {"type": "text"}},
            "tool_choice": form.tool_choice or "auto",
            "tools": form.tools or [],
            "top_p": 1.0 if form.top_p is None else form.top_p,
            "truncation": form.truncation or "disabled",
            "usage": None,
            "user": form.user,
            "metadata": {},
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def begin(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [self._event(kind, response=self._head) for kind in ("created", "in_progress")]

    def open(self, index: int, block: Block) -> list[dict[str, Any]]:
        self._ids.append(f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}")
        item = self._item(index, block, "in_progress")
        events = [self._event("output_item.added", output_index=index, item={**item, **_EMPTY[block.kind]})]
        if block.kind != "call":
            events.append(self._part("content_part.added", index, block))
        return events

    def add(self, index: int, block: Block, text: str) -> list[dict[str, Any]]:
        return [self._text("delta", index, block, delta=text)]

    def close(self, index: int, block: Block) -> list[dict[str, Any]]:
        field = "arguments" if block.kind == "call" else "text"
        events = [self._text("done", index, block, **{field: block.text})]
        if block.kind != "call":
            events.append(self._part("content_part.done", index, block))
        item = self._item(index, block, "completed")
        return [*events, self._event("output_item.done", output_index=index, item=item)]

    def end(self, choice: ChatChoice, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        whole = self.whole(choice, usage)
        return [self._event(whole["status"], response=whole)]

    def whole(self, choice: ChatChoice, usage: Mapping[str, Any]) -> dict[str, Any]:
        if self.keep is not None:
            self.keep(choice)
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(i, block, status) for i, block in enumerate(choice.blocks)],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            "dropped_messages": choice.dropped_messages,
        }

    def _text(self, kind: str, index: int, block: Block, **fields: Any) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._ids[index], "output_index": index}
        if block.kind == "call":
            names = {"name": block.name} if kind == "done" else {}
            return self._event(f"function_call_arguments.{kind}", **place, **names, **fields)
        if block.kind == "text":
            fields["logprobs"] = []
        name = "output_text" if block.kind == "text" else "reasoning_text"
        return self._event(f"{name}.{kind}", **place, content_index=0, **fields)

    def _part(self, kind: str, index: int, block: Block) -> dict[str, Any]:
        part = _content_of(block)
        return self._event(kind, item_id=self._ids[index], output_index=index, content_index=0, part=part)

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._ids[index], "status": status}
        if block.kind == "call":
            fields = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **head, **fields}
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": [_content_of(block)]}
        return {"type": "message", **head, "role": "assistant", "content": [_content_of(block)]}


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_EMPTY: dict[str, dict[str, Any]] = {"reasoning": {"content": []}, "text": {"content": []}, "call": {}}


def _content_of(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


# Names of fields of chat completions in responses.
_PARAMS = {"reasoning_effort": "reasoning.effort", "response_format.json_schema.schema": "text.format.schema"}


async def responses(kept: KeptConversations, service: Service, form: ResponsesForm, reply: Reply) -> None:
    """Answer a conversation in the format of responses, and keep it for a next one."""
    before: list[Message] = []
    if form.previous_response_id is not None:
        before = kept.find(reply.namespace, form.previous_response_id)
    answer = _Answer(form, reply.model)
    chat = chat_form(form, before)
    messages = chat.messages[1 if form.instructions else 0 :]
    if form.store is not False:
        answer.keep = lambda choice: kept.add(reply.namespace, answer.id, [*messages, answer_message(choice)])
    try:
        await answer_in_blocks(service, chat, reply, answer)
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


def answer_message(choice: ChatChoice) -> Message:
    """Return the message of an answer, for the next request."""
    return Message(
        role="assistant",
        content=choice.joined("text"),
        tool_calls=choice.calls or None,
        reasoning_content=choice.joined("reasoning") or None,
    )


MOST_KEPT = 64 << 20  # bytes of all of them


class KeptConversations:
    """Conversations of earlier responses, by prefix namespace and id, the least recently used first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._size = 0

    def add(self, namespace: str, id_: str, messages: list[Message]) -> None:
        """Keep a conversation, and drop others that are too many."""
        raw = msgspec.json.encode(messages)
        self._kept[namespace, id_] = raw
        self._size += len(raw)
        while self._size > MOST_KEPT:
            self._size -= len(self._kept.popitem(last=False)[1])

    def find(self, namespace: str, id_: str) -> list[Message]:
        """Return a conversation; raise `ApiError` if it is not kept."""
        if (raw := self._kept.get((namespace, id_))) is None:
            raise ApiError(
                f"Previous response with id {id_!r} not found: this server keeps the latest ones in memory",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end((namespace, id_))
        return msgspec.json.decode(raw, type=list[Message])
