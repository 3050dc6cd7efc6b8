"""Bodies that are valid JSON, and made to take long, or much memory, or to be repeated in the answer."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from support.servers.running_server import POST, Running, read_all

from metal_prefill import Model
from metal_prefill._support.messages import MOST_CHARACTERS
from metal_prefill.serve import _connections, _endpoint, _service
from metal_prefill.serve._completions import CompletionChoice, prompts_of
from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._forms import LARGE, MOST_VALUES, CompletionForm, RerankForm, decode
from metal_prefill.serve._service import MOST_TEXT
from metal_prefill.tasks._prompts import PromptRules
from metal_prefill.text import ChatTemplate
from metal_prefill.text._chat_template import _MARKERS

T = TypeVar("T")
BODY = {"prompt": "ROMEO:", "max_tokens": 2, "temperature": 0}
MOST_S = 2.0  # of processor time; each of these took more than 5 s, which grew with the square of its size


def quick(call: Callable[[], T]) -> T:
    """Return what a call returns, which must not take long."""
    begin = time.process_time()
    result = call()
    assert time.process_time() - begin < MOST_S
    return result


def refused(body: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(body.encode(), CompletionForm)
    return caught.value


def test_keys_with_equal_hashes_are_rejected_in_linear_time() -> None:
    keys = ", ".join(f'"{i * (2**61 - 1)}": 1' for i in range(1, 40_000))
    error = quick(lambda: refused(f'{{"prompt": "a", "logit_bias": {{{keys}}}}}'))
    assert "2147483647" in str(error)
    assert "logit_bias" in str(error)


@pytest.mark.parametrize("name", ["` - at `$", "`", "` - at `$.a`", "Object contains unknown field `"])
def test_unknown_fields_with_any_name_are_rejected_in_linear_time(name: str) -> None:
    body = json.dumps({"prompt": "a", name * 20_000 + "\n": 1})
    quick(lambda: refused(body))


def test_errors_repeat_only_the_ends_of_long_values(server: Running) -> None:
    long = "\U000e0001" * 200_000
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/completions", {**BODY, "model": long}),
        ("/v1/completions", {**BODY, long: 1}),
        ("/v1/chat/completions", {**chat, "tool_choice": long}),
        ("/v1/chat/completions", {"messages": [{"role": long}]}),
        ("/v1/chat/completions", {**chat, "tools": [{"function": {"name": "a"}}], "tool_choice": long}),
        ("/v1/completions", {**BODY, "regex": "(" + long}),
    ):
        answer = server.post(path, body)
        assert answer.status_code in (400, 404)
        error = answer.json()["error"]
        assert len(error["message"]) < MOST_CHARACTERS + 10
        assert len(error["param"] or "") < MOST_CHARACTERS + 10


def test_messages_may_contain_every_character_that_marks_control_tokens(server: Running) -> None:
    marks = "".join(map(chr, itertools.chain(*_MARKERS)))
    error = server.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": marks}]})
    assert "contain all of the 108,500 characters" in error["message"]


def test_a_marker_is_found_in_linear_time_whatever_messages_contain() -> None:
    escaped = "".join(json.dumps(chr(c))[1:-1] for c in itertools.chain(range(0x2801, 0x2900), _MARKERS[1]))
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_end|>"])
    messages = [{"role": "user", "content": "\\ud840" * 150_000}, {"role": "user", "content": escaped}]
    assert escaped in quick(lambda: "".join(text for text, _ in template.render(messages, {})))


def test_normalization_of_combining_marks_takes_linear_time() -> None:
    rules = PromptRules(unicode="NFC")
    text = "a" + "\u0301" * 40_000 + "\u0316" * 40_000
    quick(lambda: rules.normalized(text))
    assert rules.normalized("a\u0301\u0316") == "\u00e1\u0316"


def test_metadata_is_not_kept() -> None:
    assert decode(b'{"prompt": "a", "metadata": {"a": [[], []]}}', CompletionForm).metadata is None
    assert decode(b'{"query": "a", "documents": [], "metadata": {"a": 1}}', RerankForm).metadata is None


def chunked(chunks: int) -> bytes:
    body = json.dumps(BODY).encode()
    pieces = [b" "] * (chunks - 1) + [body]
    head = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_body_may_have_many_chunks_but_not_any_number(server: Running) -> None:
    for count, status in ((_connections.MOST_CHUNKS, b"200 "), (2 * _connections.MOST_CHUNKS, b"400 ")):
        answer = server.exchange(chunked(count))
        assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"the body has 4101 chunks in its first 4101 bytes; the limit is 4096" in answer
    body = chunked(3000)  # chunks are counted for each body
    both = server.exchange(body.replace(b"connection: close\r\n", b"") + body)
    assert both.count(b"HTTP/1.1 200 ") == 2


def test_invalid_data_after_an_answer_closes_the_connection_silently(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"not a chunk\r\n")
        read_all(connection)
    assert server.get("/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_long_texts_are_encoded_while_other_threads_run(cpu_model: Model) -> None:
    cpu_model.tokenizer.encode("a")  # builds the segmenter
    thread = threading.Thread(target=cpu_model.tokenizer.encode, args=("hello world " * 100_000,))
    thread.start()
    ticks = [time.perf_counter()]
    while thread.is_alive():
        time.sleep(0.001)
        ticks.append(time.perf_counter())
    longest = max(later - earlier for earlier, later in itertools.pairwise(ticks))
    assert longest < (ticks[-1] - ticks[0]) / 2


def test_a_text_that_cannot_fit_is_rejected_before_it_is_encoded(
    server: Running, cpu_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(cpu_model.tokenizer, "encode", refuse)
    long = "a" * 100_000
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
    ):
        error = server.refused(path, body)
        assert error["code"] == "context_length_exceeded"
        assert "tokens exceeds the context of 1024" in error["message"]


def test_large_bodies_are_prepared_one_at_a_time(server: Running) -> None:
    async def run() -> None:
        order: list[str] = []

        async def prepare(name: str, size: int, ready: asyncio.Event) -> None:
            async with server.service.turn(size) as end_turn:
                order.append(name)
                await ready.wait()
                end_turn()
                end_turn()  # further calls have no effect
                order.append(f"{name} is answered")
                await asyncio.sleep(0)

        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(prepare("a", LARGE + 1, first))]
        tasks += [asyncio.create_task(prepare(name, LARGE + 1, second)) for name in "bc"]
        tasks += [asyncio.create_task(prepare("small", LARGE, second))]
        await asyncio.sleep(0.01)
        assert sorted(order) == ["a", "small"]
        first.set()
        await asyncio.sleep(0.01)
        assert order[2:] == ["a is answered", "b"]
        tasks[1].cancel()  # its turn ends, too
        await asyncio.sleep(0.01)
        assert order[-1] == "c"
        second.set()
        await asyncio.wait(tasks)

    asyncio.run(run())


def threads_of(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Return a list that gets the name of the thread of each call of a function."""
    names: list[str] = []
    real = getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return real(*arguments)

    patch.setattr(owner, name, noted)
    return names


