"""Numbers of every engine against the float64 reference, and against itself however a prompt is split."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import NMSE, assert_close, assert_keeps, correlation, nmse, random_ids
from support.recurrent import NAMES as RECURRENT
from support.reference import ReferenceModel, Result
from support.small_models import MODELS, with_tensor, write

from metal_prefill import Model, NumericalError, _core
from metal_prefill.files import GGUFFile

Logits = npt.NDArray[np.float32]

# Activations in 8 bits per block of 32 have a relative error near 0.5% each. Logits of random weights are
# sensitive to it; this bound keeps the effect from growing unnoticed.
CORRELATION_INT8 = 0.998

SETS = [pytest.param(isa, marks=pytest.mark.slow) if isa == "scalar" else isa for isa in _core.kernel_sets()]


@cache
def reference(path: Path) -> ReferenceModel:
    """Dequantize a file once."""
    return ReferenceModel(path)


@cache
def reference_results(path: Path, *ids: int) -> Result:
    """Compute a text once for both devices."""
    return reference(path).forward(ids)


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_the_reference_on_every_kind_of_model(
    device: str, name: str, model_path: Callable[[str], Path]
) -> None:
    """Keys, values and states do, too: after a token, a prompt that ends in another page, and a few more."""
    path = model_path(name)
    ids = random_ids(70, MODELS[name].vocab)
    first, expected = reference_results(path, *ids[:1]), reference_results(path, *ids)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model, model.session() as session:
        assert_close(device, session.forward_token(int(ids[0])), first.logits[0])
        assert_keeps(NMSE[device], session, first.kept)
        for end in (66, 67, 70):
            logits = session.forward_prompt_logits(ids[session.position : end])
            assert_close(device, logits, expected.logits[end - 1])
        assert_keeps(NMSE[device], session, expected.kept)


def test_a_model_opened_for_its_original_context_uses_short_long_rope_factors(
    device: str, model_path: Callable[[str], Path]
) -> None:
    path = model_path("phi3, long rope")
    ids = random_ids(64, MODELS["phi3, long rope"].vocab)
    expected = ReferenceModel(path, context=64).forward(ids).logits[-1]
    with Model(path, device=device, compute="f32", kv_dtype="f32", max_context=64) as model:
        assert_close(device, model.session().forward_prompt_logits(ids), expected)
        with pytest.raises(ValueError, match="max_context=65 is outside 1 to 64"):
            model.session(max_context=65)
    assert nmse(reference(path).forward(ids).logits[-1], expected) > 1e-3  # factors of long contexts


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith("type ")])
def test_8_bit_activations_stay_near_the_reference(name: str, model_path: Callable[[str], Path]) -> None:
    path = model_path(name)
    ids = random_ids(33, MODELS[name].vocab)
    expected = reference(path).forward(ids).logits[-1]
    for compute in ("int8", "w8a8", "int16"):
        with Model(path, device="cpu", compute=compute) as model:
            logits = model.session().forward_prompt_logits(ids)
        assert correlation(logits, expected) > CORRELATION_INT8, compute


# Activations in bfloat16 have a relative error below 2^-9, a tenth of that of 8 bits.
CORRELATION_BFLOAT16 = 0.9999


@pytest.mark.parametrize(
    ("name", "kind", "compute"),
    [
        ("dimensions that fit no block", "BF16", "int8"),
        ("dimensions that fit no block", "F16", "bf16"),
        ("dimensions that fit no block", "F32", "bf16"),
        ("mixed types", "", "bf16"),
    ],
)
def test_bfloat16_models_stay_near_the_reference_for_any_split(
    name: str, kind: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(MODELS[name], vocab=301)
    if kind:
        shape = replace(shape, types={"*": kind}, embedding=kind)
    path = write(tmp_path / "m.gguf", shape)
    ids = random_ids(33, shape.vocab)
    expected = reference(path).forward(ids).logits[-1]
    runs = [Run(1, [33]), Run(2, [33]), Run(2, [1, 2, 6, 7, 17]), Run(1, [1] * 33)]
    for isa in _core.kernel_sets():
        monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
        logits = same_logits(path, ids, runs, compute=compute)
        assert correlation(logits, expected) > CORRELATION_BFLOAT16, isa


@pytest.mark.skipif("avx512bf16" not in _core.kernel_sets(), reason="the processor lacks AVX512-BF16")
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q6_K"])
def test_bfloat16_mode_rounds_weights_of_every_type_if_supported(
    kind: str, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", "avx512bf16")
    logits, packed = [], []
    for compute in ("bf16", "f32", "int8"):
        with Model(model_path(f"type {kind}"), device="cpu", compute=compute) as model:
            logits.append(model.session().forward_prompt_logits(random_ids(9, 320)))
            packed.append(model.stats()["weight_bytes"])
    assert packed[0] > packed[1] == 0  # attention alone would change the logits, too
    for other in logits[1:]:
        assert not np.array_equal(logits[0], other)
        assert correlation(logits[0], other) > CORRELATION_BFLOAT16 - 0.001


@pytest.mark.parametrize(
    ("kind", "compute"),
    [*product(["F32", "F16", "Q4_0", "Q6_K"], ["bf16"]), *product(["F32", "F16"], ["int8"])],
)
def test_modes_are_float32_if_unsupported_or_if_weights_are_exact(
    kind: str, compute: str, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets without products of pairs, and float weights in 8-bit mode, compute in float32."""
    if compute == "bf16":
        monkeypatch.setenv("METAL_PREFILL_CPU_ISA", "scalar")
    logits = []
    for mode in (compute, "f32"):
        with Model(model_path(f"type {kind}"), device="cpu", compute=mode) as model:
            logits.append(model.session().forward_prompt_logits(random_ids(33)))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize("compute", ["f32", "int8"])
