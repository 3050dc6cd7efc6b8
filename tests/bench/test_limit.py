"""The speed that the machine's 8-bit products allow."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import small_models

from metal_prefill._bench import limit


@pytest.mark.parametrize("name", ["gqa 3", "values wider than keys", "separate output", "gemma3"])
@pytest.mark.parametrize("n", [1, 15, 40])
def test_the_work_of_a_prompt_is_that_of_its_parts(name: str, n: int, tmp_path: Path) -> None:
    model = small_models.MODELS[name]
    q, kv = model.heads * model.key_dim, model.kv_heads * (model.key_dim + model.v_dim)
    expected = model.vocab * model.dim
    for layer in range(model.layers):
        window = model.window if model.window and (layer + 1) % 6 else n
        for token in range(n):
            expected += kv * model.dim
            if layer < model.layers - 1 or token == n - 1:
                expected += q * model.dim + model.heads * model.v_dim * model.dim + 3 * model.ffn * model.dim
                expected += min(token + 1, window) * model.heads * (model.key_dim + model.v_dim)
    work = limit.read_work(small_models.write(tmp_path / "model.gguf", model))
    assert work is not None
    assert work.products(n) == expected


def test_products_of_floats_have_no_limit_of_8_bit_products(tmp_path: Path) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.SmallModel(types={"*": "F16"}))
    assert limit.prompt_limits(path, [32], 1) == {}


def test_longer_prompts_have_a_lower_limit(demo_path: Path) -> None:
    limits = limit.prompt_limits(demo_path, [128, 512, 1024], 1)
    assert limits[128] > limits[512] > limits[1024] > 0
