"""Request types and their validation.

msgspec decodes a body and validates it against its type in one step, in C, and names the invalid field.
Handwritten checks would be several hundred lines with gaps; pydantic would add four dependencies.
"""

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta

from metal_prefill.serve._errors import ApiError, missing

_Form = TypeVar("_Form", bound=msgspec.Struct)

LARGE = 1 << 18  # bytes; preparing a body takes up to 200 times its size, so large ones take turns
# Strings, arrays and objects of a body. Decoding one takes up to half a microsecond, in which no other thread
# runs; numbers take a tenth of it.
MOST_VALUES = 1 << 18

NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFraction = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Python's hash of an int is predictable: a dict of large ones that collide would take quadratic time.
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenOrText = str | int | list[int]


class Form(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields common to all requests."""

    model: str | None = None
    prompt_cache_key: str | None = None  # prefixes are shared among requests with the same one
    # Accepted for compatibility and ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    def __post_init__(self) -> None:
        self.metadata = None  # takes up to 20 times the size of its JSON


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: no obfuscation is added


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint on a text."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class TextForm(Form, kw_only=True):
    """Fields common to text generation requests; those after the blank line extend OpenAI's."""

    n: Positive | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: PositiveFraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None

    top_k: NotNegative | None = None
    min_p: Fraction | None = None
    typical_p: PositiveFraction | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: NotNegative | None = None
    regex: str | None = None
    grammar: str | None = None
    # Names in vLLM.
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionForm(TextForm, kw_only=True):
    """Request of ``/v1/completions``."""

    prompt: str | list[TokenOrText]
    max_tokens: NotNegative | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None
    # Extensions.
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Message of a conversation; fields that templates may read, then those that are ignored."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    prefix: bool | None = None  # whether the answer continues this message, the last one

    # Clients return the messages of answers with fields of other servers and of their own.
    annotations: Any = None
    audio: None = None
    cache_control: Any = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None

    def __post_init__(self) -> None:
        self.annotations = self.cache_control = self.parsed = self.provider_specific_fields = None
        self.reasoning_details = self.thinking_blocks = None


class NamedFunction(msgspec.Struct):
    """Reference to a tool by name."""

    name: str


class ToolChoice(msgspec.Struct):
    """Tool that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatForm(TextForm, kw_only=True):
    """Request of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_format: Literal["auto", "none"] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the answer may call; None if there are none."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def requires_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")


class EmbeddingForm(Form, kw_only=True):
    """Request of ``/v1/embeddings``."""

    input: str | list[TokenOrText]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    # Extensions; see Model.embed.
    normalize: bool | None = None
    instruction: str | None = None
    truncate: Literal["error", "end"] | None = None
    unicode: Literal["NFC"] | None = None
    split_special_tokens: bool | None = None


class RerankForm(Form, kw_only=True):
    """Request of ``/rerank``, ``/v1/rerank`` and ``/v2/rerank``, in the formats of Jina and Cohere."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None
    rank_fields: Annotated[list[str], Meta(min_length=1)] | None = None
    max_chunks_per_doc: None = None  # a document is not divided
    priority: int | None = None  # ignored
    # Extensions; see Model.rerank.
    instruction: str | None = None
    how: Literal["late"] | None = None
    label: str | None = None
    truncate: bool | Literal["error", "end"] | None = None
    # Of text-embeddings-inference.
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    unicode: Literal["NFC"] | None = None
    split_special_tokens: bool | None = None


class InferenceForm(Form, kw_only=True):
    """Fields of text-embeddings-inference."""

    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None


class EmbedForm(InferenceForm, kw_only=True):
    """Request of ``/embed``."""

    inputs: str | list[TokenOrText]
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Positive | None = None


class PredictForm(InferenceForm, kw_only=True):
    """Request of ``/predict``: a text, a pair, or a list of lists with one or two texts."""

    inputs: str | Annotated[list[str | list[str]], Meta(min_length=1)]
    raw_scores: bool | None = None


class TokenizeForm(Form, kw_only=True):
    """Request of ``/tokenize``: a text or a conversation."""

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # the name in llama.cpp's server
    parse_special: bool | None = None
    # As in `ChatForm`.
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeForm(Form, kw_only=True):
    """Request of ``/detokenize``."""

    tokens: list[int]


def text_of(content: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a field, which is null, a text, or a list of parts of these types."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(
                f"{where} has a part of type {kind!r:.80}; supported: {', '.join(kinds)}", param=where
            )
    return "".join(part["text"] for part in content)


def required(item: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text that an item must have."""
    if not isinstance(value := item.get(name), str) or not value:
        raise missing(f"{where}.{name}")
    return value