def test_the_bundled_model_agrees_with_the_reference(device: str, demo_path: Path, compute: str) -> None:
    with Model(demo_path, device=device, compute=compute) as model:
        ids = model.tokenizer.encode("ROMEO:\nBut, soft! what light through yonder window breaks?")
        expected = reference(demo_path).forward(ids).logits
        for n in (1, 7, len(ids)):
            logits = model.session().forward_prompt_logits(ids[:n])
            assert correlation(logits, expected[n - 1]) > 0.9999
            assert np.argmax(logits) == np.argmax(expected[n - 1])


def test_every_prompt_length_matches_the_reference(device: str, model_path: Callable[[str], Path]) -> None:
    path = model_path("gqa 3")
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        for n in (1, 2, 7, 8, 9, 31, 32, 33, 63, 65, 200):
            ids = random_ids(n, 320, seed=n)
            assert_close(
                device, model.session().forward_prompt_logits(ids), reference_results(path, *ids).logits[-1]
            )


def test_positions_past_2048_match_the_reference(device: str, model_path: Callable[[str], Path]) -> None:
    path = model_path("long context")
    ids = random_ids(2100, 320)
    expected = reference_results(path, *ids).logits
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        model.forward_prompt(ids[:-2])
        assert_close(device, model.forward_token(int(ids[-2])), expected[-2])
        assert_close(device, model.forward_token(int(ids[-1])), expected[-1])


def test_splitting_the_keys_of_a_token_loses_none(device: str, tmp_path: Path) -> None:
    """Metal splits them from 256 on. In a window of four, each has enough weight to be noticed."""
    path = write(tmp_path / "m.gguf", replace(MODELS["gemma3"], layers=1, window=4, context=512))
    ids = random_ids(262, 320)
    expected = ReferenceModel(path).forward(ids).logits
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        model.forward_prompt(ids[:256])
        for position in range(256, 262):
            assert_close(device, model.forward_token(int(ids[position])), expected[position])


