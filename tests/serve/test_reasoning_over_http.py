"""Reasoning over HTTP: a field of its own, whole and in streams; and documents to answer from."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.running_server import Running, running_with_template
from support.tools import ASKED, WEATHER

from metal_prefill import Model

# Names the end of reasoning, as templates do that remove it from earlier answers.
TEMPLATE = (
    "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}{{ message.content.split('</think>')[-1] }}\n{% endfor %}"
    "{{ '<think>\n' if enable_thinking }}"
)
THINKING = r"<think>\na <b\n</think>\n\nc [d-e]"
CALLING = (
    r'<think>\na\n</think>\n\n<tool_call>\{"name": "weather", "arguments": \{"city": "b"\}\}</tool_call>'
)


@pytest.fixture(scope="module")
def thinking(demo_path: Path) -> Iterator[tuple[Running, Model]]:
    with running_with_template(demo_path, TEMPLATE) as served:
        yield served


def ask(server: Running, regex: str | None = None, **options: Any) -> Any:
    extra = {**({"regex": regex} if regex else {}), **options.pop("extra", {})}
    return server.client().chat.completions.create(
        **{"model": "demo", "messages": ASKED, "temperature": 0, "extra_body": extra, **options}
    )


def test_reasoning_is_separated_from_the_answer(thinking: tuple[Running, Model]) -> None:
    message = ask(thinking[0], THINKING).choices[0].message
    assert message.reasoning_content == "a <b"
    assert message.content in ("c d", "c e")


def test_streamed_parts_equal_the_whole_answer(thinking: tuple[Running, Model]) -> None:
    reasoning = answer = ""
    for chunk in ask(thinking[0], THINKING, stream=True):
        delta = chunk.choices[0].delta
        part = getattr(delta, "reasoning_content", None)
        assert not (part and answer)
        reasoning += part or ""
        answer += delta.content or ""
    message = ask(thinking[0], THINKING).choices[0].message
    assert (reasoning, answer) == (message.reasoning_content, message.content)


def test_reasoning_may_have_the_tags_of_gemma_4(demo_path: Path) -> None:
    tags = {"<think>": "<|channel>thought", "</think>": "<channel|>"}
    template, text = TEMPLATE, "<think>\na\n</think>b"
    for think, channel in tags.items():
        template, text = template.replace(think, channel), text.replace(think, channel)
    with running_with_template(demo_path, template) as (server, _):
        answer = ask(server, re.escape(text))
    assert answer.choices[0].message.reasoning_content == "a"
    assert answer.choices[0].message.content == "b"
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_tokens_of_the_reasoning_are_counted(thinking: tuple[Running, Model]) -> None:
    answer = ask(thinking[0], THINKING, logprobs=True)
    tokens = [made.token for made in answer.choices[0].logprobs.content]
    count = next(n for n in range(len(tokens)) if "</think>" in "".join(tokens[:n]))
    assert answer.usage.completion_tokens_details.reasoning_tokens == count < len(tokens)
    *_, last = ask(thinking[0], THINKING, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == count
    plain = ask(thinking[0], "[a-b]")
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_calls_follow_the_reasoning(thinking: tuple[Running, Model]) -> None:
    choice = ask(thinking[0], CALLING, tools=[WEATHER]).choices[0]
    assert choice.message.reasoning_content == "a"
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "b"}


def test_the_prompt_may_begin_the_reasoning(thinking: tuple[Running, Model]) -> None:
    server, _ = thinking
    options: dict[str, Any] = {"max_tokens": 6, "extra": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = ask(server, **options).choices[0].message
    assert message.content == ""
    whole = ask(server, **{**options, "extra": {**options["extra"], "reasoning_format": "none"}})
    assert message.reasoning_content == whole.choices[0].message.content.strip()
    assert not hasattr(whole.choices[0].message, "reasoning_content")


def test_an_answer_of_a_given_form_is_not_reasoning(thinking: tuple[Running, Model]) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(thinking[0], "[a-b]", extra=kwargs).choices[0].message
    assert message.content in ("a", "b")
    assert not hasattr(message, "reasoning_content")


def test_answers_stay_whole_without_a_template_that_knows_reasoning(server: Running) -> None:
    message = ask(server, THINKING).choices[0].message
    assert message.content == "<think>\na <b\n</think>"  # an empty line ends answers of the plain template


def test_documents_are_part_of_the_prompt(thinking: tuple[Running, Model]) -> None:
    server, model = thinking
    documents = [{"title": "a", "text": "The king <|endoftext|> is dead."}]
    answer = ask(server, max_tokens=1, extra={"documents": documents})
    ids = model.tokenizer.apply_chat_template(ASKED, documents=documents)
    assert answer.usage.prompt_tokens == len(ids)
    assert "[a: The king <|endoftext|> is dead.]" in model.tokenizer.decode(ids)
    assert not set(ids) & model.tokenizer.stop_ids


def test_a_template_without_documents_is_named(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support documents; put them into a message"):
        ask(server, max_tokens=1, extra={"documents": [{"text": "x"}]})
    with pytest.raises(openai.BadRequestError, match="documents"):
        ask(server, max_tokens=1, extra={"documents": ["x"]})