_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def count_values(body: bytes) -> int:
    """Return the number of strings (also names), arrays and objects in JSON; other threads can run."""
    text = np.frombuffer(body.replace(rb"\\", b"  ").replace(rb"\"", b"  "), np.uint8)
    quotes = text == ord('"')
    outside = np.add.accumulate(quotes, dtype=np.uint8) % 2 == 0
    opening = (text == ord("[")) | (text == ord("{"))
    return int(np.count_nonzero(quotes)) // 2 + int(np.count_nonzero(opening & outside))


def decode(body: bytes, form: type[_Form]) -> _Form:
    """Decode and validate a request; raise `ApiError` if it is invalid.

    Other threads wait for much of this.
    """
    if len(body) > LARGE and (count := count_values(body)) > MOST_VALUES:
        raise ApiError(
            f"the body has {count} strings, arrays and objects; the limit is {MOST_VALUES}",
            code="too_many_values",
        )
    try:
        try:
            return msgspec.json.decode(body, type=form)
        except msgspec.ValidationError as error:
            if _UNKNOWN.match(str(error)) is None:
                raise
            return msgspec.convert(_without_nulls(msgspec.json.decode(body), form), form, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None


def _without_nulls(value: Any, kind: Any) -> Any:
    """Return the value of a field without members that are null, where its type lists the members."""
    if isinstance(value, list):
        return [_without_nulls(item, kind) for item in value]
    members = _members(kind) if isinstance(value, dict) else None
    if members is None:
        return value
    return {key: _without_nulls(item, members.get(key)) for key, item in value.items() if item is not None}


@cache
def _members(kind: Any) -> Mapping[str, Any] | None:
    """Return the types of the members of the structure that a type is or contains; None if there is none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.name: field.type for field in msgspec.structs.fields(kind)}
    return next((found for part in get_args(kind) if (found := _members(part)) is not None), None)


def _invalid(message: str, body: bytes) -> ApiError:
    """Return the error for a body that msgspec refuses with this message."""
    text, found_place, rest = message.rpartition(" - at `$")  # a field's name may contain the same
    text, place = (text, rest.removesuffix("`").removeprefix(".")) if found_place else (message, None)
    if place is not None and place.startswith("messages[...]"):
        place = place.replace("[...]", f"[{_first_invalid(body)}]", 1)
    for pattern, problem, code in (
        (_UNKNOWN, "Unrecognized request argument supplied: ", "unknown_parameter"),
        (_MISSING, "you must provide ", "missing_required_parameter"),
    ):
        if found := pattern.fullmatch(text):
            param = f"{place}.{found[1]}" if place else found[1]
            return ApiError(problem + param, param=param, code=code)
    text = text[0].lower() + text[1:]
    return ApiError(f"{place}: {text}" if place else text, param=place, code="invalid_value")


def _first_invalid(body: bytes) -> int:
    """Return the index of the first message of a body that is not valid."""
    messages = msgspec.json.decode(body)["messages"]
    for i, message in enumerate(messages):
        try:
            msgspec.convert(_without_nulls(message, Message), Message)
        except msgspec.ValidationError:
            return i
    return len(messages)
