"""Feed-forwards with experts: routing, sums over experts, and their independence of other rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import hidden_states, lowest_cosine, nmse, random_ids, states_of_texts
from support.files.gguf_bytes import FALSE, integer, number
from support.files.gguf_mutator import with_entries
from support.reference import ReferenceModel
from support.small_models import ENCODERS, EXPERTS, SmallModel, with_tensor, write

from metal_prefill import Model, UnsupportedModelError, _core
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.synth import ExpertShape

IN_FLOAT32 = SmallModel(architecture="qwen3moe", types={"*": "F32"}, embedding="F32")
LFM2 = replace(EXPERTS["lfm2moe"], types={"*": "F32"}, embedding="F32")
PRIVACY_FILTER = replace(  # whose experts have biases, and activations with limits
    ENCODERS["privacy-filter, all experts"], types={"*": "F32"}, embedding="F32", layers=3, context=1024
)


def all_states(
    path: Path, ids: npt.NDArray[np.int64], compute: str = "f32", device: str = "cpu"
) -> npt.NDArray[np.float64]:
    """Compute the hidden states of every token."""
    with Model(path, device=device, compute=compute, kv_dtype="f32") as model:
        return hidden_states(model, ids).astype(np.float64)


def lowest_cosine_of(path: Path, ids: npt.NDArray[np.int64], device: str = "cpu") -> float:
    """Return the smallest cosine of a hidden state with the reference.

    On Metal, tokens of which scores nearly agree may have other experts.
    """
    reference = ReferenceModel(path)
    states, expected = all_states(path, ids, device=device), reference.forward(ids).hidden
    decided = reference.decided(0.02 if device == "metal" else 0)
    assert decided.mean() > 0.5
    return lowest_cosine(states[decided], expected[decided])


# Number of experts, those of a token, their width, the window, and tokens.
CASES = [
    (3, 1, 64, 257, 1),
    (5, 5, 40, 1, 30),
    (8, 4, 72, 129, 300),
    (33, 8, 48, 31, 100),
    (64, 8, 32, 257, 400),
]
WITHOUT_BIASES = [(3, 1, 64, None, 40), (7, 2, 72, None, 100), (16, 5, 32, None, 100), (64, 8, 32, None, 700)]


@pytest.mark.parametrize(
    ("device", "shape", "case"),
    [
        *product(["cpu", "metal"], [PRIVACY_FILTER], CASES),
        *product(["cpu"], [IN_FLOAT32], WITHOUT_BIASES),
    ],
    indirect=["device"],
    ids=lambda value: getattr(value, "architecture", str(value)),
)
def test_any_number_of_experts_matches_the_reference(
    device: str, tmp_path: Path, shape: SmallModel, case: tuple[int, int, int, int | None, int]
) -> None:
    count, used, ffn, window, n = case
    shape = replace(shape, experts=ExpertShape(count, used, ffn), window=window, seed=count)
    assert lowest_cosine_of(write(tmp_path / "m.gguf", shape), random_ids(n, seed=n), device) > 0.99999


def test_all_tokens_may_go_to_the_same_experts(tmp_path: Path) -> None:
    """Others have no rows. The bias decides the choice, but is not part of the factors."""
    path, ids = write(tmp_path / "m.gguf", LFM2), random_ids(100)
    for layer in (2, 3):
        bias = f"blk.{layer}.exp_probs_b.bias"
        with_tensor(path, path, bias, lambda values: np.copyto(values, [0, 9, 0, 0, 8, 0]))
    assert lowest_cosine_of(path, ids) > 0.99999
    before = all_states(path, ids)
    weights = GGUFFile(path).tensors["blk.3.ffn_down_exps.weight"]
    content = bytearray(path.read_bytes())
    unused = weights.nbytes // 6
    content[weights.offset : weights.offset + unused] = b"\xff" * unused  # NaN in an expert without rows
    path.write_bytes(content)
    np.testing.assert_array_equal(all_states(path, ids), before)


def test_ties_go_to_the_first_experts(tmp_path: Path) -> None:
    shape = replace(IN_FLOAT32, layers=1, experts=ExpertShape(5, 2, 64))
    path = write(tmp_path / "m.gguf", shape)
    with_tensor(path, path, "blk.0.ffn_gate_inp.weight", lambda values: values.fill(0))
    assert lowest_cosine_of(path, random_ids(20)) > 0.99999


@pytest.mark.parametrize("extreme", ["a score is NaN", "scores are 0 or 1"])
def test_extreme_scores_leave_states_finite(device: str, tmp_path: Path, extreme: str) -> None:
    """An expert whose score is NaN is not chosen; the scores of those that are chosen may all be 0."""
    plain = write(tmp_path / "plain.gguf", LFM2)
    router = [name for name in GGUFFile(plain).tensors if name.endswith("ffn_gate_inp.weight")][-1]

    def change(values: npt.NDArray[np.float32]) -> None:
        if extreme == "a score is NaN":
            values[: LFM2.dim] = np.nan
        else:
            values *= 1e6

    path = with_tensor(tmp_path / "m.gguf", plain, router, change)
    assert np.all(np.isfinite(all_states(path, random_ids(200), device=device)))


@pytest.mark.parametrize("name", ["granitemoe, mixed types", "olmoe", "lfm2moe"])
def test_8_bit_activations_stay_near_the_reference(name: str, model_path: Callable[[str], Path]) -> None:
    path, ids = model_path(name), random_ids(33)
    states, expected = all_states(path, ids, "int8"), ReferenceModel(path).forward(ids).hidden
    # A token that has other experts, because two scores nearly agree, differs more: so the median counts.
    rows = zip(states[:, None], expected[:, None], strict=True)
    assert np.median([lowest_cosine(*row) for row in rows]) > 0.995


def test_metadata_set_the_rules_of_the_router(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    whole = model_path("qwen3moe")
    config = read_config(GGUFFile(whole))
    assert (config.router_score, config.normalize_routes, config.route_scale) == ("softmax", True, 1.0)
    rules = {"gating_func": integer(2), "weights_norm": FALSE, "weights_scale": number(2.5)}
    entries = {f"qwen3moe.expert_{name}": value for name, value in rules.items()}
    config = read_config(GGUFFile(with_entries(tmp_path / "m.gguf", whole, entries)))
    assert (config.router_score, config.normalize_routes, config.route_scale) == ("sigmoid", False, 2.5)


def test_a_bias_of_the_router_decides_the_choice(device: str, tmp_path: Path) -> None:
    """All tokens go to expert 1, and none to expert 0, whose weights are NaN."""
    shape = replace(PRIVACY_FILTER, experts=ExpertShape(6, 2, 48), layers=1)
    path, ids = write(tmp_path / "m.gguf", shape), random_ids(70)
    bias = "blk.0.ffn_gate_inp.bias"
    with_tensor(path, path, bias, lambda values: np.copyto(values[:3], (-50, 50, 20)))
    assert lowest_cosine_of(path, ids, device) > 0.99999
    expected = all_states(path, ids, device=device)
    for name in ("gate", "up", "down"):
        of_experts = f"blk.0.ffn_{name}_exps.bias"
        with_tensor(path, path, of_experts, lambda values: values[: values.size // 6].fill(np.nan))
    np.testing.assert_array_equal(all_states(path, ids, device=device), expected)


def texts_together_and_alone(
    path: Path, longest: int, **options: Any
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Yield the states of each text of a batch, and those of the text alone."""
    texts = [random_ids(n, seed=n) for n in (1, 7, 40, 65, longest)]
    with Model(path, **options) as model:
        for text, states in zip(texts, states_of_texts(model, texts), strict=True):
            yield states, hidden_states(model, text)


