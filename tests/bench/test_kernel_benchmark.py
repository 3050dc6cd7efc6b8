"""The benchmark of the CPU engine's kernels."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import bench_kernels as kernels
import pytest
from support.cpu_testing import cpu_testing

from metal_prefill.bench._summary import Spread


class FakeWorkload:
    """Does a given number of products a second, which the test may change."""

    multiply_adds = 1000.0
    bytes = 50.0

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def run(self, repetitions: int) -> float:
        return repetitions * self.multiply_adds / self.rate


def test_kernels_are_compared_with_limits_measured_at_the_same_time() -> None:
    limits = {
        name: kernels.Limit(partial(FakeWorkload, rate)) for name, rate in (("int8", 8e9), ("memory", 4e9))
    }
    row = kernels.measure("matrix", FakeWorkload(2e9), 8, 1, "isa", "int8", limits, repetitions=3)
    assert row.of_products == Spread(0.25, 0.25, 0.25)
    assert row.gmacs == Spread(2.0, 2.0, 2.0)
    # 50 bytes for each 1000 products; a limit without products would count its bytes.
    assert row.of_memory is not None
    assert row.of_memory.median == pytest.approx(2e9 * 50 / 1000 / 4e9)


def test_kernel_benchmark_measures_all_cases_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_testing()
    monkeypatch.setattr(kernels, "SAMPLE_S", 1e-5)
    monkeypatch.setattr(kernels, "LIMIT_S", 1e-5)
    small = partial(kernels.run, shapes=((33, 64), (576, 1536)), attention_tokens=(20,))
    monkeypatch.setattr(kernels, "run", small)
    out = tmp_path / "rows.json"
    options = ["--types", "Q4_0,Q4_K,F16", "--tokens", "1,17", "-t", "1,2", "-r", "1", "--json"]
    assert kernels.main([*options, str(out)]) == 0
    rows = json.loads(out.read_text())
    names = {(row["kernel"], row["tokens"], row["threads"]) for row in rows}
    products = {
        (f"{kind} {shape}", n, threads)
        for kind in ("Q4_0", "Q4_K", "F16")
        for shape in ("33x64", "576x1536")
        for n in (1, 17)
        for threads in (1, 2)
        if (kind, shape) != ("Q4_K", "33x64")
    }
    assert names == products | {("attention 9/3 heads of 64", 20, threads) for threads in (1, 2)}
    for row in rows:
        assert row["gmacs"]["median"] > 0
        assert 0 < row["of_products"]["low"] <= row["of_products"]["median"]
        assert (row["of_memory"]["median"] > 0) == ("attention" not in row["kernel"])
        expected = {"Q": ["int8"], "F": ["float32"], "a": ["float32", "bfloat16"]}[row["kernel"][0]]
        assert row["limit"] in expected
    assert "Q4_K 576x1536" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense", 2, 32, 32, 1, 1), "no kernel set 'nonsense'"),
        (("scalar", 2, 32, 33, 1, 1), "multiple of 32"),
        (("scalar", 2, 0, 32, 1, 1), "must be positive"),
        (("scalar", 2, 49152, 576, 1 << 20, 1), "more than 1 GiB"),
    ],
)
def test_invalid_workloads_are_rejected(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpu_testing().product_workload(*arguments)
