"""LayerNorm over dimensions that are no multiples of what the Metal engine reads at a time."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.gguf_bytes import U32, u32
from support.gguf_mutator import with_key
from support.reference import ReferenceModel
from support.small_models import ENCODERS, MODELS, SmallModel, write

from metal_prefill import Model, UnsupportedModelError

NMSE, LOWEST_COSINE = {"cpu": 1e-9, "metal": 5e-6}, 0.9995  # as in test_encoders.py


def odd(model: SmallModel) -> SmallModel:
    """Return the model with heads of 26 dimensions, as the smallest encoders of BERT's kind have."""
    return replace(
        model, dim=78, heads=3, kv_heads=3, key_dim=26, ffn=100, types={"*": "F32"}, embedding="F16"
    )


@pytest.mark.parametrize("name", ["bert", "deberta", "jina-bert-v2", "modern-bert"])
def test_states_of_encoders_match_the_reference(device: str, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m.gguf", odd(ENCODERS[name]))
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        for n in (1, 9, 70):
            ids = np.random.default_rng(n).integers(5, 300, n)
            with model.session() as session:
                (states,) = model.forward_batch([session], [ids], output="hidden", rows="all")
            expected = reference.forward(ids).hidden
            assert np.square(states - expected).sum() <= NMSE[device] * np.square(expected).sum()


@pytest.mark.parametrize("key_dim", [13, 39])
def test_fewer_bits_stay_near_the_reference_in_any_batch(tmp_path: Path, key_dim: int) -> None:
    """Heads begin within the groups of rows of a product, or within a pair of dimensions."""
    heads = 78 // key_dim
    shape = replace(odd(ENCODERS["bert"]), heads=heads, kv_heads=heads, key_dim=key_dim)
    # Rotation, which this model has not, would be of an even number of dimensions.
    path = with_key(
        tmp_path / "m.gguf", write(tmp_path / "plain.gguf", shape), "rope.dimension_count", U32, u32(12)
    )
    short, long = (np.random.default_rng(n).integers(5, 300, n) for n in (9, 130))
    expected = ReferenceModel(path).forward(long).hidden
    for compute in ("int8", "w8a8", "int16", "bf16"):
        with Model(path, device="cpu", compute=compute) as model:
            hidden = partial(model.forward_batch, output="hidden", rows="all")
            # The keys of many rows are stored as they are computed, a group of columns at a time.
            states, other = hidden([model.session(), model.session()], [long, short])
            np.testing.assert_array_equal(other, hidden([model.session()], [short])[0], err_msg=compute)
        norms = np.linalg.norm(states, axis=1) * np.linalg.norm(expected, axis=1)
        assert ((states * expected).sum(axis=1) / norms).min() >= LOWEST_COSINE, compute


@pytest.mark.parametrize("name", ["gpt2", "phi2"])
def test_logits_of_decoders_match_the_reference(device: str, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m.gguf", odd(replace(MODELS[name], output=None)))
    ids = np.random.default_rng(1).integers(5, 300, 45)
    expected = ReferenceModel(path).forward(ids).logits
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model, model.session() as session:
        for end in (40, 41, 45):
            logits = session.forward_prompt_logits(ids[session.position : end])
            error = np.square(logits - expected[end - 1]).sum()
            assert error <= NMSE[device] * np.square(expected[end - 1]).sum()


def test_projected_embeddings_are_not_padded(metal: None, tmp_path: Path) -> None:
    narrow = replace(
        ENCODERS["bert, narrow embedding"], embedding_dim=60, types={"*": "F32"}, embedding="F16"
    )
    with pytest.raises(UnsupportedModelError, match="embeddings of 60 values; it takes multiples of 8"):
        Model(write(tmp_path / "m.gguf", narrow), device="metal")
