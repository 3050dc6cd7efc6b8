"""Requests as clients send them, and their documented settings: histories, nulls, control tokens."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from openai.types.chat import completion_create_params
from support.native_requests import passes_of_texts
from support.places import ROOT
from support.servers.running_server import Running, events, running, running_with_template
from support.tools import ASKED, WEATHER

from metal_prefill import Model
from metal_prefill.text._vocabulary import Piece

CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "a"\}\}</tool_call>'


def post(server: Running, **body: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1, "temperature": 0, **body})


def refused(server: Running, **body: Any) -> Any:
    return server.refused("/v1/chat/completions", {"messages": ASKED, **body})


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("how", [{"regex": CALL}, {"tool_choice": "required", "max_tokens": 60}])
def test_a_call_is_accepted_by_a_template_that_restricts_its_id(
    iterating: Running, how: dict[str, Any]
) -> None:
    answer = post(iterating, tools=[WEATHER], **{"max_tokens": 90, **how})
    message = answer.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", call["id"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    answer = post(iterating, messages=[*ASKED, message, result], tools=[WEATHER])
    assert answer.status_code == 200, answer.text


def tokens_of(server: Running, *messages: dict[str, Any]) -> Any:
    return server.answer("/tokenize", {"messages": messages})["tokens"]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "b", "c', {"a": "b"}),
    ],
)
def test_arguments_of_a_history_may_be_empty_or_cut(
    iterating: Running, arguments: Any, read: dict[str, Any]
) -> None:
    assert tokens_of(iterating, *history(arguments)) == tokens_of(iterating, *history(read))


@pytest.mark.parametrize("arguments", ["[1]", "text", '{"a": 1}}', "{'a': 1}", 5, ["a"]])
def test_other_arguments_are_named(iterating: Running, arguments: Any) -> None:
    error = refused(iterating, messages=history(arguments))
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert error["message"].startswith(f"{error['param']} must be a JSON object, got ")


def test_an_empty_list_of_calls_is_none(iterating: Running) -> None:
    message = {"role": "assistant", "content": "a"}
    ways: list[dict[str, Any]] = [{}, {"tool_calls": None}, {"tool_calls": []}]
    plain, *others = (tokens_of(iterating, {**message, **calls}) for calls in ways)
    assert others == [plain, plain]


def test_fields_of_messages_reach_the_template_or_are_refused(iterating: Running) -> None:
    message = {"role": "assistant", "content": "a"}
    plain, thought = (tokens_of(iterating, {**message, **more}) for more in ({}, {"thinking": "b"}))
    decode = iterating.model.tokenizer.decode
    assert decode(thought) == decode(plain).replace(": a", ": a(b)", 1)
    error = refused(iterating, messages=[*ASKED, {"role": "user", "contnet": "b"}])
    assert error["code"] == "unknown_parameter"
    nulls = dict.fromkeys(("audio", "function_call", "refusal", "parsed", "tool_calls"))
    assert post(iterating, messages=[*ASKED, {**message, **nulls, "annotations": []}]).status_code == 200


def test_a_system_message_that_a_template_rejects_begins_the_question() -> None:
    template = (  # as Gemma 2's
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
    with running_with_template(template) as server:
        assert (
            server.model.tokenizer.decode(tokens_of(server, system, question)) == "user: Be brief.\n\nWho?\n"
        )
        assert post(server, messages=[system, question]).status_code == 200
        for messages, message in (
            ([system, question, question], "System role not supported"),
            ([system], "System role not supported"),
            ([question, question], "roles must alternate"),
        ):
            error = refused(server, messages=messages)
            assert error["param"] == "messages"
            assert message in error["message"]


def test_null_is_the_same_as_no_field(iterating: Running) -> None:
    fields = set(completion_create_params.CompletionCreateParamsBase.__annotations__) - {
        "messages",
        "max_tokens",
    }
    assert len(fields) > 30
    answer = post(iterating, **dict.fromkeys([*fields, "stream", "not_yet_known"]))
    assert answer.status_code == 200, answer.text
    assert refused(iterating, not_yet_known=1)["param"] == "not_yet_known"
    nested = {"stream_options": {"new": None}, "response_format": {"type": "text", "new": None}}
    with_nulls = {"tools": [{**WEATHER, "new": None}], "chat_template_kwargs": {"new": None}, **nested}
    assert post(iterating, **with_nulls).status_code == 200
    iterating.answer("/v1/responses", {"input": "a", "text": {"new": None}})
    assert refused(iterating, stream_options={"new": 1}, new=None)["param"] == "stream_options.new"


@pytest.mark.parametrize(
    ("template", "none", "high"),
    [
        ("{{ reasoning_effort }}", "none", "high"),
        (
            "{{ 'It thinks.' if enable_thinking else 'It answers at once.' }}",
            "It answers at once.",
            "It thinks.",
        ),
    ],
)
def test_the_effort_of_reasoning_reaches_the_template(template: str, none: str, high: str) -> None:
    with running_with_template(template) as server:
        for effort, expected in (("none", none), ("high", high)):
            count = post(server, reasoning_effort=effort).json()["usage"]["prompt_tokens"]
            assert count == len(server.model.tokenizer.encode(expected, add_bos=False))
        body: dict[str, Any] = {"messages": ASKED, "output_config": {"effort": "high"}}
        assert server.answer("/v1/messages/count_tokens", body)["input_tokens"] == count
        usage = server.answer("/v1/messages", {**body, "max_tokens": 1})["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
        if "effort" not in template:  # the client decides
            body["thinking"] = {"type": "disabled"}
            found = server.answer("/v1/messages/count_tokens", body)["input_tokens"]
            assert found == len(server.model.tokenizer.encode(none, add_bos=False))


def test_variables_of_a_template_may_be_of_any_type_and_are_plain_text() -> None:
    template = "{{ a }}{{ b | join(',') }}{{ c is none }}{{ d.e }}"
    with running_with_template(template) as server:
        control = next(iter(server.model.tokenizer._spelled.special))
        variables = {"a": control, "b": ["x", "y"], "c": None, "d": {"e": 2.5}}
        count = post(server, chat_template_kwargs=variables).json()["usage"]["prompt_tokens"]
        assert count == len(server.model.tokenizer.encode(f"{control}x,yTrue2.5", add_bos=False))
        assert count > len(server.model.tokenizer.encode(control, add_bos=False, parse_special=True))


def test_prompts_may_spell_control_tokens(server: Running, cpu_model: Model) -> None:
    tokenizer = cpu_model.tokenizer
    control = next(iter(tokenizer._spelled.special))
    text = f"a{control}b"

    def tokens(**options: Any) -> Any:
        return server.answer("/tokenize", {"prompt": text, **options})["tokens"]

    assert tokens() == tokenizer.encode(text, parse_special=True)
    assert tokens(parse_special=False) == tokenizer.encode(text)
    assert tokens(add_special=False) == tokenizer.encode(text, parse_special=True, add_bos=False)
    assert tokens(add_special_tokens=False) == tokens(add_special=False)
    for options in ({}, {"parse_special": False}, {"add_special_tokens": False}):
        answer = server.answer("/v1/completions", {"prompt": text, "max_tokens": 1, "echo": True, **options})
        assert answer["usage"]["prompt_tokens"] == len(tokens(**options))
        assert answer["choices"][0]["text"].startswith(text)


def test_tokens_of_a_conversation_are_those_of_its_prompt(iterating: Running) -> None:
    last = {"role": "assistant", "content": "It is"}
    for body in (
        {"messages": ASKED},
        {"messages": ASKED, "tools": [WEATHER]},
        {"messages": ASKED, "chat_template_kwargs": {"tools": None}},
        {"messages": [*ASKED, last], "continue_final_message": True},
    ):
        found, answer = iterating.post("/tokenize", body).json(), post(iterating, **body)
        if answer.status_code == 400:
            assert found == answer.json()
        else:
            assert found["count"] == answer.json()["usage"]["prompt_tokens"]
    long = [{"role": "user", "content": "a b " * 5000}]
    assert iterating.answer("/tokenize", {"messages": long})["count"] > iterating.model.max_context
    counted = iterating.answer("/v1/messages/count_tokens", {"messages": long})
    assert counted["input_tokens"] > iterating.model.max_context


def test_a_suffix_is_filled_in(cpu_model: Model) -> None:
    tokenizer = cpu_model.tokenizer
    body = {"prompt": "a", "suffix": "b", "max_tokens": 3, "temperature": 0}
    with running(cpu_model) as server:
        error = server.post("/v1/completions", body).json()["error"]
        assert (error["param"], error["code"]) == ("suffix", "unsupported")
        with patch.dict(vars(tokenizer), {"fill_tokens": (7, 8, 9)}):
            answer = server.answer("/v1/completions", body)
        a, b = (tokenizer.encode(letter, add_bos=False) for letter in "ab")
        ids = [*tokenizer.encode(""), 7, *a, 8, *b, 9]
        expected = server.answer("/v1/completions", {"prompt": ids, "max_tokens": 3, "temperature": 0})
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Running]:
    with running_with_template("{{ messages[0].content }}{# </think> #}") as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "content"), [(None, ";bc;d"), (";a", ";bc;d"), ("a", ";bc;d"), ("c", ";b"), (";b", "")]
)
def test_reasoning_ends_at_a_control_token_and_has_no_stop_strings(
    reasoning: Running, stream: bool, stop: str | None, content: str
) -> None:
    tokenizer = reasoning.model.tokenizer
    begin, end = (tokenizer.encode(letter, add_bos=False)[0] for letter in "QZ")
    tags = {begin: Piece(b"<think>", True), end: Piece(b"</think>", True)}
    options = {"regex": "Q;a;Z;bc;d", "stop": stop, "stream": stream, "max_tokens": 30}
    post(reasoning, **options)  # the constraint knows both tokens by their bytes
    with (
        patch.dict(tokenizer._bytes._pieces, tags),
        patch.dict(tokenizer._spelled.special, {"<think>": begin, "</think>": end}),
    ):
        answer = post(reasoning, **options)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(answer)]
        found = {key: "".join(d.get(key, "") for d in deltas) for key in ("content", "reasoning_content")}
    else:
        found = answer.json()["choices"][0]["message"]
    assert (found["reasoning_content"], found["content"]) == (";a;", content)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"json": {"const": "a"}}, '"a"'),
        ({"json": '{"const": "a"}'}, '"a"'),
        ({"json_object": True}, "{.*"),
        ({"regex": "[ab]c"}, "[ab]c"),
        ({"choice": ['say "yes"', "n\u00e9"]}, 'say "yes"|n\u00e9'),
        ({"grammar": 'start: "x" "y"'}, "xy"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_constraints_may_have_the_form_of_vllm(
    server: Running, path: str, outputs: dict[str, Any], pattern: str
) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {"messages": ASKED}
    body = {**prompt, "structured_outputs": outputs, "max_tokens": 20, "temperature": 0}
    (choice,) = server.answer(path, body)["choices"]
    assert re.fullmatch(
        pattern, choice["text"] if "text" in choice else choice["message"]["content"], re.DOTALL
    )


def test_the_end_of_a_text_may_be_ignored(server: Running, cpu_model: Model) -> None:
    bias = dict.fromkeys(map(str, cpu_model.tokenizer.stop_ids), 100)
    reasons = [
        server.answer("/v1/completions", {"prompt": "a", "max_tokens": 9, "logit_bias": bias, **more})
        for more in ({}, {"ignore_eos": True})
    ]
    assert [answer["choices"][0]["finish_reason"] for answer in reasons] == ["stop", "length"]


def test_tokens_are_forced_if_the_end_of_a_text_is_ignored(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of_texts(monkeypatch)
    body = {"prompt": "a", "max_tokens": 20, "regex": "a{12}", "ignore_eos": True}
    assert server.answer("/v1/completions", body)["choices"][0]["text"] == "a" * 12
    assert not passes  # the first token is that of the prompt's pass, and forces the others


def test_the_penalty_of_repetition_has_two_names(server: Running) -> None:
    texts = [
        server.answer("/v1/completions", {"prompt": "a a a", "max_tokens": 20, "temperature": 0, **named})
        for named in ({}, {"repeat_penalty": 1.7}, {"repetition_penalty": 1.7})
    ]
    plain, ours, theirs = (text["choices"][0]["text"] for text in texts)
    assert ours == theirs != plain


DOCUMENTS = ["The king is dead.", "Long live the queen.", "A rose"]
RANKED = {"model": "ranks", "query": "king", "documents": DOCUMENTS}


def settings(heading: str) -> Any:
    """Return the settings of a program in docs/tasks/clients.md."""
    text = (ROOT / "docs/tasks/clients.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)


def ask(server: Running, url: str, port: int, body: Any, add: str = "") -> None:
    """Send a request to an address with one of the page's ports, joined with a name as a client does."""
    host, path = url.split(f":{port}/")
    assert re.fullmatch(r"http://[\w.]+", host)
    answer = server.post(f"/{path.rstrip('/')}{add}", body, key="none")
    assert answer.status_code == 200, answer.text


