"""Counts of multiplications of the CPU engine: no row, layer, token or logit too many.

Expected numbers are computed here, from the hyperparameters alone.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support.small_models import MODELS, SmallModel

from metal_prefill import Model

NAMES = ["gqa 3", "values wider than keys", "gemma3", "separate output", "narrower than its heads"]


def windows(model: SmallModel) -> list[int | None]:
    """Positions that each layer sees; of gemma3 every sixth layer sees all."""
    return [
        None if model.window is None or (layer + 1) % 6 == 0 else model.window
        for layer in range(model.layers)
    ]


def expected(model: SmallModel, positions: Iterable[int], wanted: Iterable[int]) -> int:
    """Products of a pass over rows at `positions`, of which those at `wanted` have an output.

    The last layer stores K and V of every row, and computes the rest only for the wanted rows.
    """
    positions, wanted = list(positions), list(wanted)
    keys_and_values = model.dim * model.kv_heads * (model.head_dim + model.value_width)
    others = model.dim * model.heads * (model.head_dim + model.value_width) + 3 * model.dim * model.ffn
    total = len(wanted) * model.dim * model.vocab
    for layer, window in enumerate(windows(model)):
        rows = positions if layer + 1 < model.layers else wanted
        seen = sum(position + 1 if window is None else min(position + 1, window) for position in rows)
        total += len(positions) * keys_and_values + len(rows) * others
        total += seen * model.heads * (model.head_dim + model.value_width)
    return total


def ids(model: SmallModel, n: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % model.vocab for i in range(n)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_and_the_tokens_after_it(model_path: Callable[[str], Path], name: str, threads: int) -> None:
    shape = MODELS[name]
    with Model(model_path(name), device="cpu", threads=threads) as model, model.session() as session:
        session.forward_prompt(ids(shape, 75))
        assert session.stats()["multiply_adds"] == expected(shape, range(75), [74])
        session.forward_token_greedy(1)
        assert session.stats()["multiply_adds"] == expected(shape, [75], [75])
        session.forward_token(2)
        assert session.stats()["multiply_adds"] == expected(shape, [76], [76])
        session.forward_prompt_logits(ids(shape, 9))
        assert session.stats()["multiply_adds"] == expected(shape, range(77, 86), [85])


@pytest.mark.parametrize("name", NAMES)
def test_only_the_last_chunk_of_a_prompt_has_an_output(model_path: Callable[[str], Path], name: str) -> None:
    shape = MODELS[name]
    with Model(model_path(name), device="cpu", chunk_tokens=32) as model, model.session() as session:
        session.forward_prompt(ids(shape, 75))
        assert session.stats()["chunks"] == 3
        chunks = [expected(shape, range(32), []), expected(shape, range(32, 64), [])]
        assert session.stats()["multiply_adds"] == sum(chunks) + expected(shape, range(64, 75), [74])


@pytest.mark.parametrize("name", NAMES)
def test_scoring_computes_the_logits_of_every_token_but_the_last(
    model_path: Callable[[str], Path], name: str
) -> None:
    shape = MODELS[name]
    with Model(model_path(name), device="cpu") as model:
        session = model.session()
        session.score(ids(shape, 40))
        assert session.stats()["multiply_adds"] == expected(shape, range(39), range(39))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_computes_the_outputs_of_its_sessions(model_path: Callable[[str], Path], name: str) -> None:
    """A pass computes the last rows of two prompts, and only K and V of a third; each reports its count."""
    shape = MODELS[name]
    with Model(model_path(name), device="cpu") as model:
        sessions = [model.session() for _ in range(3)]
        sessions[1].forward_prompt(ids(shape, 20))
        prompts = [ids(shape, 30), ids(shape, 1, 5), ids(shape, 17, 3)]
        model.forward_batch(sessions, prompts, output=["greedy", "logits", "none"])
        total = (
            expected(shape, range(30), [29]) + expected(shape, [20], [20]) + expected(shape, range(17), [])
        )
        assert [session.stats()["multiply_adds"] for session in sessions] == [total] * 3
