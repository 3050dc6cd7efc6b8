"""The benchmark of the CPU engine's kernels."""

import bench_kernels as kernels
import pytest
from support.kernels.cpu_testing import cpu_testing

from metal_prefill.bench._runner import Spread


class FakeWorkload:
    """Does a given number of products a second."""

    multiply_adds = 1000.0
    bytes = 50.0

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def run(self, repetitions: int) -> float:
        return repetitions * self.multiply_adds / self.rate


def test_kernels_are_compared_with_limits_measured_at_the_same_time() -> None:
    products, memory = kernels.limit_of(FakeWorkload(8e9)), iter([1e9, 3e9, 1e9, 3e9])
    rate, of_products, of_memory = kernels.measure(FakeWorkload(2e9), products, lambda: next(memory), 3)
    assert rate == Spread(2e9, 2e9, 2e9)
    assert of_products == Spread(0.25, 0.25, 0.25)
    assert of_memory.median == pytest.approx(2e9 * 50 / 1000 / 2e9)  # between two measurements


def test_kernel_benchmark_measures_all_cases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_testing()
    for name in ("SAMPLE_S", "LIMIT_S"):
        monkeypatch.setattr(kernels, name, 1e-5)
    monkeypatch.setattr(kernels, "SHAPES", ((33, 64), (64, 512)))
    monkeypatch.setattr(kernels, "ATTENTION_TOKENS", (20,))
    monkeypatch.setenv("COLUMNS", "200")
    assert kernels.main(["--types", "Q4_0,Q4_K,F16", "--tokens", "1,17", "-t", "2", "-r", "1"]) == 0
    cells = [[c.strip() for c in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    rows = {tuple(row[1:4]): row[4:8] for row in cells if len(row) > 5}
    shapes = {"Q4_0": ("33x64", "64x512"), "Q4_K": ("64x512",), "F16": ("33x64", "64x512")}
    expected = {(f"{kind} {shape}", n, "2") for kind in shapes for shape in shapes[kind] for n in ("1", "17")}
    assert rows.keys() == expected | {("attention 9/3 x 64", "20", "2")}
    for (kernel, *_), (rate, limit, of_products, of_memory) in rows.items():
        assert float(rate.replace(",", "")) >= 0
        assert limit in {"Q": ["int8"], "F": ["float32"], "a": ["float32", "bfloat16"]}[kernel[0]]
        assert of_products.endswith("%)")
        assert (of_memory == "") == ("attention" in kernel)


def test_unknown_types_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--types", "Q4_0,Q9"])
    assert "no tensor types: Q9" in capsys.readouterr().err
