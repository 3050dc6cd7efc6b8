"""The APIs of Anthropic and of OpenAI's responses, with their clients: the answers of chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.running_server import Running, running, running_with_template

from metal_prefill import Model

USER = {"role": "user", "content": "How is it in Verona?"}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS}
ROME = {"city": "Rome"}
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}\n{% endfor %}"
    "assistant: <think>\n{# </think> #}"
)
COUNTING = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    with running_with_template(THINKS) as server:
        yield server


def chat(server: Running, messages: list[Any], **options: Any) -> Any:
    """Return the choice of chat completions for the same conversation."""
    with server.client() as client:
        answer = client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_tokens=12, **options
        )
    return answer.choices[0]


def answered(call: str, arguments: str) -> list[Any]:
    """Return a conversation in the form of chat completions: a call of the tool, and its result."""
    function = {"name": "weather", "arguments": arguments}
    return [
        USER,
        {"role": "assistant", "tool_calls": [{"id": call, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call, "content": "sunny"},
    ]


def response(server: Running, **options: Any) -> Any:
    """Ask for a response; the events of a stream must lead to the same one."""
    options = {"model": "demo", "temperature": 0, "max_output_tokens": 12, **options}
    with server.client() as client:
        whole = client.responses.create(**options)
        events = list(client.responses.create(**options, stream=True))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert final.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    return whole


def test_a_response_is_the_answer_of_chat_completions(hermes: Running) -> None:
    expected = chat(hermes, [{"role": "system", "content": "Be brief."}, USER])
    for input_ in (
        USER["content"],
        [USER],
        [{"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}],
    ):
        found = response(hermes, instructions="Be brief.", input=input_)
        assert found.output_text == expected.message.content
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert found.usage.output_tokens == 12
        assert found.usage.total_tokens == found.usage.input_tokens + 12


def test_a_response_continues_a_previous_one(hermes: Running) -> None:
    first = response(hermes, instructions="Be brief.", input="a")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": first.output_text}, USER]
    second = response(hermes, input=USER["content"], previous_response_id=first.id)
    assert second.output_text == chat(hermes, messages).message.content
    assert second.previous_response_id == first.id
    third = response(hermes, input="b", previous_response_id=second.id, store=False)
    with pytest.raises(Exception, match=f"Previous response with id '{third.id}' not found"):
        response(hermes, input="c", previous_response_id=third.id)


def test_responses_are_kept_for_their_key_within_a_bound(
    cpu_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metal_prefill.serve._responses.MOST_KEPT", 600)

    def ask(key: str, **body: Any) -> Any:
        return server.post("/v1/responses", {"input": "a" * 100, "max_output_tokens": 1, **body}, key)

    with running(cpu_model, api_keys=["one", "two"]) as server:
        ids = [ask("one").json()["id"] for _ in range(4)]
        assert ask("two", previous_response_id=ids[3]).status_code == 404
        kept = [ask("one", previous_response_id=i, store=False).status_code for i in ids]
    assert kept == [404, 200, 200, 200]


def test_the_oldest_turns_of_a_long_conversation_may_be_dropped(hermes: Running) -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = [
        message
        for i in range(60)
        for message in (
            {"role": "user", "content": f"{i} what art thou?"},
            {"role": "assistant", "content": "A king."},
        )
    ]
    tokenizer = hermes.service.model.tokenizer
    cached = []
    for count in (58, 59):
        history = [system, *turns[: 2 * count], USER]
        with pytest.raises(Exception, match="maximum context length is 1024"):
            chat(hermes, history)
        shorter = {8 * k: [system, *history[1 + 8 * k :]] for k in range(count // 4)}
        dropped = next(
            n for n, kept in shorter.items() if len(tokenizer.apply_chat_template(kept)) <= 1024 - 12
        )
        found = response(hermes, input=history, truncation="auto")
        assert found.dropped_messages == dropped > 0
        assert found.output_text == chat(hermes, shorter[dropped]).message.content
        assert chat(hermes, history, extra_body={"truncation": "auto"}).message.content == found.output_text
        cached.append(found.usage.input_tokens_details.cached_tokens)
    assert cached[1] > 700  # it shares its prefix with the one before
    assert response(hermes, input=[USER], truncation="auto").dropped_messages == 0


def test_a_response_calls_tools_and_takes_their_results(hermes: Running) -> None:
    found = response(hermes, input=[USER], tools=[TOOL], tool_choice="required", max_output_tokens=60)
    (call,) = found.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ROME)
    assert found.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    messages = answered(call.call_id, call.arguments)
    expected = chat(hermes, messages, tools=[CHAT_TOOL]).message.content
    items = [item.model_dump() for item in found.output]
    assert response(hermes, input=[USER, *items, result], tools=[TOOL]).output_text == expected
    again = response(hermes, input=[result], tools=[TOOL], previous_response_id=found.id)
    assert again.output_text == expected


def test_a_response_has_a_schema(hermes: Running) -> None:
    format_ = {"type": "json_schema", "name": "count", "schema": COUNTING}
    found = response(hermes, input="a", text={"format": format_}, max_output_tokens=40)
    assert json.loads(found.output_text)["n"] in (1, 2), found.output_text


def test_reasoning_is_an_item_and_is_kept(thinking: Running) -> None:
    expected = chat(thinking, [USER]).message.reasoning_content
    found = response(thinking, input=[USER])
    (item,) = found.output
    assert (item.type, item.content[0].text) == ("reasoning", expected)
    assert found.usage.output_tokens_details.reasoning_tokens == found.usage.output_tokens == 12
    following = response(thinking, input="a", previous_response_id=found.id)
    spelled_out = response(thinking, input=[USER, item.model_dump(), {"role": "user", "content": "a"}])
    assert following.usage.input_tokens == spelled_out.usage.input_tokens >= found.usage.total_tokens


def messages_api(server: Running, **options: Any) -> Any:
    """Ask for a message with Anthropic's client; the events of a stream must lead to the same one."""
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    options = {"model": "demo", "max_tokens": 12, "extra_body": {"temperature": 0}, **options}
    counted = {
        k: v for k, v in options.items() if k in ("model", "messages", "system", "tools", "tool_choice")
    }
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as events:
            streamed = events.get_final_message()
        tokens = client.messages.count_tokens(**counted).input_tokens
    ignored = {"id": True, "usage": True, "content": {"__all__": {"id"}}}
    assert streamed.model_dump(exclude=ignored) == whole.model_dump(exclude=ignored)
    assert tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    return whole


