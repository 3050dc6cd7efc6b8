"""Models whose layers differ in heads and inputs, and LayerNorm over dimensions of any width."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.closeness import LOWEST_COSINE, assert_close, lowest_cosine
from support.files.gguf_bytes import integer
from support.files.gguf_mutator import with_entries
from support.reference import ReferenceModel
from support.small_models import ENCODERS, MODELS, write

from metal_prefill import Model, UnsupportedModelError


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.layered is not None])
def test_a_page_has_room_for_layers_with_keys_of_their_own(
    name: str, model_path: Callable[[str], Path]
) -> None:
    shape = MODELS[name]
    layered = shape.layered
    assert layered is not None
    with Model(model_path(name), device="cpu", kv_dtype="f16") as model:
        page = model.stats()["kv_page_bytes"]
    own = layered.windowed(shape.layers)[: shape.layers - layered.shared]
    values = sum(
        layered.window_kv_heads * layered.window_head_dim if w else shape.kv_heads * shape.head_dim
        for w in own
    )
    exact = 2 * 64 * 2 * values
    assert exact <= page <= 1.5 * exact  # rows of values are padded


@pytest.mark.parametrize("key_dim", [13, 39])
def test_fewer_bits_stay_near_the_reference_in_any_batch(tmp_path: Path, key_dim: int) -> None:
    """Heads begin within the groups of rows of a product, or within a pair of dimensions."""
    heads = 78 // key_dim
    shape = replace(ENCODERS["bert, heads of 26"], heads=heads, kv_heads=heads, head_dim=key_dim)
    # Rotation, which this model has not, would be of an even number of dimensions.
    entries = {"bert.rope.dimension_count": integer(12)}
    path = with_entries(tmp_path / "m.gguf", write(tmp_path / "plain.gguf", shape), entries)
    short, long = (np.random.default_rng(n).integers(5, 300, n) for n in (9, 130))
    expected = ReferenceModel(path).forward(long).hidden
    for compute in ("int8", "w8a8", "int16", "bf16"):
        with Model(path, device="cpu", compute=compute) as model:
            hidden = partial(model.forward_batch, output="hidden", rows="all")
            # The keys of many rows are stored as they are computed, a group of columns at a time.
            states, other = hidden([model.session(), model.session()], [long, short])
            np.testing.assert_array_equal(other, hidden([model.session()], [short])[0], err_msg=compute)
        assert lowest_cosine(states, expected) >= LOWEST_COSINE, compute


def test_projected_embeddings_are_not_padded(metal: None, tmp_path: Path) -> None:
    narrow = replace(
        ENCODERS["bert, narrow embedding"], embedding_dim=60, types={"*": "F32"}, embedding="F16"
    )
    with pytest.raises(UnsupportedModelError, match="embeddings of 60 values; it takes multiples of 8"):
        Model(write(tmp_path / "m.gguf", narrow), device="metal")


def test_the_embedding_of_inputs_stays_in_the_file(metal: None, tmp_path: Path) -> None:
    """The GPU has views of the rest of the file, and no copy."""
    path = write(tmp_path / "m.gguf", replace(MODELS["gemma4"], vocab=20000))
    with Model(path, device="metal") as model:
        stats, size = model.stats(), path.stat().st_size
        table = model.gguf.tensors["per_layer_token_embd.weight"]
        assert table.nbytes > 0.5 * size
        assert stats["weights_copied_bytes"] < 0.01 * size
        assert stats["weights_mapped_bytes"] <= size - table.nbytes + 4 * 65536
        logits = model.session().forward_prompt_logits([19999, 0, 12345])
    expected = ReferenceModel(path).forward(np.array([19999, 0, 12345])).logits[-1]
    assert_close("metal", logits, expected)
