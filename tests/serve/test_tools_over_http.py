"""Tools and reasoning over HTTP, whole and in streams; and documents to answer from."""

import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import openai
import pytest
from support.scheduled_texts import alone
from support.servers.running_server import Running, running_with_template
from support.tools import ASKED, CLOCK, WEATHER

from metal_prefill.text._vocabulary import Piece

# Forced output of the bundled model, which was not trained on tools.
CALLING = r'I look\.\n<tool_call>\{"name": "weather", "arguments": \{"city": "[a-z]{1,3}"\}\}</tool_call>'
TWICE = r'(<tool_call>\{"name": "weather", "arguments": \{"city": "a"\}\}</tool_call>){2}'


def parts(answer: Any) -> Any:
    """Return what an answer and a stream must have in common."""
    (choice,) = answer.choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    tokens = answer.usage.completion_tokens, answer.usage.completion_tokens_details
    reasoning = getattr(message, "reasoning_content", None)
    return reasoning, message.content or "", calls, choice.finish_reason, tokens


def ask(server: Running, regex: str | None = None, **options: Any) -> Any:
    """Ask with OpenAI's client, which also puts the same answer together from a stream."""
    extra = {**({"regex": regex} if regex else {}), **options.pop("extra", {})}
    asked = {"model": "demo", "messages": ASKED, "temperature": 0, "extra_body": extra, **options}
    with server.client() as client:
        answer = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            whole = stream.current_completion_snapshot
    assert parts(whole) == parts(answer)
    ids = [call.id for call in whole.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call_id) for call_id in ids)
    deltas = [choice.delta.to_dict() for chunk in chunks for choice in chunk.choices]
    kinds = [kind for delta in deltas for kind in ("content", "reasoning_content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)  # reasoning before the answer
    return answer


def ask_with_tools(server: Running, regex: str | None = None, **options: Any) -> Any:
    return ask(server, regex, **{"tools": [WEATHER], **options})


@pytest.mark.parametrize("options", [{}, {"tool_choice": None}, {"tool_choice": "auto"}])
def test_a_call_is_separated_from_the_answer(hermes: Running, options: dict[str, Any]) -> None:
    answer = ask_with_tools(hermes, CALLING, **options)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert set(json.loads(call.function.arguments)) == {"city"}
    prompt = hermes.model.tokenizer.apply_chat_template(ASKED, tools=[WEATHER])
    assert answer.usage.prompt_tokens == len(prompt)


def test_control_tokens_may_mark_a_call(hermes: Running) -> None:
    tokenizer, options = hermes.model.tokenizer, {"max_tokens": 60}
    begin, middle = (tokenizer.encode(letter, add_bos=False)[0] for letter in "QZ")
    marks = {begin: Piece(b"[TOOL_CALLS]", True), middle: Piece(b"[ARGS]", True)}
    regex = r"so, itQweatherZ\{;city;: ;a;\}".replace(";", '"')
    ask_with_tools(hermes, regex, **options)  # the constraint knows both tokens by their bytes
    with (
        patch.dict(tokenizer._bytes._pieces, marks),
        patch.dict(tokenizer._spelled.special, {"[TOOL_CALLS]": begin, "[ARGS]": middle}),
    ):
        message = ask_with_tools(hermes, regex, **options).choices[0].message
        plain = ask(hermes, regex, **options).choices[0].message
    (call,) = message.tool_calls
    assert (message.content, call.function.name, call.function.arguments) == (
        "so, it",
        "weather",
        '{"city": "a"}',
    )
    assert plain.content == 'so, itweather{"city": "a"}'


def test_an_answer_may_have_several_calls(hermes: Running) -> None:
    choice = ask_with_tools(hermes, TWICE).choices[0]
    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "a"}] * 2
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "clock"}}, {"clock"})],
)
def test_a_call_can_be_required(hermes: Running, choice: Any, names: set[str]) -> None:
    answer = ask_with_tools(
        hermes, tools=[WEATHER, {"type": "function", "function": CLOCK}], tool_choice=choice
    )
    message = answer.choices[0].message
    assert message.content is None
    assert [call.function.name in names for call in message.tool_calls] == [True]
    assert isinstance(json.loads(message.tool_calls[0].function.arguments), dict)