def test_large_bodies_and_answers_are_processed_outside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = threads_of(monkeypatch, _endpoint, "decode")
    assembling = threads_of(monkeypatch, CompletionChoice, "whole")
    for size in (0, LARGE):
        body = {**BODY, "logprobs": 2, "user": "a" * size}
        server.answer("/v1/completions", body)
    assert ["AnyIO worker thread" in name for name in decoding] == [False, True]
    assert ["AnyIO worker thread" in name for name in assembling] == [True, True]


@pytest.mark.parametrize(
    ("item", "each"),
    [("[],", 1), ("{},", 1), ('"",', 1), ('{"a":0},', 2), (r'"\\","\"[{",', 2), ('"[{",[],0,1e5,', 2)],
)
def test_the_values_of_a_large_body_are_limited(item: str, each: int) -> None:
    """No other thread runs while they become objects."""
    others = 5  # "prompt", "", "metadata" and two objects
    copies = (MOST_VALUES - others - 2) // each

    def body(copies: int) -> str:
        return '{"prompt":"","metadata":{"a":[' + item * copies + "0]" + " " * LARGE + "}}"

    decode(body(copies).encode(), CompletionForm)
    error = refused(body(copies + 1))
    count = others + 2 + each * (copies + 1)
    assert str(error) == f"the body has {count} strings, arrays and objects; the limit is {MOST_VALUES}"
    assert error.code == "too_many_values"


def test_lists_of_millions_of_token_ids_are_not_copied() -> None:
    ids: list[int | str | list[int]] = [1] * 4_000_000
    assert prompts_of(ids, "prompt")[0] is ids
    texts: list[int | str | list[int]] = [[1], "a"]
    assert prompts_of(texts, "prompt") is texts
    wrongs: list[Any] = [[], [1, "a"], [[1], 1]]
    for wrong in wrongs:
        with pytest.raises(ApiError, match="prompt must be a text, token ids, or a list of either"):
            prompts_of(wrong, "prompt")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "TEXT"}),
        ("/tokenize", {"content": "TEXT"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/embeddings", {"input": ["a", "TEXT"], "truncate": "end"}),
        ("/v1/embeddings", {"input": "a", "instruction": "TEXT"}),
        ("/v1/rerank", {"query": "TEXT", "documents": ["a"]}),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "TEXT"}),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": "TEXT"}], "truncate": "end"}),
    ],
)
def test_texts_that_take_much_memory_to_encode_are_rejected(
    vector_server: Running, path: str, body: Any
) -> None:
    text = "é" * (MOST_TEXT // 2 + 1)
    error = vector_server.refused(path, json.dumps(body).replace("TEXT", text).encode())
    assert error["code"] == "text_too_long"
    framed = 19 if "messages" in body else 0  # bytes of the plain template
    assert error["message"].endswith(f"a text of {MOST_TEXT + 2 + framed} bytes; the limit is {MOST_TEXT}")


def test_prompts_that_may_fit_are_rejected_if_they_take_much_memory(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_service, "MOST_TEXT", 0)
    limit = 8 * server.service.model.max_context
    for path, body in (
        ("/v1/completions", {"prompt": " " * limit + "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * limit}]}),
    ):
        error = server.refused(path, body)
        assert error["code"] == "text_too_long"
        assert f"; the limit is {limit}" in error["message"]
    server.answer("/tokenize", {"prompt": "a" * limit})