def test_open_webui_chats_embeds_and_ranks(server: Running, vector_server: Running, ranker: Running) -> None:
    variables = settings("Open WebUI")["services"]["open-webui"]["environment"]
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who art thou?"}]}
    # The answer, and its title.
    for more in ({"stream": True}, {"stream": False, "max_completion_tokens": 9}):
        ask(server, variables["OPENAI_API_BASE_URL"], 8080, {**body, **more}, "/chat/completions")
    vectors = {"input": DOCUMENTS, "model": "vectors"}
    ask(vector_server, variables["RAG_OPENAI_API_BASE_URL"], 8081, vectors, "/embeddings")
    ask(ranker, variables["RAG_EXTERNAL_RERANKER_URL"], 8082, {**RANKED, "top_n": len(DOCUMENTS)})


def test_continue_chats_completes_embeds_and_ranks(
    server: Running, vector_server: Running, ranker: Running
) -> None:
    models = {role: model for model in settings("Continue")["models"] for role in model["roles"]}
    options = {"max_tokens": 9, "temperature": 0, "stop": ["<|endoftext|>", "/src/", "```"], "stream": True}
    content = [{"type": "text", "text": "Who art thou?"}]
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": content}], **options}
    body["stream_options"] = {"include_usage": True}
    assert models["chat"]["provider"] == "openai"
    ask(server, models["chat"]["apiBase"], 8080, body, "/chat/completions")
    assert models["autocomplete"]["useLegacyCompletionsEndpoint"]
    body = {"model": "demo", "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", **options}
    ask(server, models["autocomplete"]["apiBase"], 8080, body, "/completions")
    vectors = {"input": DOCUMENTS, "model": "vectors", "encoding_format": "base64"}
    ask(vector_server, models["embed"]["apiBase"], 8081, vectors, "/embeddings")
    assert models["rerank"]["provider"] == "cohere"
    ask(ranker, models["rerank"]["apiBase"], 8082, RANKED, "/rerank")
