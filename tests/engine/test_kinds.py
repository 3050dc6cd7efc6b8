"""Sessions of models of every kind: results equal those of one prompt, however its tokens are computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from support.engine_options import set_engine_options
from support.kinds import (
    ALL_KINDS,
    KINDS,
    STEPS,
    VOCAB,
    Array,
    assert_equals_fresh,
    assert_same_logits,
    contents,
    fresh,
    ids_of,
    long_ids,
)
from support.native_requests import choose
from support.recurrent import interval
from support.scheduled_texts import tokens_alone, tokens_of_many
from support.small_models import MODELS, write, write_with_nan

from metal_prefill import Model, NumericalError

CHUNK = 64  # tokens


@pytest.fixture(scope="session")
def kind_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the model of each kind once."""
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda name: write(folder / f"{name}.gguf", ALL_KINDS[name].shape))


ON_CPU = [("cpu", name) for name in ALL_KINDS]
# Pages alone, states alone, and both. Copies of pages and states do not depend on the layers that they have.
ON_METAL = [("metal", name) for name in ("biases", "mamba2", "qwen35")]
steps_of_both = pytest.mark.parametrize(
    "kind", [*ON_CPU, *(("metal", name) for name in KINDS | STEPS)], indirect=True, ids=", ".join
)


