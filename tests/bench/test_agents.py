"""Tokens that a turn of an agent computes: those after the longest known prefix, and a bounded rest."""

import itertools
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from support.servers.running_server import running
from support.servers.stand_in_server import PROGRAM, stand_in
from support.small_models import MODELS, write
from support.tools import CHATML

from metal_prefill import MissingExtraError, Model, bench
from metal_prefill.bench import _agents
from metal_prefill.bench._agents import SHAPES, Ask, Messages, replay
from metal_prefill.bench._peers.servers import ServerOptions, server_of

# Positions between the snapshots of states: one page, and the seven that take the memory of a state. With
# attention alone, each position is one.
INTERVALS = {"biases": 1, "gemma3": 1, "lfm2": 64, "granitehybrid": 7 * 64}
PAGE = 64
END_OF_TURN = 2  # <|im_end|>
LAST_TURNS = 3
# From the end of a turn to the first word in which the next one differs.
MOST_HEADER = 20


@dataclass
class Asked:
    """A prompt, and how many tokens of it the server computed."""

    prompt: list[int]
    computed: int

    @property
    def last_turn(self) -> int:
        """Position of the end of the last turn, up to which a prompt is stored."""
        return len(self.prompt) - self.prompt[::-1].index(END_OF_TURN)

    def snapshots(self, interval: int) -> list[int]:
        """Return the positions of states that are kept of it, besides those that were known."""
        turns = [i + 1 for i, token in enumerate(self.prompt) if token == END_OF_TURN]
        new = [*turns[:1], *turns[-LAST_TURNS:], len(self.prompt)]
        known = len(self.prompt) - self.computed
        return [*range(0, len(self.prompt), interval), *(position for position in new if position > known)]


ANY_MEMORY = [name for name, shape in SHAPES.items() if shape.memory_of is None]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *itertools.product(("biases", "lfm2", "granitehybrid"), ANY_MEMORY),
        ("gemma3", "growing history"),  # as all attention, it continues from any position
    ],
)
def test_a_turn_computes_what_follows_the_nearest_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: str
) -> None:
    monkeypatch.setattr(_agents, "UNIT", 5)
    path = write(tmp_path / "m.gguf", replace(MODELS[name], context=4096))
    asked = requests_of(path, shape, tmp_path / "store")
    assert len(asked) > 3
    for i, request in enumerate(asked):
        new, length = request.computed, len(request.prompt)
        at_most = [a.last_turn if i == SHAPES[shape].restart else length - 1 for a in asked[:i]]
        shared = [
            (min(len(commonprefix([request.prompt, a.prompt])), n), a)
            for n, a in zip(at_most, asked, strict=False)
        ]
        longest = max((n for n, _ in shared), default=0)
        known = max((at for n, a in shared for at in a.snapshots(INTERVALS[name]) if at <= n), default=0)
        assert length - longest <= new <= length - known, i
        if i > 0 and shape not in ("edited header", "edit in the middle"):
            assert new <= length - longest + MOST_HEADER, i


def most_found(prompts: list[list[int]], memory: int) -> int:
    """Return how many tokens of prompts any policy can find in a cache of so many pages, in whole pages.

    Belady's rule: the pages that are evicted, or not kept, are those that are used again last.
    """
    requests = [{tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)} for prompt in prompts]
    kept: set[tuple[int, ...]] = set()
    found = 0
    for i, pages in enumerate(requests):
        found += len(pages & kept)

        def next_use(page: tuple[int, ...], after: int = i + 1) -> int:
            return next((j for j in range(after, len(requests)) if page in requests[j]), len(requests))

        kept = set(sorted(kept | pages, key=lambda page: (next_use(page), len(page)))[:memory])
    return PAGE * found


