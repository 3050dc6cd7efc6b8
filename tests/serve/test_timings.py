"""``timings``: the parts of an answer's time, next to its usage."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.running_server import Gate, Running, events, running, wait_until

from metal_prefill import Model
from metal_prefill.generation import Scheduler
from metal_prefill.generation._stream import make_streams

PROMPT = [3 * i % 250 for i in range(300)]
PARTS = {"queue_seconds", "prefill_seconds", "decode_seconds"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/completions", {"prompt": [PROMPT[:9], PROMPT[:200]], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who art thou? " * 9}]}),
    ],
)
def test_timings_sum_to_at_most_the_request_time(server: Running, path: str, body: dict[str, Any]) -> None:
    begin = time.perf_counter()
    answer = server.post(path, {**body, "max_tokens": 8, "temperature": 0}).json()
    took = time.perf_counter() - begin
    timings = answer["timings"]
    assert timings.keys() == PARTS
    assert all(value >= 0 for value in timings.values())
    assert timings["prefill_seconds"] > 0
    assert timings["decode_seconds"] > 0
    assert sum(timings.values()) <= took


def test_timings_are_in_the_last_event_with_usage(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.post("/v1/completions", body))
    assert chunks[-1]["timings"].keys() == PARTS
    assert all("timings" not in chunk for chunk in chunks[:-1])
    plain = events(server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True}))
    assert all("timings" not in chunk for chunk in plain)


def test_one_token_has_no_decode_time(server: Running) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()
    assert answer["timings"]["decode_seconds"] == 0


def test_scored_prompts_have_timings(server: Running) -> None:
    body = {"prompt": PROMPT[:20], "max_tokens": 0, "echo": True, "logprobs": 1}
    assert server.post("/v1/completions", body).json()["timings"]["prefill_seconds"] > 0


def test_the_openai_client_ignores_timings(server: Running) -> None:
    answer = server.client().completions.create(model="demo", prompt="ROMEO:", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


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


def test_a_pass_lists_its_rows_by_stream(cpu_model: Model) -> None:
    scheduler = Scheduler(cpu_model)
    (writing,), (reading,) = (
        make_streams(cpu_model.engine, prompt, 1, 8, prefix_namespace="rows")
        for prompt in ([1, 2, 3], PROMPT[:40])
    )
    for stream in (writing, reading):
        scheduler.enter([stream])
        scheduler.step()
    rows = {part.stream: (part.rows, part.writing) for part in scheduler.last_pass.streams}
    assert rows[reading] == (40, False)
    assert rows[writing][1]
    assert sum(n for n, _ in rows.values()) == scheduler.last_pass.prompts + rows[writing][0]
    assert reading.times.started is not None
    assert writing.times.first_token is not None
    assert writing.times.last_token is not None
    assert writing.times.first_token < reading.times.started <= writing.times.last_token
