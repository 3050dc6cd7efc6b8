"""A KV cache in Q8_0 against the float64 reference, against itself, and through all that touches pages.

The oracle rounds keys and values by `gguf.quants`, which is where the format is defined.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.numpy import load_file
from support.closeness import nmse, random_ids
from support.comparison import VERSE
from support.reference import ReferenceModel
from support.small_models import MODELS, SmallModel, write

from metal_prefill import Model, UnsupportedModelError, _core

Logits = npt.NDArray[np.float32]

# Bounds of normalized squared errors: where codes become float32, which is exact; and where a number near
# the middle between two codes was rounded to the other one.
NMSE_F32, NMSE_OTHER_CODE = 1e-12, 1e-6

SUITED = [
    "gqa 8",
    "head_dim 128",
    "values wider than keys",
    "values narrower than keys",
    "gemma2",
    "gemma3",
    "olmo2",
]


def opened(path: Path, **options: Any) -> Model:
    """Open a model with a cache in Q8_0."""
    return Model(path, **{"device": "cpu", "kv_dtype": "q8_0", **options})


@pytest.mark.parametrize("name", SUITED)
def test_logits_match_a_rounded_cache(name: str, model_path: Callable[[str], Path]) -> None:
    """A prompt and single tokens take more than one page.

    Arithmetic may add a tenth to the squared error of the cache. It has 15 bits on some sets, and now and
    then carries a number to another code than the reference's, which later layers see.
    """
    ids = random_ids(75, MODELS[name].vocab)
    expected = ReferenceModel(model_path(name), kv_dtype="q8_0").forward(ids).logits
    unrounded = ReferenceModel(model_path(name)).forward(ids).logits
    with opened(model_path(name), compute="f32") as model, model.session() as session:
        outcomes = [session.forward_prompt_logits(ids[:63])]
        outcomes += [session.forward_token(int(token)) for token in ids[63:]]

    assert nmse(outcomes, expected[62:]) <= 0.1 * nmse(outcomes, unrounded[62:]) <= 1e-4


@pytest.mark.parametrize("isa", sorted({"scalar", "avx2", "neon"} & set(_core.kernel_sets())))
def test_logits_are_exact_if_codes_are_widened_to_float32(
    isa: str, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some prompts they are; in others a rounding before the cache carries a number to another code."""
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", isa)
    reference = ReferenceModel(model_path("gqa 8"), kv_dtype="q8_0")
    errors = []
    with opened(model_path("gqa 8"), compute="f32") as model:
        for seed in range(8):
            ids = random_ids(70, seed=seed)
            expected = reference.forward(ids).logits[-1]
            errors.append(nmse(model.session().forward_prompt_logits(ids), expected))
    assert min(errors) <= NMSE_F32
    assert max(errors) <= NMSE_OTHER_CODE


@pytest.mark.parametrize("head_dim", [32, 256])
def test_the_cache_holds_the_blocks_that_the_format_defines(tmp_path: Path, head_dim: int) -> None:
    """K and V of the first layer depend on no cache: they are the rounded float32 values."""
    path = write(tmp_path / "m.gguf", SmallModel(layers=1, head_dim=head_dim))
    ids = random_ids(70)
    with opened(path) as model, Model(path, device="cpu", kv_dtype="f32") as exact:
        sessions = [model.session(), exact.session()]
        for session in sessions:
            session.forward_prompt(ids)
        # K and V of each layer in turn.
        for blocks, numbers in zip(*(s.native.export_state()[2] for s in sessions), strict=True):
            expected = quants.quantize(numbers.view(np.float32), Type.Q8_0)
            np.testing.assert_array_equal(blocks, expected.reshape(-1))


@pytest.mark.parametrize("n", [1, 16, 70])
def test_a_saved_session_follows_the_format(
    model_path: Callable[[str], Path], tmp_path: Path, n: int
) -> None:
    """A block is a scale in f16, then 32 signed codes."""
    path = tmp_path / "s.session"
    with opened(model_path("values wider than keys"), compute="f32") as model, model.session() as session:
        session.forward_prompt(random_ids(n))
        session.save(path)
    arrays = load_file(path)
    assert arrays["layer.1.key"].shape == (n, 2, 17)
    assert arrays["layer.1.value"].shape == (n, 2, 34)
    blocks = arrays["layer.1.value"].view(np.uint8).reshape(n * 2, 68)
    values = quants.dequantize(blocks, Type.Q8_0).reshape(n, 2, 64)
    reference = ReferenceModel(model_path("values wider than keys"), kv_dtype="q8_0")
    expected = reference.forward(random_ids(n)).kept[3]  # values of the second layer
    assert nmse(values, expected) <= 1e-4


def test_it_takes_17_bytes_instead_of_32(model_path: Callable[[str], Path]) -> None:
    used = {}
    for kv_dtype in ("f16", "q8_0"):
        with opened(model_path("gqa 3"), kv_dtype=kv_dtype) as model, model.session() as session:
            session.forward_prompt(random_ids(130))
            stats = session.stats()
            assert stats["kv_cache_bytes"] == stats["kv_pool_bytes"]
            used[kv_dtype] = stats["kv_cache_bytes"]
    assert used["q8_0"] * 32 == used["f16"] * 17


@pytest.mark.parametrize(("key_dim", "value_dim", "wrong"), [(48, 32, 48), (32, 16, 16)])
def test_heads_that_are_not_whole_blocks_are_rejected_by_name(
    tmp_path: Path, key_dim: int, value_dim: int, wrong: int
) -> None:
    path = write(tmp_path / "m.gguf", SmallModel(types={"*": "F32"}, head_dim=key_dim, value_dim=value_dim))
    with pytest.raises(UnsupportedModelError, match=f"blocks of 32 dimensions, which heads of {wrong}"):
        opened(path)


def test_metal_rejects_it_by_name(metal: None, demo_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="Metal engine does not support a KV cache in q8_0; it takes f16 and f32"
    ):
        opened(demo_path, device="metal")


def test_perplexity_is_within_a_thousandth_of_an_f16_cache(demo_path: Path) -> None:
    """A trained model reads verse; docs/accuracy.md has a larger model and a longer text."""
    scores = {}
    for kv_dtype in ("f16", "q8_0"):
        with opened(demo_path, kv_dtype=kv_dtype, compute="f32") as model:
            scores[kv_dtype] = model.score(model.tokenizer.encode(VERSE))
    assert abs(np.mean(scores["q8_0"]) - np.mean(scores["f16"])) <= 1e-3
    assert not np.array_equal(scores["q8_0"], scores["f16"])
