"""Tokens that a turn of an agent computes: those after the longest known prefix, and a bounded rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.running_server import Running, running
from support.small_models import MODELS, write

from metal_prefill import Model, bench
from metal_prefill.bench import _agents
from metal_prefill.bench._agents import SHAPES, Messages, replay

PAGE = 64  # tokens
# The tokens before the first new one that are computed again, at most. With attention alone, it is the last
# token of a prompt that was sent before. Otherwise it is the distance to a snapshot of the states: those of
# these models take the memory of one page and of seven.
AGAIN = {"biases": 1, "gemma3": 1, "lfm2": PAGE, "granitehybrid": 7 * PAGE}


def common(one: list[int], other: list[int]) -> int:
    n = min(len(one), len(other))
    different = np.flatnonzero(np.array(one[:n]) != np.array(other[:n]))
    return int(different[0]) if different.size else n


@pytest.mark.parametrize("name", AGAIN)
def test_a_turn_computes_what_is_new_and_a_bounded_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(_agents, "UNIT", 5)
    path = write(tmp_path / "m.gguf", replace(MODELS[name], context=4096))
    with Model(path, device="cpu", threads=1) as model, running(model) as server:
        again = {shape: recomputed(server, model, shape) for shape in SHAPES}
    assert max(map(max, again.values())) <= AGAIN[name], again


def test_sessions_are_replayed_on_servers(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_agents, "UNIT", 2)
    results = bench.run_agents(demo_path, threads=1)
    assert {turn.shape for turn in results.turns} == set(SHAPES)
    retries = [turn.computed_tokens for turn in results.turns if turn.shape == "retries"]
    assert retries[1:] == [1] * 4
    assert len(json.loads(results.to_json())["turns"]) == len(results.turns)
    assert "three agents in turn" in "".join(str(s.text) for s in Console(width=200).render(results))


def recomputed(server: Running, model: Model, shape: str) -> list[int]:
    """Return for each request the computed tokens besides those after the longest common prefix."""
    prompts: list[list[int]] = []

    def ask(messages: Messages) -> tuple[int, int]:
        prompts.append(model.tokenizer.apply_chat_template(messages))
        body: dict[str, Any] = {"messages": messages, "max_tokens": 2, "temperature": 0}
        usage = server.post("/v1/chat/completions", {**body, "prompt_cache_key": shape}).json()["usage"]
        assert usage["prompt_tokens"] == len(prompts[-1])
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    turns = list(replay("ours", ask, shape))
    longest = [
        max((common(prompts[i], earlier) for earlier in prompts[:i]), default=0) for i in range(len(prompts))
    ]
    return [turn.computed_tokens - (turn.prompt_tokens - n) for turn, n in zip(turns, longest, strict=True)]
