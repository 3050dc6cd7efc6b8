"""Tokens that a turn of an agent computes: those after the longest known prefix, and a bounded rest."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.chat_templates import CHATML
from support.running_server import Running, running
from support.small_models import MODELS, write

from metal_prefill import Model, bench
from metal_prefill.bench import _agents
from metal_prefill.bench._agents import SHAPES, Messages, replay

# Positions between the snapshots of states: one page, and the seven that take the memory of a state. With
# attention alone, each position is one.
INTERVALS = {"biases": 1, "gemma3": 1, "lfm2": 64, "granitehybrid": 7 * 64}
END_OF_TURN = 2  # <|im_end|>
LAST_TURNS = 3
# From the end of a turn to the first word in which the next one differs.
MOST_HEADER = 20


def common(one: list[int], other: list[int]) -> int:
    n = min(len(one), len(other))
    different = np.flatnonzero(np.array(one[:n]) != np.array(other[:n]))
    return int(different[0]) if different.size else n


@dataclass
class Asked:
    """A prompt, and how many tokens of it the server computed."""

    prompt: list[int]
    computed: int

    def snapshots(self, interval: int) -> list[int]:
        """Return the positions of states that are kept of it, besides those that were known."""
        turns = [i + 1 for i, token in enumerate(self.prompt) if token == END_OF_TURN]
        new = [*turns[:1], *turns[-LAST_TURNS:], len(self.prompt)]
        known = len(self.prompt) - self.computed
        return [*range(0, len(self.prompt), interval), *(position for position in new if position > known)]


@pytest.mark.parametrize("name", INTERVALS)
def test_a_turn_computes_what_follows_the_nearest_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(_agents, "UNIT", 5)
    path = write(tmp_path / "m.gguf", replace(MODELS[name], context=4096))
    with Model(path, device="cpu", threads=1) as model, running(model) as server:
        monkeypatch.setattr(model.tokenizer._templates, "_source", {"tokenizer.chat_template": CHATML}.get)
        for shape in SHAPES:
            asked = requests_of(server, model, shape)
            for i, request in enumerate(asked):
                new, length = request.computed, len(request.prompt)
                shared = [(min(common(request.prompt, a.prompt), length - 1), a) for a in asked[:i]]
                longest = max((n for n, _ in shared), default=0)
                known = max(
                    (at for n, a in shared for at in a.snapshots(INTERVALS[name]) if at <= n), default=0
                )
                assert length - longest <= new <= length - known, (shape, i)
                if i > 0 and shape not in ("edited header", "edit in the middle"):
                    assert new <= length - longest + MOST_HEADER, (shape, i)


def test_sessions_are_replayed_on_servers(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_agents, "UNIT", 2)
    results = bench.run_agents(demo_path, threads=1)
    assert {turn.shape for turn in results.turns} == set(SHAPES)
    retries = [turn.computed_tokens for turn in results.turns if turn.shape == "retries"]
    assert retries[1:] == [1] * 4
    assert len(json.loads(results.to_json())["turns"]) == len(results.turns)
    assert "three agents in turn" in "".join(str(s.text) for s in Console(width=200).render(results))


def requests_of(server: Running, model: Model, shape: str) -> list[Asked]:
    """Replay a session."""
    prompts: list[list[int]] = []

    def ask(messages: Messages) -> tuple[int, int]:
        prompts.append(model.tokenizer.apply_chat_template(messages))
        body: dict[str, Any] = {"messages": messages, "max_tokens": 2, "temperature": 0}
        usage = server.post("/v1/chat/completions", {**body, "prompt_cache_key": shape}).json()["usage"]
        assert usage["prompt_tokens"] == len(prompts[-1])
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    turns = list(replay("ours", ask, shape))
    return [Asked(prompt, turn.computed_tokens) for prompt, turn in zip(prompts, turns, strict=True)]
