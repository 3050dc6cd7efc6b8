"""Models whose layers have different heads, share keys and values, and have inputs of their own, on Metal."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.reference import ReferenceModel
from support.small_models import MODELS, write

from metal_prefill import Model

NAMES = [name for name, model in MODELS.items() if model.layered is not None]
EXACT = 8  # rows of a sequence in a pass that are bit-identical to single ones

pytestmark = pytest.mark.usefixtures("metal")


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str, model_path: Callable[[str], Path]) -> Iterator[Model]:
    """Open a model whose prompts need several passes."""
    with Model(model_path(name), device="metal", chunk_tokens=48) as opened:
        yield opened


def tokens(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 320, n)


def assert_near(logits: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Check what passes of different lengths may differ by."""
    assert np.abs(logits - expected).max() <= 1e-3 * np.abs(expected).max()


def test_a_prompt_beyond_the_window_and_its_cache_match_the_reference(
    name: str, model_path: Callable[[str], Path]
) -> None:
    """Log probabilities of all rows, then single tokens, a few, and keys and values of several pages."""
    ids = tokens(100)
    expected = ReferenceModel(model_path(name)).forward(ids)
    with Model(model_path(name), device="metal", kv_dtype="f32", chunk_tokens=64) as model:
        scores = model.score(ids)
        wanted = expected.log_probs(ids)
        np.testing.assert_allclose(scores, wanted, atol=2e-2)
        session = model.session()
        logits = [session.forward_prompt_logits(ids[:90])]
        logits += [session.forward_token(int(token)) for token in ids[90:95]]
        logits += [session.forward_prompt_logits(ids[95:])]
        reached = expected.logits[[*range(89, 95), 99]]
        assert np.square(np.stack(logits) - reached).sum() <= 5e-6 * np.square(reached).sum()
        _, _, rows = session.native.export_state()
    parts = [part for pair in zip(expected.keys, expected.values, strict=True) for part in pair]
    assert len(rows) == len(parts)
    for row, part in zip(rows, parts, strict=True):
        got = row.view(np.float32).reshape(part.shape)
        assert np.square(got - part).sum() <= 5e-6 * np.square(part).sum()


def test_up_to_eight_rows_have_the_bits_of_single_tokens(model: Model) -> None:
    ids = tokens(100)
    session = model.session()
    session.forward_prompt(ids[:70])  # beyond the first page
    forks = [session.fork() for _ in range(2)]
    single = [session.forward_token(int(token)) for token in ids[70 : 70 + EXACT]]
    np.testing.assert_array_equal(forks[0].forward_prompt_logits(ids[70 : 70 + EXACT]), single[-1])
    np.testing.assert_array_equal(forks[1].forward_prompt_logits(ids[70:73]), single[2])
    np.testing.assert_array_equal(forks[1].forward_prompt_logits(ids[73:78]), single[-1])


def test_sequences_of_a_batch_are_those_of_sessions_alone(model: Model) -> None:
    """Short ones bit for bit; long ones share a pass with each other."""
    short, long = [tokens(n, n) for n in (5, 1, 8)], [tokens(n, n) for n in (70, 30, 9)]
    alone = [model.session().forward_prompt_logits(ids) for ids in (*short, *long)]
    sessions = [model.session() for _ in alone]
    together = model.forward_batch(sessions, [*short, *long], output="logits")
    for logits, expected in zip(together[: len(short)], alone[: len(short)], strict=True):
        np.testing.assert_array_equal(logits, expected)
    for logits, expected in zip(together[len(short) :], alone[len(short) :], strict=True):
        assert_near(logits, expected)
    forks = [session.fork() for session in sessions]
    singles = [fork.forward_token(7) for fork in forks]
    for logits, expected in zip(
        model.forward_batch(sessions, [[7]] * len(sessions), output="logits"), singles, strict=True
    ):
        np.testing.assert_array_equal(logits, expected)


def test_forks_rewinding_prefixes_and_saved_sessions_continue_with_the_same_bits(
    model: Model, tmp_path: Path
) -> None:
    ids, more = tokens(90), tokens(6, 1)
    session = model.session()
    session.forward_prompt(ids)
    session.save(tmp_path / "s.safetensors")
    loaded, fork = model.load_session(tmp_path / "s.safetensors"), session.fork()
    expected = session.forward_prompt_logits(more)
    np.testing.assert_array_equal(fork.forward_prompt_logits(more), expected)
    np.testing.assert_array_equal(loaded.forward_prompt_logits(more), expected)
    session.rewind(len(ids))
    np.testing.assert_array_equal(session.forward_prompt_logits(more), expected)
    reusing = model.session()
    reusing.forward_prompt(ids[:1])
    assert_near(reusing.forward_prompt_logits(np.concatenate([ids, more]), reuse=True), expected)


def test_text_is_generated_token_by_token_as_by_single_calls(model: Model) -> None:
    """The engine does not run ahead of the tokens if layers have inputs, which the host reads."""
    has_inputs = model.config.per_layer_dim > 0
    assert model.engine.core.runs_ahead == (not has_inputs)
    session, ids = model.session(), tokens(20)
    token, chosen = model.session().forward_prompt(ids), []
    other = model.session()
    other.forward_prompt(ids)
    for _ in range(5):
        chosen.append(int(token))
        token = other.forward_token_greedy(int(token))
    pieces = session.stream(ids, 5, temperature=0.0, speculate="off", min_tokens=5)
    assert [piece.token for piece in pieces] == chosen


def test_the_embedding_of_inputs_stays_in_the_file(tmp_path: Path) -> None:
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
    assert np.square(logits - expected).sum() <= 5e-6 * np.square(expected).sum()


def test_feed_forwards_of_several_widths_may_have_gate_and_up_of_two_types(tmp_path: Path) -> None:
    """The activation is then a dispatch of its own, with the width of the layer."""
    mixed = replace(MODELS["gemma4"], types={"*": "Q4_0", "*.ffn_up.*": "Q8_0"})
    path, ids = write(tmp_path / "m.gguf", mixed), tokens(20)
    expected = ReferenceModel(path).forward(ids).logits[-1]
    with Model(path, device="metal", kv_dtype="f32") as model:
        logits = model.session().forward_prompt_logits(ids)
    assert np.square(logits - expected).sum() <= 5e-6 * np.square(expected).sum()