@pytest.mark.parametrize("isa", _core.kernel_sets())
@pytest.mark.parametrize("compute", ["f32", "int8", "bf16"])
def test_texts_of_an_encoder_with_experts_do_not_depend_on_others(
    isa: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
    shape = replace(PRIVACY_FILTER, types={"*": "Q8_0"}, experts=ExpertShape(7, 2, 64), window=65)
    path = write(tmp_path / "m.gguf", shape)
    for together, alone in texts_together_and_alone(path, 600, device="cpu", compute=compute, threads=2):
        np.testing.assert_array_equal(alone, together)


def test_texts_of_an_encoder_with_experts_are_near_those_of_a_batch_on_metal(
    metal: None, tmp_path: Path
) -> None:
    """All tokens have the same experts: tiles depend on the number of rows, and with them the last bits."""
    shape = replace(PRIVACY_FILTER, types={"*": "Q8_0"}, experts=ExpertShape(5, 5, 64), window=65)
    path = write(tmp_path / "m.gguf", shape)
    for together, alone in texts_together_and_alone(path, 300, device="metal"):
        assert nmse(alone, together) <= 1e-7


def test_the_metal_engine_refuses_what_its_kernels_do_not_take(metal: None, tmp_path: Path) -> None:
    mixed = replace(IN_FLOAT32, types={"*": "F32", "*ffn_up_exps*": "F16"}, experts=ExpertShape(4, 2, 64))
    with pytest.raises(
        UnsupportedModelError, match="gates and ups of experts of the types F32 and F16; it takes one type"
    ):
        Model(write(tmp_path / "a.gguf", mixed), device="metal")