def test_a_required_call_follows_the_tags_of_the_template(hermes: Running) -> None:
    """The next turn, in which the template writes them, continues from the cache of all of it."""
    model = hermes.model
    choice = {"type": "function", "function": {"name": "weather"}}
    question = [{"role": "user", "content": "How is it in Verona, and how will it be in Padua?"}]
    answer = ask_with_tools(hermes, messages=question, tool_choice=choice)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    text = model.tokenizer.decode(model.tokenizer.apply_chat_template(question, tools=[WEATHER]))
    begun = model.tokenizer.encode(text + "\n<tool_call>", add_bos=False)
    assert answer.usage.prompt_tokens == len(begun)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    called = message.model_dump(exclude_none=True)
    after = ask_with_tools(hermes, messages=[*question, called, result], max_tokens=1)
    assert after.usage.prompt_tokens_details.cached_tokens >= len(begun)

    several = ask_with_tools(
        hermes, messages=question, tool_choice="required", parallel_tool_calls=True, max_tokens=1
    )
    assert several.usage.prompt_tokens == len(model.tokenizer.encode(text, add_bos=False))


def test_several_calls_can_be_required(hermes: Running) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("noon", "dusk")]
    options: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": True}
    (choice,) = ask_with_tools(hermes, **options, max_tokens=900, seed=1, temperature=1.0).choices
    calls = [call.function for call in choice.message.tool_calls]
    assert {call.name for call in calls} <= {"noon", "dusk"}
    assert {call.arguments for call in calls} == {"{}"}
    assert 1 < len(calls) <= 16
    assert choice.finish_reason == "tool_calls"


# As pydantic writes a model with a nested one.
PLACE = {"properties": {"x": {"maximum": 9, "minimum": 0, "type": "integer"}}, "required": ["x"]}
ENDS = {"start": {"$ref": "#/$defs/Place"}, "end": {"$ref": "#/$defs/Place"}}
PARAMETERS = {
    "$defs": {"Place": {**PLACE, "title": "Place", "type": "object"}},
    "properties": ENDS,
    "required": ["start", "end"],
    "title": "Route",
    "type": "object",
}
ROUTE = {"type": "function", "function": {"name": "route", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "route"}}


@pytest.mark.parametrize("max_tokens", [1, 8, 16, 24])
def test_a_truncated_required_call_is_a_partial_call(hermes: Running, max_tokens: int) -> None:
    options: dict[str, Any] = {"tools": [ROUTE, WEATHER], "tool_choice": NAMED, "max_tokens": max_tokens}
    choice = ask_with_tools(hermes, **options).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert call.function.name == "route"
    assert call.function.arguments  # empty ones are read like those of a complete call
    assert '{"start": {"x": '.startswith(call.function.arguments[:16])
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_a_call_truncated_within_its_name_is_text(hermes: Running) -> None:
    options: dict[str, Any] = {"tools": [ROUTE, WEATHER], "tool_choice": "required", "max_tokens": 1}
    choice = ask_with_tools(hermes, **options).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content
    assert '{"name": "'.startswith(choice.message.content)


def test_a_call_cut_by_a_stop_string_is_partial(hermes: Running) -> None:
    choice = ask_with_tools(hermes, tools=[ROUTE], tool_choice=NAMED, stop="}").choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].function.arguments.count("{") == 2


