"""Passes with a few tokens for each of many sequences, which are divided into tiles of tokens."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from support import small_models
from support.emulated_gpu import require_emulator

from metal_prefill import Model, _core

pytestmark = pytest.mark.emulator

gpu = require_emulator()
TILE = _core.shader_constants["MANY_TOKEN_TILE"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("many") / "model.gguf"
    shape = replace(small_models.MODELS["gqa 3"], dim=96)
    with Model(small_models.write(path, shape), device="metal") as opened:
        yield opened


@pytest.mark.parametrize(("sequences", "each"), [(8, 1), (9, 1), (33, 1), (5, 3), (7, 8)])
def test_sequences_have_the_bits_that_they_have_alone(model: Model, sequences: int, each: int) -> None:
    rng = np.random.default_rng(sequences)
    sessions = [model.session() for _ in range(sequences)]
    tokens = [rng.integers(1, 300, each) for _ in sessions]
    for i, session in enumerate(sessions):
        session.forward_prompt(rng.integers(1, 300, 1 + i % 5))
    forks = [session.fork() for session in sessions]
    alone = [fork.forward_prompt_logits(ids) for fork, ids in zip(forks, tokens, strict=True)]
    gpu.set_history_depth(8)
    together = model.forward_batch(sessions, tokens, output="logits")
    products = [
        d
        for buffer in gpu.history()
        for d in buffer.dispatches
        if buffer.label == gpu.history()[-1].label and d.kernel.startswith("multi_token_matvec_swiglu")
    ]
    gpu.set_history_depth(0)
    for logits, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(logits, expected)
    rows = sequences * each
    assert products[0].grid[0] == (1 if rows <= 8 else ceil(rows / TILE))
