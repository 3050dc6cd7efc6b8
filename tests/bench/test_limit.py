"""The speed that the machine's 8-bit products allow."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import small_models
from support.bench_fakes import ILLEGAL_INSTRUCTION

from metal_prefill import bench
from metal_prefill.bench import BenchResults, _limit, _peak


@pytest.mark.parametrize("name", ["gqa 3", "values wider than keys", "separate output", "gemma3"])
@pytest.mark.parametrize("n", [1, 15, 40])
def test_the_work_of_a_prompt_is_the_sum_of_its_parts(name: str, n: int, tmp_path: Path) -> None:
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
    work = _limit.read_work(small_models.write(tmp_path / "model.gguf", model))
    assert work is not None
    assert work.products(n) == expected


def test_float_products_have_no_8_bit_limit(tmp_path: Path) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.SmallModel(types={"*": "F16"}))
    assert _limit.prompt_limits(path, [32], 1) == {}


def test_longer_prompts_have_a_lower_limit(demo_path: Path) -> None:
    limits = _limit.prompt_limits(demo_path, [128, 512, 1024], 1)
    assert limits[128] > limits[512] > limits[1024] > 0


def test_a_crashed_measurement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_peak, "COMMAND", ILLEGAL_INSTRUCTION)
    with pytest.raises(bench.BenchError, match=r"the limit int8 by \w+: its process died \(SIGILL\)"):
        _peak.int8_peak(1)


@pytest.mark.usefixtures("_quiet_machine")
def test_a_benchmark_omits_a_limit_whose_measurement_crashes(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_peak, "COMMAND", ILLEGAL_INSTRUCTION)
    results = bench.run(demo_path, prompts=[4, 16], n_gen=3, repetitions=1, threads=1, device="cpu")
    assert [row.limit_ts for row in results.rows] == [None] * 3
    assert all(row.median_ts > 0 for row in results.rows)
    (note,) = (note for note in results.notes() if "limit" in note)
    assert note.startswith("metal_prefill pp4, pp16: no limit: ")
    assert "its process died (SIGILL)" in note
    assert note in BenchResults(results.rows)._repr_html_()