@pytest.fixture(params=[*ON_CPU, *ON_METAL], ids=", ".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Run a test with each kind on each device that has it."""
    device, name = request.param
    if device == "metal":
        request.getfixturevalue("metal")
    return device, name


def opened(device: str, name: str, kind_path: Callable[[str], Path]) -> Model:
    kv_dtype: Any = ALL_KINDS[name].kv_dtype
    return Model(kind_path(name), device=device, kv_dtype=kv_dtype, threads=2, chunk_tokens=CHUNK)


@pytest.fixture
def model(kind: tuple[str, str], kind_path: Callable[[str], Path]) -> Iterator[Model]:
    with opened(*kind, kind_path) as model:
        yield model


T = TypeVar("T")


def some(model: Model, cases: Sequence[T]) -> Sequence[T]:
    """Return the cases, or on Metal, where each takes ten times as long, every second."""
    return cases if model.backend == "cpu" else cases[::2]


@pytest.mark.parametrize("reuse", [False, True], ids=["rewound", "reuse"])
def test_a_session_continues_after_any_prefix_like_a_fresh_one(model: Model, reuse: bool) -> None:
    """No more tokens than those after the last snapshot are computed again, and none at the end."""
    ids = long_ids(model.device)
    session = model.session()
    session.forward_prompt(ids)
    end = len(ids)
    positions = (256, 255, 200, 128, 127, 64, 63, 1, 0, 80, 70, 130, 64) if end > 256 else (128, 63, 130)
    for seed, position in enumerate((end, end - 1, *positions)):
        added, again = ids_of(90, seed=seed), 0 if position == end else position % interval(model)
        ids = np.concatenate([ids[:position], added])
        if reuse:
            logits = session.forward_prompt_logits(ids, reuse=True)
        else:
            session.rewind(position)
            logits = session.forward_prompt_logits(added)
        assert_equals_fresh(model, session, ids, logits)
        stats = session.stats()
        assert stats["tokens_recomputed"] <= again
        assert not reuse or stats["tokens_reused"] == position - stats["tokens_recomputed"]
        session.forward_token(3)
        assert session.stats()["tokens_recomputed"] == 0


def test_a_fork_and_its_origin_do_not_see_each_other(model: Model) -> None:
    """Forks are made at the ends of pages and of blocks, and next to them."""
    ids, one, other = ids_of(100), ids_of(30, seed=1), ids_of(30, seed=2)
    session = model.session()
    session.forward_prompt(ids)
    for position in some(model, (100, 64, 63, 15, 1)):
        session.rewind(position)
        fork = session.fork()
        logits, of_fork = model.forward_batch([session, fork], [one, other], output="logits")
        again = 0 if position == 100 else position % interval(model)  # a snapshot is at the end of the prompt
        assert session.stats()["tokens_recomputed"] == fork.stats()["tokens_recomputed"] == again
        assert_equals_fresh(model, session, np.concatenate([ids[:position], one]), logits)
        assert_equals_fresh(model, fork, np.concatenate([ids[:position], other]), of_fork)
    second = fork.fork()
    second.rewind(20)
    session.close()
    fork.close()
    kept = np.concatenate([ids[:1], other[:19], [5]])
    assert_equals_fresh(model, second, kept, second.forward_token(5))


def test_forks_and_files_of_a_progress_callback_have_the_finished_chunks(
    model: Model, tmp_path: Path
) -> None:
    ids, forks = long_ids(model.device), []
    session = model.session()

    def keep(done: int, total: int) -> None:
        forks.append(session.fork())
        if done == CHUNK:
            session.save(tmp_path / "s.session")

    logits = session.forward_prompt_logits(ids, progress=keep)
    assert [fork.position for fork in forks] == [*range(CHUNK, len(ids), CHUNK), len(ids)]
    for fork in forks:
        assert_equals_fresh(model, fork, np.append(ids[: fork.position], 9), fork.forward_token(9))
    assert_equals_fresh(model, session, ids, logits)
    loaded = model.load_session(tmp_path / "s.session")
    assert_equals_fresh(model, loaded, np.append(ids[:CHUNK], 9), loaded.forward_token(9))


def test_a_stopped_prompt_keeps_its_chunks(model: Model) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 2 * CHUNK:
            raise KeyError(done)

    ids = long_ids(model.device)
    session = model.session()
    with pytest.raises(KeyError):
        session.forward_prompt(ids, progress=stop)
    assert session.position == 2 * CHUNK
    assert_equals_fresh(model, session, ids, session.forward_prompt_logits(ids[2 * CHUNK :]))


def test_a_failed_prompt_restores_the_state(kind: tuple[str, str], tmp_path: Path) -> None:
    """The second chunk fails: a token's embedding is NaN."""
    device, name = kind
    path = write_with_nan(tmp_path / "m.gguf", replace(ALL_KINDS[name].shape, output_type="F32"), 319)
    ids = ids_of(150) % 319
    with Model(path, device=device, chunk_tokens=CHUNK) as model, model.session() as session:
        session.forward_prompt(ids[:70])
        before = contents(session)
        for spoilt in ([*ids[70:], 319], [319], [1, 319]):
            with pytest.raises(NumericalError):
                session.forward_prompt_logits(spoilt)
            assert session.position == 70
            assert contents(session) == before
        assert_equals_fresh(model, session, np.append(ids[:70], 5), session.forward_token(5))
        session.rewind(68)
        logits = session.forward_prompt_logits(ids[68:100])
        assert_equals_fresh(model, session, ids[:100], logits)


def test_unwritten_positions_are_never_read(
    model: Model, kind: tuple[str, str], kind_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages and states are NaN before they are used, and after they were released."""

    def results(model: Model) -> list[Array]:
        with model.session() as first, model.session() as other:
            first.forward_prompt(ids_of(70))
            first.rewind(65)
            with first.fork() as second:
                prompts = [ids_of(3, 1), ids_of(66, 2), ids_of(40, 3)]
                batch = model.forward_batch([first, second, other], prompts, output="logits")
                return [*batch, first.forward_token(3)]

    expected = results(model)
    set_engine_options(monkeypatch, poison_cache=True)
    with opened(*kind, kind_path) as poisoned:
        for _ in range(2):
            np.testing.assert_array_equal(results(poisoned), expected)
    assert np.isfinite(expected).all()


def test_rejected_drafts_restore_the_state_before_them(model: Model) -> None:
    """One of seven drafts is wrong, that at index `wrong`; 7: none."""
    ids = ids_of(66)
    chosen = tokens_alone(model, ids, 8)
    for wrong in some(model, (0, 1, 4, 7)):
        drafts = chosen[:7]
        if wrong < 7:
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        with model.session() as session:
            session.forward_prompt(ids[:60])
            given = choose(session.native, [*ids[60:], *drafts], 7)
            assert given == chosen[: wrong + 1]
            kept = np.array([*ids, *chosen[:wrong]])
            assert_equals_fresh(model, session, np.append(kept, 11), session.forward_token(11))
            assert session.stats()["tokens_recomputed"] == 0


def test_no_snapshot_is_kept_of_rejected_drafts(model: Model) -> None:
    """The pass writes the state at position 64, which is an end of a page, after a wrong draft."""
    ids = ids_of(60)
    session = model.session()
    right = session.forward_prompt(ids)
    wrong = (right + 1) % VOCAB
    choose(session.native, [right, wrong, 1, 2, 3, 4, 5, 6], 7)
    kept = [*ids, *session.tokens[60:]]
    assert len(kept) < 64
    kept += ids_of(30, seed=1).tolist()
    session.forward_prompt(kept[session.position :])
    session.rewind(65)
    assert_equals_fresh(model, session, np.array([*kept[:65], 3]), session.forward_token(3))


@steps_of_both
def test_scores_are_those_of_single_tokens(model: Model) -> None:
    """Every row has an output, in all layers; of a prompt only the last one has."""
    ids = ids_of(70 if model.backend == "cpu" else 34)
    scores = model.score(ids)
    with model.session() as session:
        for i, token in enumerate(ids[:-1]):
            logits = session.forward_token(int(token)).astype(np.float64)
            expected = logits[ids[i + 1]] - np.logaddexp.reduce(logits)
            # On Metal logits of few and of many tokens differ by 1e-3 of the largest, as does their sum.
            bound = 1e-5 if model.backend == "cpu" else 2e-3 * np.abs(logits).max()
            assert scores[i] == pytest.approx(expected, abs=bound)


@steps_of_both
def test_sequences_of_a_batch_are_those_of_single_sessions(model: Model) -> None:
    """Some share a prefix, one was rewound, some are short, and all together fill several passes."""
    ids = ids_of(70)
    prompts = [ids[:n] for n in (64, 70, 5, 1)]
    prompts += [np.append(ids[:50], ids_of(20, seed=3)), ids_of(75, seed=4)]
    sessions = [model.session() for _ in prompts]
    sessions[5].forward_prompt(ids_of(50, seed=4))
    sessions[5].rewind(45)
    taken = [*prompts[:5], prompts[5][45:]]
    logits = model.forward_batch(sessions, taken, output="logits")
    for session, prompt, result in zip(sessions, prompts, logits, strict=True):
        assert_equals_fresh(model, session, prompt, result)
    added = [[7], [7, 8, 9], [7] * 8, [7], [7, 8], [7]]
    logits = model.forward_batch(sessions, added, output="logits")
    for session, prompt, more, result in zip(sessions, prompts, added, logits, strict=True):
        assert_equals_fresh(model, session, np.append(prompt, more), result)


def test_prompts_of_a_batch_compute_their_common_prefix_once(model: Model) -> None:
    """Its last token is within a page, or the first of one."""
    for seed, known in enumerate(some(model, (65, 100))):
        prompts = [np.concatenate([ids_of(known, seed), ids_of(20, 9 + i)]) for i in range(3)]
        sessions = [model.session() for _ in prompts]
        logits = model.forward_batch(sessions, prompts, output="logits", reuse=True)
        for prompt, result in zip(prompts, logits, strict=True):
            assert_same_logits(model, result, fresh(model, prompt)[0])
        assert sorted(session.stats()["tokens_reused"] for session in sessions) == [0, known, known]


def test_scheduled_texts_are_those_of_single_tokens(model: Model) -> None:
    prompts = [ids_of(n, seed=n % 3).tolist() for n in some(model, (5, 71, 70, 130, 33))]
    assert tokens_of_many(model, prompts, 8) == [tokens_alone(model, prompt, 8) for prompt in prompts]


def test_a_later_session_finds_prefixes_at_their_snapshots(model: Model) -> None:
    """Each continues a prefix of its own namespace, which later sessions find unchanged."""
    ids, end = ids_of(150), ids_of(20, seed=1)
    with model.session() as session:
        session.forward_prompt(ids, reuse=True)
    with model.session(prefix_namespace="another") as session:
        session.forward_prompt(ids, reuse=True)
        assert session.stats()["tokens_reused"] == 0
    for known in some(model, (149, 130, 64, 63, 150)):
        reused = known if known == 150 else known - known % interval(model)  # 150: the end of the prompt
        prompt = np.concatenate([ids[:known], end])
        with model.session() as session:
            logits = session.forward_prompt_logits(prompt, reuse=True)
            assert session.stats()["tokens_reused"] == reused
            assert session.stats()["tokens_recomputed"] == known - reused
            assert_equals_fresh(model, session, prompt, logits)


def test_a_saved_session_continues_bit_for_bit(model: Model, tmp_path: Path) -> None:
    """It is saved at its end, after a rewind, and empty."""
    session = model.session()
    session.forward_prompt(ids_of(150))
    for position in (150, 140, 0):
        session.rewind(position)
        session.save(tmp_path / "s.session")
        loaded = model.load_session(tmp_path / "s.session")
        assert loaded.tokens == session.tokens
        assert contents(loaded) == contents(session)
        assert loaded.forward_token(5).tobytes() == session.forward_token(5).tobytes()
        again = 0 if position == 150 else position % interval(model)
        assert loaded.stats()["tokens_recomputed"] == again


# Those whose steps for few tokens differ from those of the models above, in kernels or in their order.
FEW = ("gemma4, wide heads", "qwen3moe", "olmoe", "lfm2moe")


@pytest.mark.parametrize("name", [*KINDS, *STEPS, *FEW])
def test_up_to_eight_tokens_have_the_bits_of_single_ones_on_metal(
    metal: None, tmp_path: Path, name: str
) -> None:
    """They are a prompt of their own, or next to others in a batch."""
    shape = ALL_KINDS[name].shape if name in ALL_KINDS else MODELS[name]
    ids = ids_of(38)
    with Model(write(tmp_path / "m.gguf", shape), device="metal") as model:
        session = model.session()
        session.forward_prompt(ids[:30])
        forks = [session.fork() for _ in range(4)]
        single = [session.forward_token(int(token)) for token in ids[30:]]
        np.testing.assert_array_equal(forks[0].forward_prompt_logits(ids[30:]), single[7])
        batch = model.forward_batch(forks[1:], [ids[30:33], ids[30:31], ids[30:]], output="logits")
        for logits, expected in zip(batch, (single[2], single[0], single[7]), strict=True):
            np.testing.assert_array_equal(logits, expected)