@pytest.mark.parametrize("name", ["gqa 3", "values wider than keys", "gemma3", "olmo2", "biases"])
def test_the_cache_holds_every_token(device: str, name: str, model_path: Callable[[str], Path]) -> None:
    """The cache has half precision, 11 significant bits; the test of every kind of model has float32."""
    path, ids = model_path(name), random_ids(41, MODELS[name].vocab)
    with Model(path, device=device, compute="f32", kv_dtype="f16") as model, model.session() as session:
        session.forward_prompt(ids[:40])
        session.forward_token(int(ids[40]))
        assert session.tokens == list(ids)
        assert_keeps(5e-6, session, reference(path).forward(ids).kept)


class Run(NamedTuple):
    """How to compute a prompt: in pieces of some sizes, and in chunks of these."""

    threads: int
    sizes: list[int]
    chunk_tokens: int = 512


def same_logits(path: Path, ids: npt.NDArray[np.int64], runs: Iterable[Run], **options: Any) -> Logits:
    """Return the logits after a prompt, which all runs have, as they have the bytes of cache and states."""
    outcomes = []
    for threads, sizes, chunk_tokens in runs:
        options |= {"threads": threads, "chunk_tokens": chunk_tokens}
        with Model(path, device="cpu", **options) as model, model.session() as session:
            for end in np.cumsum(sizes):
                logits = session.forward_prompt_logits(ids[session.position : end])
            outcomes.append([logits, *session.native.export_state()[2]])
    for parts in outcomes[1:]:
        for part, expected in zip(parts, outcomes[0], strict=True):
            np.testing.assert_array_equal(part, expected, err_msg=str(options))
    return outcomes[0][0]


# Weights; steps between products; experts, whose products have rows of several tokens; and states.
WEIGHTS = ["gqa 3", "mixed types", "mixed K-quants", "16-bit floats", "granitemoe, mixed types"]
STEPS = [
    *("gemma2", "gemma3", "gemma4", "gemma4, wide heads", "gqa 8", "granite", "hunyuan-dense", "olmo2"),
    *("olmoe", "lfm2moe", "granitehybrid, experts"),
]
IN_FLOAT32 = ["gqa 3", "gemma3", "gemma4, odd dimensions"]
IN_BLOCKS = ["gqa 3", "gemma4, equal feed-forwards", "lfm2", "falcon-h1", "qwen35"]


@pytest.mark.parametrize(
    ("name", "compute", "kv_dtype"),
    [
        *product(WEIGHTS, ["int8", "w8a8", "int16", "bf16", "f32"], ["f16"]),
        *((name, ("int8", "f32")[i % 2], "f16") for i, name in enumerate(STEPS)),
        *product(RECURRENT, ["auto"], ["f16"]),
        *product(IN_FLOAT32, ["int8", "f32"], ["f32"]),
        *product(IN_BLOCKS, ["int8"], ["q8_0"]),
    ],
)
def test_the_cpu_is_bit_identical_for_any_split_of_a_prompt(
    name: str, compute: str, kv_dtype: str, model_path: Callable[[str], Path]
) -> None:
    n = 70  # more than a page
    ids, options = random_ids(n, MODELS[name].vocab), {"compute": compute, "kv_dtype": kv_dtype}
    runs = [Run(1, [n]), Run(2, [n]), Run(2, [n], 16), Run(3, [n], 7), Run(1, [1] * n)]
    # Enough threads that each normalizes a few rows itself.
    runs += [Run(2, [1, 30, 2, 8, 29]), Run(16, [4, 3, 2, 1, 60])]
    same_logits(model_path(name), ids, runs, **options)


