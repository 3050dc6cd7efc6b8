"""Models whose layers have different heads, share keys and values, and have inputs of their own."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.reference import ReferenceModel
from support.small_models import MODELS, write

from metal_prefill import Model, Session

NAMES = [name for name, model in MODELS.items() if model.layered is not None]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a model."""
    found: str = request.param
    return found


@pytest.fixture(params=["f16", "f32", "q8_0"])
def model(request: pytest.FixtureRequest, name: str, model_path: Callable[[str], Path]) -> Iterator[Model]:
    """Open a model with a cache of each type that fits its heads."""
    kv_dtype: str = "f16" if "odd" in name and request.param == "q8_0" else request.param
    with Model(model_path(name), device="cpu", kv_dtype=kv_dtype, threads=2, chunk_tokens=48) as opened:
        yield opened


def tokens(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return random tokens."""
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
        layered.window_kv_heads * layered.window_head_dim if w else shape.kv_heads * shape.key_dim
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