@pytest.mark.parametrize("name", INTERVALS)
def test_agents_in_turn_find_what_a_small_memory_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(_agents, "UNIT", 5)
    path = write(tmp_path / "m.gguf", replace(MODELS[name], context=4096))
    asked = requests_of(path, "memory too small", tmp_path)
    prompts = [request.prompt for request in asked]
    memory = -(-len(prompts[-(SHAPES["memory too small"].memory_of or 0)]) // PAGE)  # of the first agent
    found = sum(len(request.prompt) - request.computed for request in asked)
    assert found >= most_found(prompts, memory)


def test_sessions_are_replayed_on_servers_and_peers(
    tmp_path: Path, demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_agents, "UNIT", 2)
    replayed = ("retries", "memory too small")  # a process for each server
    monkeypatch.setattr(_agents, "SHAPES", {shape: SHAPES[shape] for shape in replayed})
    program = tmp_path / "llama-server"  # a peer may be the path of its program
    program.write_text(f"#!{sys.executable}\n{PROGRAM}", encoding="utf-8")
    with pytest.raises(MissingExtraError, match=r"llama-server of llama\.cpp is not a program"):
        server_of(str(program))
    program.chmod(0o755)
    results = bench.run_agents(demo_path, compare=[str(program)], threads=1)
    assert {turn.shape for turn in results.turns} == set(replayed)
    for server in ("metal_prefill", "llama-server"):
        retries = [t.computed_tokens for t in results.turns if (t.server, t.shape) == (server, "retries")]
        assert retries[1:] == [1] * 4
    assert len(json.loads(results.to_json())["turns"]) == len(results.turns)
    assert "memory too small" in "".join(str(s.text) for s in Console(width=200).render(results))


@pytest.mark.parametrize("shape", ["growing history", "three agents in turn", "restart"])
def test_tokens_that_a_peer_computes_are_those_that_it_reports(
    monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr(_agents, "UNIT", 3)
    options = ServerOptions("m.gguf", threads=1, clients=1, context=4096)
    turns = list(_agents.measured("llama-server", options, stand_in(), shape))
    last: list[str] = []
    for i, (turn, messages) in enumerate(zip(turns, SHAPES[shape].requests(3), strict=True)):
        words = " ".join(f"{message['role']} {message['content']}" for message in messages).split()
        same = [a == b for a, b in zip(words, last, strict=False)]
        kept = 0 if i == SHAPES[shape].restart else [*same, False].index(False)
        assert (turn.prompt_tokens, turn.computed_tokens) == (len(words), max(len(words) - kept, 1))
        last = words


def test_a_peer_that_does_not_report_tokens_is_named() -> None:
    options = ServerOptions("m.gguf", threads=1, clients=1, context=4096)
    with pytest.raises(bench.BenchError, match="llama-server does not report cached tokens"):
        list(_agents.measured("llama-server", options, stand_in("silent"), "retries"))


def requests_of(path: Path, shape: str, store: Path) -> list[Asked]:
    """Replay a session on a server with a model."""
    prompts: list[list[int]] = []
    options: dict[str, Any] = {}
    used: dict[str, int] = {}
    stored: dict[str, Any] = {} if SHAPES[shape].restart is None else {"prefix_store": store}
    with ExitStack() as opened:

        def start() -> Ask:
            opened.close()
            model = opened.enter_context(Model(path, device="cpu", threads=1, **options))
            source = {"tokenizer.chat_template": CHATML}.get
            opened.enter_context(patch.object(model.tokenizer, "_template_source", source))
            server = opened.enter_context(running(model, **stored))

            def ask(messages: Messages) -> tuple[int, int]:
                prompts.append(model.tokenizer.apply_chat_template(messages))
                body = {"messages": messages, "max_tokens": 2, "temperature": 0}
                usage = server.answer("/v1/chat/completions", body)["usage"]
                assert usage["prompt_tokens"] == len(prompts[-1])
                used["prefix_memory"] = int(model.stats()["prefix_bytes"])
                return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

            return ask

        if SHAPES[shape].memory_of is not None:
            list(map(start(), SHAPES[shape].of_one_agent()))
            options.update(used)
            prompts.clear()
        turns = list(replay("ours", start, shape))
    return [Asked(prompt, turn.computed_tokens) for prompt, turn in zip(prompts, turns, strict=True)]