def test_calls_can_be_disabled(hermes: Running) -> None:
    answer = ask_with_tools(hermes, CALLING, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens == len(hermes.model.tokenizer.apply_chat_template(ASKED))


def test_tool_results_reach_the_template(hermes: Running) -> None:
    model = hermes.model
    call = ask_with_tools(hermes, CALLING).choices[0].message
    messages = [
        *ASKED,
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Rain."},
    ]
    answer = hermes.client().chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], max_tokens=4, temperature=0
    )
    ids = model.tokenizer.apply_chat_template(messages, tools=[WEATHER])
    prompt = model.tokenizer.decode(ids)
    assert "<tool_response>Rain.</tool_response>" in prompt
    assert '"arguments": {"city"' in prompt  # a mapping, as in the model's own call
    assert answer.choices[0].message.content == alone(model, ids, 4)


def test_invalid_tools_are_reported(hermes: Running, server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="asks for the tool 'sun'; the tools are: weather"):
        ask_with_tools(hermes, tool_choice={"type": "function", "function": {"name": "sun"}})
    with pytest.raises(openai.BadRequestError, match="the chat template does not support tools") as found:
        ask_with_tools(server)
    assert found.value.param == "tools"


# Names the end of reasoning, as templates do that remove it from earlier answers.
TEMPLATE = (
    "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.content.split('</think>')[-1] }}\n{% endfor %}"
    "{{ '<think>\n' if enable_thinking }}"
)
THINKING = r"<think>\na <b\n</think>\n\nc [d-e]"
THINKING_CALL = (
    r'<think>\na\n</think>\n\n<tool_call>\{"name": "weather", "arguments": \{"city": "b"\}\}</tool_call>'
)


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    with running_with_template(TEMPLATE) as served:
        yield served


def test_reasoning_is_separated_from_the_answer(thinking: Running) -> None:
    message = ask(thinking, THINKING).choices[0].message
    assert message.reasoning_content == "a <b"
    assert message.content in ("c d", "c e")


def test_tokens_of_the_reasoning_are_counted(thinking: Running) -> None:
    answer = ask(thinking, THINKING, logprobs=True)
    tokens = [made.token for made in answer.choices[0].logprobs.content]
    count = next(n for n in range(len(tokens)) if "</think>" in "".join(tokens[:n]))
    assert answer.usage.completion_tokens_details.reasoning_tokens == count < len(tokens)
    plain = ask(thinking, "[a-b]")
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_calls_follow_the_reasoning(thinking: Running) -> None:
    choice = ask(thinking, THINKING_CALL, tools=[WEATHER]).choices[0]
    assert choice.message.reasoning_content == "a"
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "b"}


def test_the_prompt_may_begin_the_reasoning(thinking: Running) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "extra": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = ask(thinking, **options).choices[0].message
    assert message.content == ""
    whole = ask(thinking, **{**options, "extra": {**options["extra"], "reasoning_format": "none"}})
    assert message.reasoning_content == whole.choices[0].message.content.strip()
    assert not hasattr(whole.choices[0].message, "reasoning_content")


def test_an_answer_of_a_given_form_is_not_reasoning(thinking: Running) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(thinking, "[a-b]", extra=kwargs).choices[0].message
    assert message.content in ("a", "b")
    assert not hasattr(message, "reasoning_content")


def test_answers_stay_whole_without_a_template_that_knows_reasoning(server: Running) -> None:
    message = ask(server, THINKING).choices[0].message
    assert message.content == "<think>\na <b\n</think>"  # an empty line ends answers of the plain template


def test_documents_are_part_of_the_prompt(thinking: Running) -> None:
    model = thinking.model
    documents = [{"title": "a", "text": "The king <|endoftext|> is dead."}]
    answer = ask(thinking, max_tokens=1, extra={"documents": documents})
    ids = model.tokenizer.apply_chat_template(ASKED, documents=documents)
    assert answer.usage.prompt_tokens == len(ids)
    assert "[a: The king <|endoftext|> is dead.]" in model.tokenizer.decode(ids)
    assert not set(ids) & model.tokenizer.stop_ids


def test_a_template_without_documents_is_named(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support documents; put them into a message"):
        ask(server, max_tokens=1, extra={"documents": [{"text": "x"}]})
    with pytest.raises(openai.BadRequestError, match="documents"):
        ask(server, max_tokens=1, extra={"documents": ["x"]})
