"""Endpoints ``/v1/messages`` and ``/v1/messages/count_tokens``, in Anthropic's format."""

import json
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from metal_prefill.serve._blocks import answer_in_blocks
from metal_prefill.serve._chat import Block, ChatChoice, chat_tokens
from metal_prefill.serve._endpoint import Reply, Style
from metal_prefill.serve._errors import ApiError, missing
from metal_prefill.serve._forms import (
    ChatForm,
    Form,
    Fraction,
    JsonSchema,
    Message,
    NamedFunction,
    NotNegative,
    Positive,
    PositiveFraction,
    ResponseFormat,
    ToolChoice,
    required,
    text_of,
)
from metal_prefill.serve._service import Service
from metal_prefill.serve._tools import written_call
from metal_prefill.text._json_calls import read_arguments


class Choice(msgspec.Struct):
    """How the model may use tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model reasons before its answer."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class CountForm(Form, kw_only=True):
    """Request of ``/v1/messages/count_tokens``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    cache_control: Any = None  # ignored here and elsewhere: every prefix is cached
    context_management: Any = None  # ignored


class MessagesForm(CountForm, kw_only=True):
    """Request of ``/v1/messages``."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Fraction | None = None
    top_k: NotNegative | None = None
    top_p: PositiveFraction | None = None
    inference_geo: str | None = None  # ignored


def error_of(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kinds |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


STYLE = Style(error_of, error_of, named=True)


def chat_form(service: Service, form: CountForm) -> ChatForm:
    """Return the same conversation as a request of ``/v1/chat/completions``."""
    names: dict[str, str] = {}  # of the tools that were called, by id
    messages = [Message(role="system", content=text_of(form.system, "system"))] if form.system else []
    for i, message in enumerate(form.messages):
        messages += _messages_of(message, f"messages[{i}]", names)
    chat = ChatForm(messages=messages)
    if messages and messages[-1].role == "assistant":
        chat.continue_final_message = True
    chat.tools = None if form.tools is None else [_tool_of(tool, i) for i, tool in enumerate(form.tools)]
    if form.tool_choice is not None:
        chat.tool_choice = _tool_choice_of(form.tool_choice)
        if form.tool_choice.disable_parallel_tool_use is not None:
            chat.parallel_tool_calls = not form.tool_choice.disable_parallel_tool_use
    config = form.output_config or {}
    # Clients send both for any model; a template may read neither.
    variables = ("reasoning_effort", "enable_thinking")
    read = {name for name in variables if service.engine.tokenizer.template_reads(name, bool(chat.tools))}
    if config.get("effort") and read:
        chat.reasoning_effort = str(config["effort"])
    if form.thinking is not None and "enable_thinking" in read:
        chat.chat_template_kwargs = {"enable_thinking": form.thinking.type != "disabled"}
    if (format_ := config.get("format")) is not None:
        if not isinstance(format_, dict) or not isinstance(format_.get("schema"), dict):
            raise missing("output_config.format.schema")
        chat.response_format = ResponseFormat("json_schema", JsonSchema(format_["schema"]))
    if isinstance(form, MessagesForm):
        chat.max_tokens, chat.stop, chat.stream = form.max_tokens, form.stop_sequences, form.stream
        chat.temperature, chat.top_k, chat.top_p = form.temperature, form.top_k, form.top_p
    return chat


def _tool_of(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if (kind := tool.get("type", "custom")) not in ("custom", None):
        raise ApiError(f"tools[{i}]: the type {kind!r:.80} is not supported", param=f"tools[{i}].type")
    renamed = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {new: tool[old] for old, new in renamed.items() if tool.get(old) is not None}
    return {"type": "function", "function": function}


def _tool_choice_of(choice: Choice) -> Literal["none", "auto", "required"] | ToolChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise missing("tool_choice.name")
        return ToolChoice("function", NamedFunction(choice.name))
    return "required" if choice.type == "any" else choice.type


def _messages_of(message: dict[str, Any], where: str, names: dict[str, str]) -> list[Message]:
    """Convert a message; results of tools become separate messages, before its text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be user or assistant, got {role!r:.80}", param=f"{where}.role")
    if not isinstance(content, list):
        return [Message(role=role, content=text_of(content, f"{where}.content"))]
    results, texts, thoughts, calls = list[Message](), list[str](), list[str](), list[dict[str, Any]]()
    for j, block in enumerate(content):
        place = f"{where}.content[{j}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking":
            pass
        elif kind == "tool_use":
            called, name = required(block, "id", place), required(block, "name", place)
            names[called] = name
            calls.append(written_call(name, json.dumps(block.get("input") or {}), called))
        elif kind == "tool_result":
            called = required(block, "tool_use_id", place)
            text = text_of(block.get("content"), f"{place}.content")
            results.append(Message(role="tool", tool_call_id=called, name=names.get(called), content=text))
        else:
            texts.append(text_of([block], place))
    if results and not texts:
        return results
    rest = Message(role=role, content="".join(texts), tool_calls=calls or None)
    rest.reasoning_content = "".join(thoughts) or None
    return [*results, rest]


class _Answer:
    def __init__(self, model: str) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._head, "usage": _usage(usage)}}]

    def open(self, index: int, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": index, "content_block": _content_of(block)}]

    def add(self, index: int, block: Block, text: str) -> list[dict[str, Any]]:
        kind, field = {
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}]

    def close(self, index: int, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": index}]

    def end(self, choice: ChatChoice, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        delta = _stop_of(choice)
        return [{"type": "message_delta", "delta": delta, "usage": _usage(usage)}, {"type": "message_stop"}]

    def whole(self, choice: ChatChoice, usage: Mapping[str, Any]) -> dict[str, Any]:
        content = list(map(_content_of, choice.blocks))
        return {**self._head, "content": content, **_stop_of(choice), "usage": _usage(usage)}


def _content_of(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments = read_arguments(block.text)  # which may be cut
    input_ = arguments if isinstance(arguments, dict) else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": input_}


def _stop_of(choice: ChatChoice) -> dict[str, Any]:
    found = choice.stream.text.writer.stop_string
    reasons = {"stop": "end_turn" if found is None else "stop_sequence", "length": "max_tokens"}
    reason = choice.finish_reason or "stop"
    return {"stop_reason": {**reasons, "tool_calls": "tool_use"}[reason], "stop_sequence": found}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


async def messages(service: Service, form: MessagesForm, reply: Reply) -> None:
    await answer_in_blocks(service, chat_form(service, form), reply, _Answer(reply.model))


async def count_tokens(service: Service, form: CountForm, reply: Reply) -> None:
    tokens = await service.prepare(lambda: chat_tokens(service, chat_form(service, form), fits=False))
    reply.end_turn()
    await reply.json({"input_tokens": len(tokens)})
