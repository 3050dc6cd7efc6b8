"""Chat: the template of the file, answers in a given form, streams."""

import json
from typing import Any

import jsonschema
import pytest
from support.scheduled_texts import answer_alone, texts_of
from support.servers.running_server import Running

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


def chat(server: Running, **options: Any) -> Any:
    """Ask with OpenAI's client, greedily unless another temperature is given."""
    options = {"model": "demo", "messages": MESSAGES, "temperature": 0, **options}
    return server.client().chat.completions.create(**options)


PARTS = [{"type": "text", "text": "Who art thou? "}, {"type": "text", "text": "<|endoftext|>"}]


@pytest.mark.parametrize("content", [MESSAGES[1]["content"], PARTS], ids=["text", "parts"])
def test_an_answer_equals_that_of_the_template_alone(server: Running, cpu_model: Model, content: Any) -> None:
    answer = chat(server, messages=[MESSAGES[0], {"role": "user", "content": content}], max_tokens=24)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", answer_alone(cpu_model, MESSAGES, 24))
    assert answer.usage.prompt_tokens == len(cpu_model.tokenizer.apply_chat_template(MESSAGES))


def test_streams_of_several_answers_match_them(server: Running, cpu_model: Model) -> None:
    stream = chat(
        server,
        max_completion_tokens=16,
        n=3,
        temperature=None,  # the default is 1
        seed=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, roles = [""] * 3, [], []
    usage: Any = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons  # nothing follows the reason for the end
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
            reasons += [choice.index] if choice.finish_reason else []
    ids = cpu_model.tokenizer.apply_chat_template(MESSAGES)
    options: dict[str, Any] = {"stop": cpu_model.tokenizer.chat_stop, "temperature": 1.0, "seed": 2}
    assert texts == texts_of(cpu_model.generate_many([ids], 16, n=3, **options), 3)
    assert sorted(reasons) == sorted(roles) == [0, 1, 2]
    assert usage.prompt_tokens == len(ids)


def test_answers_follow_a_schema(server: Running, cpu_model: Model) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    text = (
        chat(server, temperature=1, seed=1, max_tokens=60, response_format=format_).choices[0].message.content
    )
    jsonschema.validate(json.loads(text), SCHEMA)
    assert text == answer_alone(cpu_model, MESSAGES, 60, temperature=1.0, seed=1, json_schema=SCHEMA)
    anything = chat(server, max_tokens=6, response_format={"type": "json_object"})
    assert anything.choices[0].message.content.startswith("{")


def test_log_probabilities_match_a_session(server: Running, cpu_model: Model) -> None:
    (choice,) = chat(server, max_tokens=6, logprobs=True, top_logprobs=2).choices
    ids = cpu_model.tokenizer.apply_chat_template(MESSAGES)
    pieces = list(cpu_model.session().stream(ids, 6, logprobs=2))
    content = choice.logprobs.content
    assert [c.logprob for c in content] == [piece.logprob for piece in pieces]
    assert [[t.logprob for t in c.top_logprobs] for c in content] == [
        [value for _, value in piece.top_logprobs] for piece in pieces
    ]
    assert b"".join(bytes(c.bytes) for c in content).decode() == choice.message.content


def test_the_token_that_ends_a_text_has_no_log_probability(server: Running, cpu_model: Model) -> None:
    (end, *_) = sorted(cpu_model.tokenizer.stop_ids)
    (choice,) = chat(server, max_tokens=6, logprobs=True, logit_bias={str(end): 100}).choices
    assert (choice.finish_reason, choice.logprobs.content) == ("stop", [])
