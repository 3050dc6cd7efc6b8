"""Completions and chat: OpenAI's client gets the same text as the prompt alone."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from support.scheduled_texts import alone, answer_alone, texts_of
from support.servers import server_requests
from support.servers.running_server import Gate, Running, events, running, wait_until

from metal_prefill import Model

PROMPT = "ROMEO:\nBut soft"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


def complete(server: Running, **options: Any) -> Any:
    """Complete a prompt, greedily unless another temperature is given, and return the answer."""
    options = {"model": "demo", "prompt": PROMPT, "temperature": 0, **options}
    return server.client().completions.create(**options)


OURS: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "repeat_penalty": 1.2, "min_tokens": 4, "regex": "[A-Z ]+"}


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"temperature": 0, "max_tokens": 20}, {}),
        ({"max_tokens": 20, **SAMPLED}, SAMPLED),
        ({"seed": 3}, {"temperature": 1.0, "seed": 3}),  # the defaults
        ({"seed": 1, "extra_body": OURS}, {"temperature": 1.0, "seed": 1, **OURS}),
    ],
)
def test_the_text_equals_that_of_the_prompt_alone(
    server: Running, cpu_model: Model, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    answer = server.client().completions.create(model="demo", prompt=PROMPT, **asked)
    most = asked.get("max_tokens", 16)
    assert answer.choices[0].text == alone(cpu_model, PROMPT, most, **options)
    assert answer.choices[0].finish_reason == "length"
    prompt_tokens = len(cpu_model.tokenizer.encode(PROMPT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, most)


def test_several_prompts_have_n_texts_each(server: Running, cpu_model: Model) -> None:
    prompts = [PROMPT, "JULIET:\n"]
    answer = complete(server, prompt=prompts, n=2, max_tokens=8, temperature=1, seed=4)
    pieces = cpu_model.generate_many(prompts, 8, n=2, temperature=1.0, seed=4)
    assert [c.text for c in answer.choices] == texts_of(pieces, 4)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(len(cpu_model.tokenizer.encode(p)) for p in prompts)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_texts_with_the_highest_mean_log_probability_are_returned(
    server: Running, logprobs: int | None
) -> None:
    options: dict[str, Any] = {"prompt": [PROMPT, "JULIET:\n"], "max_tokens": 12, "temperature": 1.5}
    options |= {"seed": 6, "stop": "."}
    candidates = complete(server, **options, n=4, logprobs=logprobs or 0)
    expected: list[Any] = []
    for of_prompt in (candidates.choices[:4], candidates.choices[4:]):
        means = [np.mean(choice.logprobs.token_logprobs) for choice in of_prompt if choice.logprobs]
        expected += [of_prompt[i] for i in np.argsort(means)[::-1][:2]]
    best = complete(server, **options, n=2, best_of=4, logprobs=logprobs)
    assert [choice.text for choice in best.choices] == [choice.text for choice in expected]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    if logprobs is None:
        assert all(choice.logprobs is None for choice in best.choices)
    else:
        assert [choice.logprobs for choice in best.choices] == [choice.logprobs for choice in expected]
    assert best.usage.completion_tokens == candidates.usage.completion_tokens
    assert best.usage.prompt_tokens == candidates.usage.prompt_tokens


def test_stops_bias_and_echo_take_effect(server: Running, cpu_model: Model) -> None:
    whole = alone(cpu_model, PROMPT, 30)
    (stopped,) = complete(server, max_tokens=30, stop=[whole[8:11], "no such text"]).choices
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(whole[8:11])], "stop")
    first = next(iter(cpu_model.session().stream(PROMPT, 1))).token
    (biased,) = complete(server, max_tokens=5, logit_bias={str(first): -100}).choices
    assert biased.text == alone(cpu_model, PROMPT, 5, logit_bias={first: -100.0})
    assert biased.text != whole[: len(biased.text)]
    (echoed,) = complete(server, max_tokens=5, echo=True).choices
    assert echoed.text == alone(cpu_model, PROMPT, 5, echo=True)
    assert echoed.text.startswith(PROMPT)


def test_log_probabilities_match_a_session(server: Running, cpu_model: Model) -> None:
    pieces = list(cpu_model.session().stream(PROMPT, 6, logprobs=2))
    (choice,) = complete(server, max_tokens=6, logprobs=2).choices
    found, text = choice.logprobs, choice.text
    assert found.token_logprobs == [piece.logprob for piece in pieces]
    assert found.tokens == [cpu_model.tokenizer.token_bytes(piece.token).decode() for piece in pieces]
    assert [sorted(best.values(), reverse=True) for best in found.top_logprobs] == [
        [value for _, value in piece.top_logprobs] for piece in pieces
    ]
    assert [
        text[o : o + len(t)] for o, t in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens


def test_echo_scores_the_prompt(server: Running, cpu_model: Model) -> None:
    ids = cpu_model.tokenizer.encode(PROMPT * 3)
    scores = cpu_model.score(ids).astype(np.float64)
    for max_tokens in (0, 5):
        answer = complete(server, prompt=ids, max_tokens=max_tokens, logprobs=2, echo=True)
        found = answer.choices[0].logprobs
        assert len(found.tokens) == len(ids) + max_tokens
        assert found.token_logprobs[0] is None
        np.testing.assert_allclose(found.token_logprobs[1 : len(ids)], scores, rtol=0, atol=2e-6)
        assert answer.choices[0].text == cpu_model.tokenizer.decode(ids) + (
            alone(cpu_model, ids, max_tokens) if max_tokens else ""
        )
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), max_tokens)
    # The most probable token of each row; lm-eval checks with it whether a text is greedy.
    greedy = cpu_model.forward_batch([cpu_model.session()], [ids], output="greedy", rows="all")[0]
    for best, token in zip(found.top_logprobs[1 : len(ids)], greedy, strict=False):
        assert max(best, key=best.__getitem__) == cpu_model.tokenizer.token_bytes(int(token)).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_ignore_tokens_outside_the_text(server: Running, cpu_model: Model, stream: bool) -> None:
    tokenizer = cpu_model.tokenizer
    special = min(i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i))
    ids = [special, *tokenizer.encode("But"), special, *tokenizer.encode(" soft é")]
    for prompt in (ids, [special]):
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "logprobs": 0, "echo": True}
        answer = server.post("/v1/completions", {**body, "stream": stream})
        choices = [e["choices"][0] for e in (events(answer) if stream else [answer.json()])]
        text = "".join(choice["text"] for choice in choices)
        tokens = [t for choice in choices for t in choice["logprobs"]["tokens"]]
        offsets = [o for choice in choices for o in choice["logprobs"]["text_offset"]]
        assert len(tokens) == len(offsets) == len(prompt) + 3
        known = [tokenizer.decode(prompt[:i]).removesuffix("\ufffd") for i in range(len(prompt))]
        assert offsets[: len(prompt)] == [len(before) for before in known]
        assert [text[o : o + len(t)] for o, t in zip(offsets[-3:], tokens[-3:], strict=True)] == tokens[-3:]


def test_usage_and_timings_are_the_last_event_on_request(server: Running, cpu_model: Model) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True}
    chunks = events(server.post("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    assert chunks[-1]["timings"].keys() == PARTS
    plain = events(server.post("/v1/completions", body))
    for found in (chunks[:-1], plain):
        assert not any("timings" in chunk for chunk in found)
        assert "".join(c["choices"][0]["text"] for c in found) == alone(cpu_model, PROMPT, 20)
        reasons = [c["choices"][0]["finish_reason"] for c in found]
        assert reasons == [None] * (len(found) - 1) + ["length"]
        assert len({chunk["id"] for chunk in found}) == 1


def test_tokens_round_trip(server: Running, cpu_model: Model) -> None:
    ids = cpu_model.tokenizer.encode(PROMPT)
    answer = server.answer("/tokenize", {"prompt": PROMPT})
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": cpu_model.max_context}
    assert server.answer("/tokenize", {"content": PROMPT, "add_special_tokens": False})["tokens"] == (
        cpu_model.tokenizer.encode(PROMPT, add_bos=False)
    )
    assert server.answer("/detokenize", {"tokens": ids})["prompt"] == PROMPT


def test_the_openai_client_raises_its_own_errors(server: Running) -> None:
    client = server.client()
    with pytest.raises(
        openai.NotFoundError, match="The model 'gpt-4' does not exist; this server has 'demo'"
    ):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.NotFoundError, match="there is no path /v1/nothing"):
        client.get("/nothing", cast_to=object)
    with pytest.raises(openai.APIStatusError, match="/v1/completions takes POST, not GET") as wrong_method:
        client.get("/completions", cast_to=object)
    assert wrong_method.value.response.headers["allow"] == "POST"


def test_models_are_listed_by_name(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["demo", "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"
    assert complete(server, model="other-name", max_tokens=1).model == "other-name"


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


TEXTS = [{"type": "text", "text": "Who art thou? "}, {"type": "text", "text": "<|endoftext|>"}]


@pytest.mark.parametrize("content", [MESSAGES[1]["content"], TEXTS], ids=["text", "parts"])
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
    options: dict[str, Any] = {"stop": cpu_model.tokenizer.chat_stop(), "temperature": 1.0, "seed": 2}
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


def test_log_probabilities_of_chat_match_a_session(server: Running, cpu_model: Model) -> None:
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


LONG_PROMPT = [3 * i % 250 for i in range(300)]
PARTS = {"queue_seconds", "prefill_seconds", "decode_seconds"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG_PROMPT}),
        ("/v1/completions", {"prompt": [LONG_PROMPT[:9], LONG_PROMPT[:200]], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who art thou? " * 9}]}),
    ],
)
def test_timings_sum_to_at_most_the_request_time(server: Running, path: str, body: dict[str, Any]) -> None:
    begin = time.perf_counter()
    answer = server.answer(path, {**body, "max_tokens": 8, "temperature": 0})
    took = time.perf_counter() - begin
    timings = answer["timings"]
    assert timings.keys() == PARTS
    assert all(value >= 0 for value in timings.values())
    assert timings["prefill_seconds"] > 0
    assert timings["decode_seconds"] > 0
    assert sum(timings.values()) <= took
    one = server.answer(path, {**body, "max_tokens": 1})["timings"]
    assert one["decode_seconds"] == 0
    if path == "/v1/completions":
        scored = server.answer(path, {**body, "max_tokens": 0, "echo": True, "logprobs": 1})["timings"]
        assert scored["prefill_seconds"] > 0


def test_waiting_for_others_is_not_part_of_prefill(cpu_model: Model) -> None:
    with running(cpu_model, max_streams=1) as server, ThreadPoolExecutor(2) as threads:
        gate = Gate(server.service)
        body = {"max_tokens": 2, "temperature": 0}
        first = threads.submit(server.post, "/v1/completions", {"prompt": [1, 2], **body})
        assert gate.reached.wait(60)
        second = threads.submit(server.post, "/v1/completions", {"prompt": [3, 4], **body})
        wait_until(lambda: server.service._texts == 2)
        time.sleep(0.3)
        gate.open()
        first.result()
        timings = second.result().json()["timings"]
    assert timings["queue_seconds"] > 0.25
    assert timings["prefill_seconds"] < 0.25


def test_64_clients_each_get_the_same_answers_as_alone(vector_server: Running, vector_model: Model) -> None:
    requests = [server_requests.request(i) for i in range(64)]
    expected = [server_requests.alone(vector_model, *r) for r in requests]
    assert server_requests.answers(vector_server, requests) == expected
