"""The numbers that products multiply where the caller does not choose them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.closeness import hidden_states
from support.reference import ReferenceModel
from support.small_models import EMBEDDERS, ENCODERS, MODELS, write

from metal_prefill import Model, _core, cli
from metal_prefill._support.choices import COMPUTE
from metal_prefill.engine import chosen_mode
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config

IDS = np.random.default_rng(0).integers(5, 300, 90)
SETS = _core.kernel_sets()
QUANTIZED = ("bert", "modern-bert", "eurobert")


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_encoders_use_pairs_on_amx_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, name: str
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
    path = write(tmp_path / "model.gguf", ENCODERS[name])
    expected = "bf16" if isa == "amx" else "int8"
    with Model(path, device="cpu") as model, Model(path, device="cpu", compute=expected) as stated:
        assert model.compute == expected
        np.testing.assert_array_equal(hidden_states(model, IDS), hidden_states(stated, IDS))


PAIRS_OR_16_BITS = {
    **dict.fromkeys(("amx", "avx512bf16"), "bf16"),
    **dict.fromkeys(("avx512vnni", "avxvnni", "avx2"), "int16"),
    **dict.fromkeys(("neon_i8mm", "scalar"), "int8"),
}
CHOSEN = {
    "a quantized encoder": (
        ENCODERS["bert"],
        {"amx": "bf16", "avx512bf16": "int8", "avx2": "int8", "neon_i8mm": "int8"},
    ),
    # The fastest products near float32.
    "an encoder in float32": (ENCODERS["bert, float32"], PAIRS_OR_16_BITS),
    "an encoder in 16-bit floats": (ENCODERS["bert, 16-bit floats"], PAIRS_OR_16_BITS),
    "an embedding model in float32": (EMBEDDERS["gemma-embedding"], PAIRS_OR_16_BITS),
    "a quantized model that generates": (MODELS["type Q8_0"], {"amx": "int8"}),
    "a model in float32 that generates": (MODELS["type F32"], {"amx": "int8"}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_model_and_the_kernel_set_decide_even_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shape, expected = CHOSEN[name]
    with GGUFFile(write(tmp_path / "model.gguf", shape)) as gguf:
        for isa, mode in expected.items():
            monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
            assert chosen_mode(gguf, read_config(gguf)) == mode, isa


@pytest.mark.parametrize("compute", COMPUTE[1:])
def test_a_stated_mode_wins(tmp_path: Path, compute: Any) -> None:
    with Model(write(tmp_path / "model.gguf", ENCODERS["bert"]), device="cpu", compute=compute) as model:
        assert model.compute == compute


@pytest.mark.skipif("amx" not in SETS, reason="the processor has no AMX")
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_choice_on_amx_is_closer_to_float32(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name])
    expected = ReferenceModel(path).forward(IDS).hidden
    errors = {}
    for compute in ("auto", "int8"):
        with Model(path, device="cpu", compute=compute) as model:
            errors[compute] = float(np.square(hidden_states(model, IDS) - expected).sum())
    assert errors["auto"] < errors["int8"]


def test_a_gpu_has_no_mode(tmp_path: Path, device: str) -> None:
    with Model(write(tmp_path / "model.gguf", ENCODERS["bert"]), device=device) as model:
        assert (model.compute is None) == (device == "metal")


def test_the_command_info_prints_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS["bert"])
    for isa, expected in (("amx", "bf16"), ("avx2", "int8")):
        monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
        assert cli.main(["info", "-m", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if "compute on the CPU" in line]
        assert expected in line
        assert any(f"available, with {isa}" in line for line in lines)