def test_a_message_is_the_answer_of_chat_completions(hermes: Running) -> None:
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    found = messages_api(hermes, system=[cached], messages=[USER])
    expected = chat(hermes, [{"role": "system", "content": "Be brief."}, USER])
    assert [block.text for block in found.content] == [expected.message.content]
    assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 12)


def test_a_stream_of_a_message_begins_with_the_tokens_of_its_prompt(hermes: Running) -> None:
    question = {"role": "user", "content": "How is it in Verona, and is there rain in the morning?"}
    body = {"model": "demo", "max_tokens": 3, "messages": [question], "stream": True}
    count = hermes.answer("/v1/messages/count_tokens", {"messages": [question]})["input_tokens"]
    for cached in (False, True):
        lines = hermes.post("/v1/messages", body).text.splitlines()
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        begun, ended = found[0]["message"]["usage"], found[-2]["usage"]
        assert begun["input_tokens"] + begun["cache_read_input_tokens"] == count
        assert (begun["cache_read_input_tokens"] == count - 1) == cached
        assert {**begun, "output_tokens": 3} == ended


def test_a_stop_sequence_is_reported(hermes: Running) -> None:
    text = chat(hermes, [USER]).message.content
    found = messages_api(hermes, messages=[USER], stop_sequences=["\u2603", text[4:6]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[4:6])
    assert found.content[0].text == text[: text.index(text[4:6])]


def test_a_message_calls_tools_and_takes_their_results(hermes: Running) -> None:
    tool = {"name": "weather", "input_schema": PARAMETERS}
    found = messages_api(
        hermes, messages=[USER], tools=[tool], tool_choice={"type": "tool", "name": "weather"}, max_tokens=60
    )
    (call,) = found.content
    assert (call.type, call.name, call.input, found.stop_reason) == ("tool_use", "weather", ROME, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [
        USER,
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    same = [*answered(call.id, json.dumps(call.input)), {"role": "user", "content": "And?"}]
    expected = chat(hermes, same, tools=[CHAT_TOOL]).message.content
    assert messages_api(hermes, messages=history, tools=[tool]).content[0].text == expected


def test_the_last_message_of_the_assistant_is_continued(hermes: Running) -> None:
    begun = {"role": "assistant", "content": "It is"}
    expected = chat(hermes, [USER, begun], extra_body={"continue_final_message": True}).message.content
    assert messages_api(hermes, messages=[USER, begun]).content[0].text == expected
    assert chat(hermes, [USER, {**begun, "prefix": True}]).message.content == expected
    assert expected != chat(hermes, [USER, begun]).message.content


def test_reasoning_is_a_block(thinking: Running) -> None:
    expected = chat(thinking, [USER]).message.reasoning_content
    (block,) = messages_api(thinking, messages=[USER], thinking={"type": "disabled"}).content
    assert (block.type, block.thinking) == ("thinking", expected)


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": [USER]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "tool", "content": "a"}], "max_tokens": 1}, 400, "invalid_request_error"),
        ({"messages": [USER], "max_tokens": 1, "model": "other"}, 404, "not_found_error"),
        ({"messages": [{**USER, "content": "word " * 3000}], "max_tokens": 1}, 400, "invalid_request_error"),
        (
            {
                "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}],
                "max_tokens": 1,
            },
            400,
            "invalid_request_error",
        ),
    ],
)
def test_errors_have_the_format_of_messages(
    hermes: Running, body: dict[str, Any], status: int, kind: str
) -> None:
    answer = hermes.post("/v1/messages", body)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind)
    assert ("prompt is too long" in found["error"]["message"]) == (len(body["messages"][0]["content"]) > 99)
