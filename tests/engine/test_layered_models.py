"""Models whose layers differ in heads and inputs, and LayerNorm over dimensions of any width."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.gguf_bytes import U32, u32
from support.gguf_mutator import with_key
from support.reference import ReferenceModel
from support.small_models import ENCODERS, MODELS, SmallModel, write

from metal_prefill import Model, Session, UnsupportedModelError
from metal_prefill.synth import TIED

NAMES = [name for name, model in MODELS.items() if model.layered is not None]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=["f16", "f32", "q8_0"])
def model(request: pytest.FixtureRequest, name: str, model_path: Callable[[str], Path]) -> Iterator[Model]:
    """Open a model with a cache of each type that fits its heads."""
    kv_dtype: str = "f16" if "odd" in name and request.param == "q8_0" else request.param
    with Model(model_path(name), device="cpu", kv_dtype=kv_dtype, threads=2, chunk_tokens=48) as opened:
        yield opened


def tokens(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 320, n)


def assert_same_state(one: Session, other: Session) -> None:
    """Compare tokens and caches, bit for bit."""
    ids, cached, rows = one.native.export_state()
    other_ids, other_cached, other_rows = other.native.export_state()
    assert ids.tolist() == other_ids.tolist()
    assert cached == other_cached
    for row, wanted in zip(rows, other_rows, strict=True):
        np.testing.assert_array_equal(row, wanted)


def test_every_position_matches_the_reference(name: str, model_path: Callable[[str], Path]) -> None:
    """Also after the window, and across pages."""
    ids = tokens(150)
    expected = ReferenceModel(model_path(name)).forward(ids)
    with Model(model_path(name), device="cpu", compute="f32", kv_dtype="f32") as model:
        session = model.session()
        logits = np.stack([session.forward_token(int(token)) for token in ids])
        np.testing.assert_allclose(logits, expected.logits, atol=1e-4 * np.abs(expected.logits).max())
        _, _, rows = session.native.export_state()
    # Keys and values of the layers that have their own, in turn.
    wanted = [part for pair in zip(expected.keys, expected.values, strict=True) for part in pair]
    assert len(rows) == len(wanted)
    for row, part in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row.view(np.float32).reshape(part.shape), part, atol=1e-3)


def test_all_layers_can_have_windows(tmp_path: Path) -> None:
    """Their heads then differ from those of the model, not from one another."""
    whole = MODELS["gemma4"]
    assert whole.layered is not None
    model = replace(whole, layers=2, layered=replace(whole.layered, window_period=3, shared=0))
    path, ids = write(tmp_path / "m.gguf", model), tokens(40)
    expected = ReferenceModel(path).forward(ids).logits[-1]
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as opened:
        logits = opened.session().forward_prompt_logits(ids)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


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


def test_sequences_of_a_batch_are_those_of_sessions_alone(model: Model) -> None:
    prompts = [tokens(n, n) for n in (5, 70, 130, 64, 1)]
    sessions = [model.session() for _ in prompts]
    for _ in range(2):  # the second time from different positions
        results = model.forward_batch(sessions, prompts, output="logits")
    for prompt, session, logits in zip(prompts, sessions, results, strict=True):
        other = model.session()
        other.forward_prompt(prompt)
        np.testing.assert_array_equal(logits, other.forward_prompt_logits(prompt))
        assert_same_state(session, other)


def test_scores_of_a_prompt_are_those_of_single_tokens(model: Model) -> None:
    """Every row has an output, in all layers; of a prompt only the last one has."""
    ids = tokens(100)
    scores = model.score(ids)
    session = model.session()
    for i, token in enumerate(ids[:-1]):
        logits = session.forward_token(int(token)).astype(np.float64)
        expected = logits[ids[i + 1]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert scores[i] == pytest.approx(expected, abs=1e-5)


def test_forks_and_prefixes_and_rewinding_continue_with_the_same_bits(model: Model) -> None:
    ids, more = tokens(140), tokens(30, 1)
    session = model.session()
    session.forward_prompt(ids)
    fork = session.fork()
    expected = session.forward_prompt_logits(more)
    np.testing.assert_array_equal(fork.forward_prompt_logits(more), expected)
    assert_same_state(session, fork)
    session.rewind(len(ids))
    np.testing.assert_array_equal(session.forward_prompt_logits(more), expected)
    both = np.concatenate([ids, more])
    reusing = model.session()
    reusing.forward_prompt(both[:1])
    np.testing.assert_array_equal(reusing.forward_prompt_logits(both, reuse=True), expected)


def test_saved_sessions_continue_with_the_same_bits(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.forward_prompt(tokens(90))
    session.save(tmp_path / "s.safetensors")
    loaded = model.load_session(tmp_path / "s.safetensors")
    assert_same_state(session, loaded)
    more = tokens(20, 2)
    np.testing.assert_array_equal(loaded.forward_prompt_logits(more), session.forward_prompt_logits(more))


NMSE, LOWEST_COSINE = {"cpu": 1e-9, "metal": 5e-6}, 0.9995  # as in test_encoders.py


def odd(model: SmallModel) -> SmallModel:
    """Return the model with heads of 26 dimensions, as the smallest encoders of BERT's kind have."""
    return replace(
        model, dim=78, heads=3, kv_heads=3, head_dim=26, ffn=100, types={"*": "F32"}, embedding="F16"
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
    shape = replace(odd(ENCODERS["bert"]), heads=heads, kv_heads=heads, head_dim=key_dim)
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
    path = write(tmp_path / "m.gguf", odd(replace(MODELS[name], output_type=TIED)))
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
