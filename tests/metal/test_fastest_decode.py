"""Ways to decode that give the same bits: measured once for a GPU and a shape; the fastest is used."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_options import set_engine_options
from support.kernels.emulated_gpu import open_metal, require_emulator

from metal_prefill import _core, synth
from metal_prefill.gpu import _fastest_decode, _self_test

pytestmark = pytest.mark.emulator

gpu = require_emulator()
decode_seconds = _fastest_decode.decode_seconds


@pytest.fixture(autouse=True)
def unknown_gpu(checking: None, own_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAL_PREFILL_TUNE", "1")
    monkeypatch.setattr(_fastest_decode, "_TOKENS", 1)  # times on an emulated GPU show nothing


@pytest.fixture
def trusted_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the comparison of kernels with float64, which takes most of the time."""
    monkeypatch.setattr(_self_test, "_findings", lambda *arguments: [])


class Clock:
    """Times of the choices, in their order; counts how many were measured."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.measured = 0

    def __call__(self, engine: _core.Engine, vocab_size: int) -> float:
        self.measured += 1
        return self.seconds[(self.measured - 1) % len(self.seconds)]


def used(path: Path, **options: Any) -> tuple[float, float]:
    with open_metal(path, **options) as model:
        return model.stats()["fused_norm"], model.stats()["matvec_rows"]


@pytest.mark.usefixtures("trusted_gpu")
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 2.0, 2.0, 2.0), (0, 1)),
        ((1.0, 0.5, 0.6, 0.7), (1, 1)),
        ((1.0, 2.0, 0.9, 0.95), (0, 2)),
        ((1.0, 2.0, 0.9, 0.8), (0, 4)),
        ((1.0, 0.9, 0.8, 0.85), (1, 2)),
        ((1.0, 0.99, 0.985, 0.99), (0, 1)),
        ((1.0, 0.9, 0.89, 0.95), (1, 1)),
    ],
    ids=[
        *("the first", "fused norm", "two rows", "four rows", "both", "too small gains"),
        "a small gain of rows",
    ],
)
def test_the_fastest_is_used_and_kept(
    path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, ...],
    expected: tuple[int, int],
) -> None:
    """Separate norms, fused ones, and two and four rows with the faster of them are timed."""
    clock = Clock(*seconds)
    monkeypatch.setattr(_fastest_decode, "decode_seconds", clock)
    assert used(path) == expected
    assert used(path) == expected
    assert clock.measured == 4
    (stored,) = json.loads((own_cache / "decode.json").read_text()).values()
    assert stored == [str(n) for n in expected]


def test_a_first_open_compiles_and_stores_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six engines are built; two of them, with the kernels of each choice, are used."""
    before, sources = gpu.counters(), set()
    gpu.forget_compiled_libraries()
    monkeypatch.setattr(_fastest_decode, "decode_seconds", Clock(1.0, 2.0, 2.0, 0.5))
    with caplog.at_level(logging.WARNING, "metal_prefill"), open_metal(path) as model:
        compiled = [library.name for library in gpu.compiled_libraries()]
        sources = set(compiled)
        kernels = model.stats()["pipelines"]
    after = gpu.counters()
    assert len(compiled) == len(sources)
    assert after.archived_pipelines - before.archived_pipelines <= 2 * kernels
    assert after.pipelines - before.pipelines <= 1.5 * kernels + 2 * kernels  # and those for the archives
    assert [record.message.split(",")[0] for record in caplog.records] == ["measuring ways to decode"]


@pytest.mark.usefixtures("trusted_gpu")
def test_all_choices_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synth.synthesize(tmp_path / "deep.gguf", preset="tiny", layers=30, vocab=320)
    logits, kernels = [], set()
    for choice in _fastest_decode._CHOICES:
        set_engine_options(monkeypatch, metal_matvec_rows=choice.matvec_rows)
        with open_metal(path, fused_norm=choice.fused_norm) as model:
            gpu.set_history_depth(8)
            logits.append([model.forward_token(token) for token in (5, 9, 2)])
            kernels |= {d.kernel for buffer in gpu.history() for d in buffer.dispatches}
            gpu.set_history_depth(0)
    for other in logits[1:]:
        np.testing.assert_array_equal(logits[0], other)
    assert {"matvec_q4_0", "matvec_q4_0_rows2", "matvec_q4_0_rows4", "rmsnorm_matvec_q4_0"} <= kernels


@pytest.mark.usefixtures("trusted_gpu")
def test_what_the_caller_sets_is_not_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0, 0.5, 0.4)
    monkeypatch.setattr(_fastest_decode, "decode_seconds", clock)
    assert used(path, fused_norm=False) == (0, 4)
    assert used(path, fused_norm=True) == (1, 4)
    assert clock.measured == 6


@pytest.mark.usefixtures("trusted_gpu")
def test_the_emulator_is_not_measured_unasked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METAL_PREFILL_TUNE")
    monkeypatch.setattr(_fastest_decode, "decode_seconds", None)
    assert used(path) == (0, 1)
    monkeypatch.setattr(_core, "has_emulator", False)  # as on a Mac
    monkeypatch.setenv("METAL_PREFILL_TUNE", "0")
    assert used(path) == (0, 1)


def test_a_choice_that_is_wrong_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_fastest_decode, "decode_seconds", Clock(1.0, 2.0, 2.0, 0.5))
    gpu.set_limits(gpu.Limits(wrong_kernels={"matvec_q4_0_rows4"}))
    with caplog.at_level(logging.WARNING, "metal_prefill"):
        assert used(path) == (0, 1)
    assert "a faster way to decode is not used" in caplog.text
    assert "matvec_q4_0_rows4: value 0 is 195" in caplog.text


def test_a_kernel_that_cannot_be_built_leaves_the_others(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fastest_decode, "decode_seconds", Clock(2.0, 1.0, 0.5))
    gpu.set_limits(gpu.Limits(broken_kernels={"rmsnorm_matvec_q4_0", "matvec_q4_0_rows2"}))
    with caplog.at_level(logging.WARNING, "metal_prefill"):
        assert used(path) == (0, 4)
    assert "Choice(fused_norm=True, matvec_rows=1) is not used: " in caplog.text


@pytest.mark.usefixtures("trusted_gpu")
def test_times_are_those_of_the_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(engine: _core.Engine, vocab_size: int) -> float:
        measured.append(decode_seconds(engine, vocab_size))
        return measured[-1]

    monkeypatch.setattr(_fastest_decode, "decode_seconds", measure)
    used(path)
    assert len(measured) == 4
    assert all(0 < seconds < 5 for seconds in measured)
