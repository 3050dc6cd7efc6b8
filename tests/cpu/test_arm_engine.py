"""The CPU engine on emulated Arm processors: the selected kernels and their results."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import assert_close, correlation
from support.kernels.arm_machine import PROCESSORS, SETS, ArmMachine, machine_of
from support.reference import ReferenceModel
from support.small_models import MODELS, write

from metal_prefill import Model
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import collect_tensors

pytestmark = pytest.mark.skipif(not SETS, reason="this is an Arm machine: the other tests run the kernels")

Logits = Callable[[str, str], npt.NDArray[np.float32]]

FIELDS = [
    "n_layers", "dim", "n_heads", "n_kv_heads", "key_dim", "value_dim", "ffn_dim", "vocab_size", "rope_dim",
    "context_length", "norm_eps", "rope_base",
]  # fmt: skip
TEXT = "ROMEO:\nBut, soft! what light"
SHAPE = replace(MODELS["smollm shape"], layers=1, ffn=608)
IDS = np.random.default_rng(0).integers(0, SHAPE.vocab, 21)


def open_model(
    machine: ArmMachine, path: Path, threads: int = 2, chunk_tokens: int = 512, compute: str = "int8"
) -> None:
    """Open a model of the architecture llama without any scaling."""
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        lines = [
            f"{role} {layer} {info.name} {info.type} {' '.join(map(str, (1, *info.shape)[-2:]))} "
            f"{info.offset} {info.nbytes}"
            for role, layer, info in collect_tensors(gguf, config)
        ]
    fields = "\n".join(f"{name} {getattr(config, name)}" for name in FIELDS)
    machine.call("open_model", str(path), fields, "\n".join(lines), threads, chunk_tokens, compute)


def forward_prompt(
    machine: ArmMachine, path: Path, ids: npt.ArrayLike, **options: Any
) -> npt.NDArray[np.float32]:
    """Logits of the last token of a prompt, of a fresh session."""
    open_model(machine, path, **options)
    logits = np.full(read_config(GGUFFile(path)).vocab_size, np.nan, np.float32)
    machine.call("forward_prompt", np.asarray(ids, np.int32), logits)
    return logits


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a layer of the shape of SmolLM: an emulated processor is slow."""
    return write(tmp_path_factory.mktemp("arm") / "m.gguf", SHAPE)


@pytest.fixture(scope="module")
def logits_of(path: Path) -> Logits:
    """Return the logits of the prompt in one chunk on two threads, by set and type of compute."""

    @cache
    def logits(isa: str, compute: str) -> npt.NDArray[np.float32]:
        return forward_prompt(machine_of(isa), path, IDS, compute=compute)

    return logits


@pytest.fixture(scope="module")
def expected(path: Path) -> npt.NDArray[np.float64]:
    """Logits of the prompt in float64."""
    return ReferenceModel(path).forward(IDS).logits[-1]


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("max", ["neon_i8mm", "neon_dotprod", "neon", "scalar"]),
        ("neoverse-n1", ["neon_dotprod", "neon", "scalar"]),
        ("cortex-a72", ["neon", "scalar"]),
    ],
)
def test_each_processor_runs_its_instruction_sets(name: str, sets: list[str]) -> None:
    with closing(ArmMachine(name)) as machine:
        assert machine.call("kernel_sets") == sets


@pytest.mark.parametrize("isa", PROCESSORS)
def test_the_engine_selects_the_fastest_set_of_the_processor(isa: str, path: Path) -> None:
    open_model(machine_of(isa), path)
    assert machine_of(isa).call("device_name") == f"CPU ({isa}, 2 threads)"


def test_a_set_can_be_selected_and_a_missing_set_is_an_error(path: Path) -> None:
    with closing(ArmMachine("max", {"METAL_PREFILL_CPU_ISA": "neon"})) as machine:
        open_model(machine, path, threads=1)
        assert machine.call("device_name") == "CPU (neon, 1 thread)"
    with (
        closing(ArmMachine("cortex-a76", {"METAL_PREFILL_CPU_ISA": "neon_i8mm"})) as machine,
        pytest.raises(ValueError, match="'neon_i8mm', but this machine runs: neon_dotprod, neon, scalar"),
    ):
        open_model(machine, path)


def test_the_bundled_model_agrees_with_the_reference(demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model:
        ids = model.tokenizer.encode(TEXT)
    expected = ReferenceModel(demo_path).forward(ids).logits[-1]
    logits = forward_prompt(machine_of(next(iter(PROCESSORS))), demo_path, ids)
    assert np.argmax(logits) == np.argmax(expected)
    assert correlation(logits, expected) > 0.9999


# Lowest correlations of logits; those of random weights are sensitive to activations in 8 bits.
@pytest.mark.parametrize(("compute", "lowest"), [("int8", 0.998), ("w8a8", 0.998), ("f32", 1 - 1e-9)])
@pytest.mark.parametrize("isa", PROCESSORS)
def test_logits_agree_with_the_reference(
    isa: str, compute: str, lowest: float, logits_of: Logits, expected: npt.NDArray[np.float64]
) -> None:
    logits = logits_of(isa, compute)
    assert correlation(logits, expected) > lowest
    if compute == "f32":
        assert_close("cpu", logits, expected)


@pytest.mark.parametrize(("isa", "compute"), [*product(PROCESSORS, ["int8"]), ("neon_i8mm", "w8a8")])
def test_results_are_bit_identical_for_any_split_and_number_of_threads(
    isa: str, compute: str, logits_of: Logits, path: Path
) -> None:
    for chunk_tokens, threads in ((1, 1), (5, 3)):
        options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "threads": threads, "compute": compute}
        split = forward_prompt(machine_of(isa), path, IDS, **options)
        np.testing.assert_array_equal(split, logits_of(isa, compute), err_msg=f"chunks of {chunk_tokens}")


def test_sets_with_equal_vectors_are_bit_identical(logits_of: Logits) -> None:
    results = [logits_of(isa, "int8") for isa in PROCESSORS]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_arm_and_the_scalar_kernels_of_this_machine_agree(
    logits_of: Logits, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", "scalar")
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
        expected = model.session().forward_prompt_logits(IDS)
    for isa in PROCESSORS:
        logits = logits_of(isa, "f32")
        # float32 sums in another order
        assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
