"""Request types and their validation.

msgspec decodes a body and validates it against its type in one step, in C, and names the invalid field.
Handwritten checks would be several hundred lines with gaps; pydantic would add four dependencies.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from metal_prefill.serve._bodies import LARGE
from metal_prefill.serve._errors import ApiError

_Form = TypeVar("_Form", bound=msgspec.Struct)

# Strings, arrays and objects of a body. Decoding one takes up to half a microsecond, in which no other thread
# runs; numbers take a tenth of it.
MOST_VALUES = 1 << 18

NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
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
    """Options of a stream of events."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: no obfuscation is added


class TextForm(Form, kw_only=True):
    """Fields common to text generation requests; those after the blank line extend OpenAI's."""

    n: Positive | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None

    top_k: NotNegative | None = None
    min_p: Fraction | None = None
    typical_p: Fraction | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: NotNegative | None = None
    regex: str | None = None
    grammar: str | None = None


class CompletionForm(TextForm, kw_only=True):
    """Request of ``/v1/completions``."""

    prompt: str | list[TokenOrText]
    max_tokens: NotNegative | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class JsonSchema(msgspec.Struct):
    """Named JSON schema."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Required format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


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
    reasoning_effort: str | None = None  # ignored
    modalities: list[Literal["text"]] | None = None
    # Extensions.
    chat_template_kwargs: dict[str, bool | int | float] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_format: Literal["auto", "none"] | None = None


class EmbeddingForm(Form, kw_only=True):
    """Request of ``/v1/embeddings``."""

    input: str | list[TokenOrText]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    # Extensions; see Model.embed.
    instruction: str | None = None
    truncate: Literal["error", "end"] | None = None
    unicode: Literal["NFC"] | None = None


class RerankForm(Form, kw_only=True):
    """Request of ``/v1/rerank`` and ``/v2/rerank``, in the formats of Jina and Cohere."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: Positive | None = None
    return_documents: bool | None = None
    # Extensions; see Model.rerank.
    instruction: str | None = None
    how: Literal["late"] | None = None
    truncate: Literal["error", "end"] | None = None
    unicode: Literal["NFC"] | None = None


class TokenizeForm(Form, kw_only=True):
    """Request of ``/tokenize``: a text or a conversation."""

    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class DetokenizeForm(Form, kw_only=True):
    """Request of ``/detokenize``."""

    tokens: list[int]


_UNKNOWN = "Object contains unknown field `"
_MISSING = re.compile(r"Object missing required field `(.*?)`")


def _divided(message: str) -> tuple[str, str | None]:
    """Return a message of msgspec without the place in the body that it names, and that place."""
    text, found, place = message.rpartition(" - at `$")  # a field's name may contain the same
    return (text, place.removesuffix("`").removeprefix(".")) if found else (message, None)


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
            400,
            f"the body has {count} strings, arrays and objects; the limit is {MOST_VALUES}",
            code="too_many_values",
        )
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        message = str(error)
        text, param = _divided(message)
        if text.startswith(_UNKNOWN):
            name = text[len(_UNKNOWN) : -1]
            field = f"{param}.{name}" if param else name
            raise ApiError(
                400, f"Unrecognized request argument supplied: {field}", param=field, code="unknown_parameter"
            ) from None
        if missing := _MISSING.match(message):
            raise ApiError(
                400, f"you must provide {missing[1]}", param=missing[1], code="missing_required_parameter"
            ) from None
        text = text[0].lower() + text[1:]
        raise ApiError(
            400, f"{param}: {text}" if param else text, param=param, code="invalid_value"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