@pytest.mark.parametrize("isa", SETS)
def test_each_instruction_set_is_bit_identical_for_any_split_of_a_prompt(
    isa: str, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
    n = 300  # several spans of attention, and more than one pass
    path, ids = model_path("gqa 3"), random_ids(n, MODELS["gqa 3"].vocab)
    modes = ["int8", "w8a8", *["int16"] * isa.startswith("av"), *["bf16"] * (isa in ("avx512bf16", "amx"))]
    with Model(path, device="cpu") as model:
        assert f"({isa}," in model.device
    runs = [Run(1, [n]), Run(2, [n]), Run(2, [64, 1, 1, 33, 201]), Run(2, [270] + [1] * 30)]
    for compute, kv_dtype in (*product(modes, ("f16",)), ("int8", "q8_0")):
        same_logits(path, ids, runs, compute=compute, kv_dtype=kv_dtype)


LONG = {
    "heads in threes": replace(MODELS["gqa 3"], context=1200),
    "windows": replace(MODELS["gemma3"], context=1200, window=600),
    "norms of rows": replace(MODELS["olmo2"], context=1200),
    "layers that differ": replace(MODELS["gemma4"], context=1200, window=600),
    "heads that fit no block": replace(MODELS["dimensions that fit no block"], context=1200),
    "narrow values": replace(MODELS["values narrower than keys"], context=1200),
}


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [*product(LONG, ["f16"]), *product(["windows", "layers that differ"], ["f32"])]
)
def test_threads_that_share_the_positions_of_a_token_are_bit_identical(
    name: str, kv_dtype: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", LONG[name])
    ids = random_ids(1032, LONG[name].vocab)
    token_by_token = [1021] + [1] * 11  # the last ones have a third share
    runs = [Run(1, [1032]), *(Run(n, token_by_token) for n in (1, 2, 5)), Run(5, [1021, 8, 3])]
    same_logits(path, ids, runs, kv_dtype=kv_dtype)


def test_a_long_and_a_short_sequence_of_a_pass_match_single_ones(tmp_path: Path) -> None:
    """Threads share the positions of the long one; the short one has fewer splits."""
    shape = LONG["heads in threes"]
    path = write(tmp_path / "m.gguf", shape)
    prompts = [random_ids(n, shape.vocab) for n in (1090, 40, 600)]
    with Model(path, device="cpu", threads=1) as alone, Model(path, device="cpu", threads=3) as model:
        expected = []
        for ids in prompts:
            session = alone.session()
            session.forward_prompt(ids)
            expected.append([session.forward_prompt_logits(np.array([t], np.int32)) for t in (3, 4)])
        sessions = [model.session() for _ in prompts]
        for session, ids in zip(sessions, prompts, strict=True):
            session.forward_prompt(ids)
        for i, token in enumerate((3, 4)):
            step = [np.array([token], np.int32)] * len(sessions)
            results = model.forward_batch(sessions, step, output="logits")
            for got, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(got, wanted[i])


def test_nan_logits_are_an_error_and_change_nothing(device: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", MODELS["gqa 1"])
    path = with_tensor(tmp_path / "m.gguf", whole, "output_norm.weight", lambda values: values.fill(np.nan))
    with Model(path, device=device) as model:
        for call in (model.forward_prompt, lambda ids: list(model.generate(ids, 5))):
            with pytest.raises(NumericalError, match="every logit of the token at position 2 is NaN"):
                call([1, 2, 3])
        with pytest.raises(NumericalError, match=r"logit \d+ of the token at position 2 is NaN"):
            list(model.generate([1, 2, 3], 2, temperature=1.0))
        assert model.position == 0


def test_norms_and_biases_are_copied_when_a_model_is_opened(tmp_path: Path) -> None:
    """In the file they are between packed matrices, of which reading a page would load up to 2 MiB again."""
    path = write(tmp_path / "m.gguf", MODELS["qwen2"])
    vectors = [tensor for tensor in GGUFFile(path).tensors.values() if len(tensor.shape) == 1]
    assert {tensor.name.rpartition(".")[2] for tensor in vectors} == {"weight", "bias"}
    with Model(path, device="cpu") as model:
        before = model.session().forward_prompt_logits([1, 2, 3])
        with open(path, "r+b") as changed:
            for tensor in vectors:
                changed.seek(tensor.offset)
                changed.write(b"\xff" * tensor.nbytes)  # NaN
        np.testing.assert_array_equal(model.session().forward_prompt_logits([1, 2, 3]), before)
