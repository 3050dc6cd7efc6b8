"""``/activity``: the state of a server, in numbers only, of bounded size; prompts with an early change."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.running_server import Gate, Running, events, running, serving, wait_until

from metal_prefill import Model
from metal_prefill.generation import Scheduler
from metal_prefill.generation._stream import make_streams
from metal_prefill.serve._activity import MOST_TEXTS, PASSES, Activity, Change, change_of, prefix_tree

PROMPT = [5 * i % 250 for i in range(150)]
KEYS = ["the first key", "the second key"]


def complete(server: Running, prompt: Any, key: str = "", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    return dict(server.answer("/v1/completions", body, key))


def activity(server: Running, key: str = "", query: str = "", *, idle: bool = True) -> dict[str, Any]:
    """Return the activity; `idle`: once the latest pass is recorded, which its clients may not wait for."""
    if idle:
        wait_until(lambda: not server.service.loop._running)
    answer = server.get(f"/activity{query}", key)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def rows(done: dict[str, Any]) -> int:
    listed = sum(int(n) for part in ("prompts", "texts") for _, n in done[part])
    return listed + int(done["inputs"]) + int(done["others"])


def test_a_request_is_described_by_its_passes_and_counts(cpu_model: Model) -> None:
    with running(cpu_model) as server:
        before = activity(server)
        assert (before["passes"], before["texts"], before["prefixes"]) == ([], [], [])
        answer = complete(server, PROMPT, max_tokens=4)
        found = activity(server)
    (text,) = found["texts"]
    assert text == {
        "id": answer["id"],
        "index": 0,
        "state": "ended",
        "prompt_tokens": 150,
        "ready_tokens": 150,
        "cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "tokens": 4,
        "change": None,
    }
    assert sum(n for done in found["passes"] for _, n in done["prompts"]) == 150 - text["cached_tokens"]
    assert sum(len(done["texts"]) for done in found["passes"]) >= 1
    assert found["passes"][0]["first"] == 1
    assert all(b["first"] == a["last"] + 1 for a, b in pairwise(found["passes"]))
    assert all(done["others"] == done["inputs"] == 0 for done in found["passes"])
    assert found["other_texts"] == 0


def test_pass_numbers_continue_after_an_idle_engine(cpu_model: Model) -> None:
    with running(cpu_model) as server:
        complete(server, PROMPT)
        latest = activity(server)["passes"][-1]["last"]
        complete(server, "ROMEO:")
        new = activity(server, query=f"?since={latest}")["passes"]
        assert new[0]["first"] == latest + 1
        assert activity(server, query=f"?since={new[-1]['last']}")["passes"] == []


def test_texts_in_flight_are_listed_before_those_that_ended(cpu_model: Model) -> None:
    with running(cpu_model, max_streams=1) as server, ThreadPoolExecutor(2) as threads:
        complete(server, "JULIET:")
        gate = Gate(server.service)
        first = threads.submit(complete, server, PROMPT, max_tokens=50)
        assert gate.reached.wait(60)
        second = threads.submit(complete, server, [1, 2, 3])
        wait_until(lambda: len(activity(server, idle=False)["texts"]) == 3)
        states = [text["state"] for text in activity(server, idle=False)["texts"]]
        assert states[0] in ("prompt", "text")
        assert states[1:] == ["waiting", "ended"]
        gate.open()
        first.result()
        second.result()
        assert [text["state"] for text in activity(server)["texts"]] == ["ended"] * 3


def test_embeddings_count_as_inputs(vector_model: Model) -> None:
    with running(vector_model) as server:
        answer = server.answer("/v1/embeddings", {"input": ["to be", "or not to be"]})
        found = activity(server)
    assert sum(done["inputs"] for done in found["passes"]) == answer["usage"]["prompt_tokens"]
    assert found["texts"] == []


def test_a_key_does_not_see_texts_of_another(demo_path: Path) -> None:
    with serving(demo_path, api_keys=KEYS) as server:
        assert server.get("/activity").status_code == 401
        answer = complete(server, PROMPT, KEYS[0])
        complete(server, PROMPT, KEYS[1], prompt_cache_key="secret")  # which separates texts, too
        own, other = activity(server, KEYS[0]), activity(server, KEYS[1])
        assert [text["id"] for text in own["texts"]] == [answer["id"]]
        assert len(own["prefixes"]) == 1
        assert (other["texts"], other["prefixes"]) == ([], [])
        assert answer["id"] not in json.dumps(other)
        # Only what /metrics shows remains: how busy the others are.
        assert [rows(done) for done in other["passes"]] == [rows(done) for done in own["passes"]]
        assert all(done["others"] == rows(done) for done in other["passes"])
        gate = Gate(server.service)
        with ThreadPoolExecutor(1) as threads:
            blocked = threads.submit(complete, server, PROMPT, KEYS[0])
            assert gate.reached.wait(60)
            counts = [activity(server, key, idle=False)["other_texts"] for key in KEYS]
            gate.open()
            blocked.result()
    assert counts == [0, 1]
    with serving(demo_path, api_keys=KEYS, share_prefixes=True) as server:
        answer = complete(server, PROMPT, KEYS[0])
        assert activity(server, KEYS[1])["texts"][0]["id"] == answer["id"]


def test_activity_contains_neither_texts_nor_tokens(cpu_model: Model) -> None:
    with running(cpu_model) as server:
        complete(server, "A sentence that nothing else contains. " * 5)
        body = server.get("/activity").text
    assert "sentence" not in body
    assert '"ids"' not in body
    texts = re.findall(r'[:\[,]"([^"]*)"(?!:)', body)
    assert texts
    assert all(text == "ended" or text.startswith("cmpl-") for text in texts)
    assert len(body) < 10_000


def test_the_size_of_activity_is_bounded(cpu_model: Model) -> None:
    with running(cpu_model, max_streams=64) as server:
        streamed = server.post(
            "/v1/completions",
            {"prompt": [[i, *PROMPT[: 3 * i]] for i in range(100)], "max_tokens": 20, "stream": True, "n": 1},
        )
        assert len(events(streamed)) > 100
        found = activity(server)
    body = json.dumps(found)
    assert len(found["passes"]) == PASSES
    assert len(found["texts"]) == MOST_TEXTS
    assert len(found["prefixes"]) < 2 * MOST_TEXTS
    assert len(body) < 64_000
    assert any(done["others"] for done in found["passes"])  # of texts beyond the limit


@pytest.mark.parametrize(
    "query", ["since=-1", "since=1.5", "since=", f"since={'9' * 19}", "since=x", "after=1"]
)
def test_an_invalid_query_is_reported_and_not_logged(
    server: Running, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.get(f"/activity?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert [server.get(path).status_code for path in ("/v1/models/other", "/%00")] == [404, 404]
    assert [record.getMessage() for record in caplog.records] == []


def test_pages_match_the_pool(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", kv_memory=8 << 20) as model, running(model) as server:
        complete(server, PROMPT)
        pages = activity(server)["pages"]
        with model.session() as session:
            session.forward_prompt([1] * 65)
            assert session.native.memory_bytes() == 2 * pages["bytes"]
    assert pages["tokens"] == 64
    assert pages["kept"] == pages["in_use"] == 3  # 150 tokens
    assert pages["limit"] == (8 << 20) // pages["bytes"]


def test_prefixes_describe_the_cache(demo_path: Path) -> None:
    with serving(demo_path) as server:
        complete(server, [*PROMPT, 1, 2, 3])
        complete(server, [*PROMPT, 4, 5])
        root, *leaves = activity(server)["prefixes"]
    assert root == {"parent": None, "start": 0, "tokens": 150, "kept": 150, "texts": []}
    assert sorted((leaf["start"], leaf["tokens"]) for leaf in leaves) == [(150, 2), (150, 3)]
    assert all(leaf["parent"] == 0 and leaf["kept"] == leaf["tokens"] for leaf in leaves)


def test_evicted_prefixes_are_not_listed(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", prefix_memory=0) as model, running(model) as server:
        complete(server, PROMPT)
        (node,) = activity(server)["prefixes"]
    assert (node["tokens"], node["kept"]) == (150, 0)


def test_listing_does_not_count_as_use_of_a_prefix(demo_path: Path) -> None:
    """The least recently used page is evicted first, however often the endpoint is read."""
    with Model(demo_path, device="cpu") as model:
        page = int(model.stats()["kv_page_bytes"])
    with Model(demo_path, device="cpu", prefix_memory=2 * page) as model, running(model) as server:
        for prompt in ([1] * 60, [2] * 60):
            complete(server, prompt, max_tokens=1)
        for _ in range(3):
            activity(server)
        complete(server, [3] * 60, max_tokens=1)
        kept = [node["kept"] for node in activity(server)["prefixes"]]
    assert sorted(kept) == [0, 60, 60]


def test_the_tree_contains_each_random_prompt() -> None:
    """A prompt is the runs of the nodes on its path; siblings differ in their first token."""
    random = np.random.default_rng(3)
    for _ in range(50):
        prompts = [
            random.integers(0, 3, random.integers(1, 9)).astype(np.int32)
            for _ in range(random.integers(1, 20))
        ]
        nodes = prefix_tree(prompts)
        assert len(nodes) < 2 * len(prompts)
        assert sorted(i for node in nodes for i in node.prompts) == list(range(len(prompts)))
        runs: dict[int, tuple[int, ...]] = {}  # tokens of each node
        for last, i in ((n, i) for n, node in enumerate(nodes) for i in node.prompts):
            at: int | None = last
            end = len(prompts[i])
            while at is not None:
                node = nodes[at]
                assert (node.end, node.start < end) == (end, True)
                run = tuple(prompts[i][node.start : end].tolist())
                assert runs.setdefault(at, run) == run
                at, end = node.parent, node.start
            assert end == 0
        assert all(node.parent is None or node.parent < n for n, node in enumerate(nodes))
        firsts = {(node.parent, runs[n][0]) for n, node in enumerate(nodes)}
        assert len(firsts) == len(nodes) == len(runs)


def test_a_pass_is_recorded_with_the_texts_that_ended_in_it(cpu_model: Model) -> None:
    """A client may have read the end of its text before the pass is recorded."""
    record = Activity(cpu_model)
    scheduler = Scheduler(cpu_model)
    streams = make_streams(cpu_model.engine, [1, 2, 3], 1, 1, prefix_namespace="recorded")
    record.enter("cmpl-1", streams)
    scheduler.enter(streams)
    scheduler.step_pieces()
    record.leave(streams)
    record.after_pass(scheduler)
    assert record.described("recorded")["passes"][0]["prompts"] == [(0, 3)]
    record.after_pass(scheduler)  # by then it is forgotten
    assert record.described("recorded")["passes"][1]["others"] == 3


def test_passes_of_the_same_texts_are_merged(cpu_model: Model) -> None:
    """A prompt is not pushed out by the many passes of the text that follows it."""
    with running(cpu_model) as server:
        answer = complete(server, "PROSPERO:\n", max_tokens=PASSES + 20, min_tokens=PASSES + 20)
        found = activity(server)["passes"]
    prompts = [done for done in found if done["prompts"]]
    texts = [done for done in found if done["texts"]]
    assert prompts
    assert len(texts) == 1
    assert texts[0]["texts"][0][1] >= texts[0]["last"] - texts[0]["first"] + 1
    assert texts[0]["seconds"] > prompts[-1]["seconds"]
    assert answer["usage"]["completion_tokens"] == PASSES + 20


WORDS = np.random.default_rng(3).integers(10, 5000, 400).astype(np.int32)
OTHERS = np.random.default_rng(4).integers(10, 5000, 400).astype(np.int32)


def joined(*parts: object) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


DATED = joined(WORDS[:20], [1, 2, 3], WORDS[20:300])


@pytest.mark.parametrize(
    ("prompt", "earlier", "expected"),
    [
        (joined(WORDS[:20], [1, 7, 3], WORDS[20:300]), [DATED], Change(21, 281)),
        (joined(WORDS[:20], [1, 7, 7, 3], WORDS[20:300]), [DATED], Change(21, 281)),  # a token longer
        (joined(WORDS[:20], [1], WORDS[20:300]), [DATED], Change(21, 280)),  # shorter
        (joined(WORDS[:20], [9, 2, 3], WORDS[20:300], OTHERS[:90]), [OTHERS, DATED], Change(20, 282)),
        (DATED, [DATED], None),
        (joined(DATED, OTHERS), [DATED], None),  # the conversation continues
        (DATED[:200], [DATED], None),
        (joined(DATED[:100], OTHERS[:100]), [DATED], None),  # another question
        (joined(WORDS[:20], OTHERS), [DATED], None),
        (joined(WORDS[:20], [7], WORDS[21:80]), [WORDS[:80]], None),  # too few tokens
        (DATED, [], None),
        (joined(WORDS[:20], [7], WORDS[21:]), [WORDS, joined(WORDS[:20], [7], WORDS[21:])], None),
    ],
)
def test_what_follows_a_change_is_found(
    prompt: np.ndarray, earlier: list[np.ndarray], expected: Change | None
) -> None:
    assert change_of(prompt, earlier) == expected


def test_a_changed_prompt_is_reported_to_its_key_and_counted(cpu_model: Model) -> None:
    # Of pairs of prompts, the second ones change a token.
    prompts = {
        "the first key": [WORDS[:200] % 250, joined(WORDS[:9] % 250, [251], WORDS[10:200] % 250)],
        "the second key": [joined([252], WORDS[1:200] % 250)],
    }
    with running(cpu_model, api_keys=list(prompts)) as server:
        for key, sent in prompts.items():
            for prompt in sent:
                complete(server, prompt.tolist(), key, max_tokens=1)
            changes = [text["change"] for text in activity(server, key)["texts"]]
            assert changes == ([{"position": 9, "tokens": 190}, None] if len(sent) == 2 else [None])
        metrics = server.get("/metrics", key).text
    found = dict(re.findall(r"^metal_prefill_(changed\w+|repeated\w+_total) (\S+)$", metrics, re.MULTILINE))
    created = {name for name in found if name.endswith("_created")}
    assert {name: float(value) for name, value in found.items() if name not in created} == {
        "changed_prompts_total": 1,
        "changed_position": 9,
        "repeated_tokens_total": 190,
    }
