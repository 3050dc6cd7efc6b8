"""Chat: the template of the file, answers in a given form, streams."""

import json
from typing import Any

import jsonschema
from support.running_server import Running

from metal_prefill import Model

MESSAGES: list[Any] = [
    {"role": "system", "content": "A room in the castle."},
    {"role": "user", "content": "Who art thou? <|endoftext|>"},
]
SCHEMA = {
    "type": "object",
    "properties": {"speaker": {"enum": ["ROMEO", "JULIET"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["speaker", "age"],
    "additionalProperties": False,
}


def alone(model: Model, max_tokens: int, messages: list[Any] = MESSAGES, **options: Any) -> str:
    ids = model.tokenizer.apply_chat_template(messages)
    with model.session() as session:
        return "".join(session.generate(ids, max_tokens, stop=model.tokenizer.chat_stop, **options))


def test_an_answer_equals_that_of_the_template_alone(server: Running, cpu_model: Model) -> None:
    answer = server.client().chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=24, temperature=0
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", alone(cpu_model, 24))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(cpu_model.tokenizer.apply_chat_template(MESSAGES))


def test_streams_of_several_answers_match_them(server: Running, cpu_model: Model) -> None:
    stream = server.client().chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_completion_tokens=16,
        n=3,
        seed=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, roles = [""] * 3, [], []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons  # nothing follows the reason for the end
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            reasons += [choice.index] if choice.finish_reason else []
    ids = cpu_model.tokenizer.apply_chat_template(MESSAGES)
    expected = [""] * 3
    options: dict[str, Any] = {"stop": cpu_model.tokenizer.chat_stop, "temperature": 1.0, "seed": 2}
    for i, piece in cpu_model.generate_many([ids], 16, n=3, **options):
        expected[i] += str(piece)
    assert texts == expected
    assert sorted(reasons) == sorted(roles) == [0, 1, 2]
    assert usage is not None
    assert usage.prompt_tokens == len(ids)


def test_a_second_turn_reuses_the_cache_of_the_first(server: Running, cpu_model: Model) -> None:
    client = server.client()
    messages = [*MESSAGES, {"role": "user", "content": "What is thy name, and whence comest thou? " * 12}]
    first = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    messages += [{"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 64
    assert second.choices[0].message.content == alone(cpu_model, 8, messages)


def test_answers_follow_a_schema(server: Running, cpu_model: Model) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        seed=1,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    )
    text = answer.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == alone(cpu_model, 60, temperature=1.0, seed=1, json_schema=SCHEMA)
    anything = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=6, response_format={"type": "json_object"}
    )
    assert (anything.choices[0].message.content or "").startswith("{")


def test_log_probabilities_match_a_session(server: Running, cpu_model: Model) -> None:
    answer = server.client().chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    ids = cpu_model.tokenizer.apply_chat_template(MESSAGES)
    pieces = list(cpu_model.session().stream(ids, 6, logprobs=2))
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [c.logprob for c in content] == [piece.logprob for piece in pieces]
    assert [[t.logprob for t in c.top_logprobs] for c in content] == [
        [value for _, value in piece.top_logprobs] for piece in pieces
    ]
    assert b"".join(bytes(c.bytes or []) for c in content).decode() == answer.choices[0].message.content


def test_the_token_that_ends_a_text_has_no_log_probability(server: Running, cpu_model: Model) -> None:
    (end, *_) = sorted(cpu_model.tokenizer.stop_ids)
    answer = server.client().chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        logit_bias={str(end): 100},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content == []


def test_text_parts_are_joined_and_others_rejected(server: Running, cpu_model: Model) -> None:
    parts = [{"type": "text", "text": "Who art thou? "}, {"type": "text", "text": "<|endoftext|>"}]
    body: dict[str, Any] = {"messages": [MESSAGES[0], {"role": "user", "content": parts}]}
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 8, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == alone(cpu_model, 8)
    parts.append({"type": "image_url", "text": ""})
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "image_url" in refused.json()["error"]["message"]
