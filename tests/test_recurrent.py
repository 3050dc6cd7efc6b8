"""States of recurrent layers: a session that was split, rewound, forked or found equals one that was not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.gguf_bytes import ARRAY, BOOL, I32, U32, array, scalar, u32
from support.gguf_mutator import take_apart
from support.reference import ReferenceModel
from support.small_models import MODELS, with_tensor, write

from metal_prefill import (
    GGUFError,
    KVMemoryError,
    MetalPrefillError,
    Model,
    NumericalError,
    Session,
    UnsupportedModelError,
    cli,
)
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import core_config, layer_kind
from metal_prefill.files._model_tensors import ignored_tensors
from metal_prefill.serve._prefix_store import PrefixStore
from metal_prefill.synth import ScanShape

Array = npt.NDArray[Any]

ARCHITECTURES = ("lfm2", "mamba2", "granitehybrid", "falcon-h1", "qwen35")
NAMES = (
    *("lfm2", "lfm2, attention last", "lfm2, four taps, odd dimensions"),
    *("mamba2", "mamba2, three groups, odd dimensions"),
    *("granitehybrid", "granitehybrid, attention last"),
    *("falcon-h1", "falcon-h1, norms in groups"),
    *("qwen35", "qwen35, recurrence last", "qwen35, odd dimensions"),
)
PAGEWISE = ("lfm2", "qwen35")  # states take at most the memory of a page, so that each has a snapshot
LONG = 300  # tokens of five pages
# The state of a layer takes the memory of many pages, and none is written after a draft: 1,100 tokens of 64
# channels, or four matrices of 128 by 128.
_FEW: dict[str, Any] = {"dim": 64, "ffn": 64, "layers": 2, "context": 4096}
_SCAN = ScanShape(inner=512, state=128, heads=4, groups=2, layers=(0,))
LARGE = {
    "lfm2": replace(MODELS["lfm2"], **_FEW, conv_layers=(0,), conv_taps=1101),
    "qwen35": replace(MODELS["qwen35"], **_FEW, scan=_SCAN),
}


def ids_of(n: int, seed: int = 0) -> Array:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 320, n)


@pytest.fixture(params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(device: str, name: str, model_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(model_path(name), device=device, threads=2) as model:
        yield model


def kinds_of(model: Model) -> list[str]:
    return [layer_kind(model.config, layer) for layer in range(model.config.n_layers)]


def page_bytes(model: Model) -> int:
    """K and V in f16 of 64 positions, of the layers with attention."""
    c, attend = model.config, sum("attention" in kind for kind in kinds_of(model))
    return attend * 64 * c.n_kv_heads * (c.key_dim + c.value_dim) * 2


def state_bytes(model: Model) -> int:
    """States of all layers in float32."""
    core = core_config(model.config)
    return sum(4 * core.state_values(layer) for layer in range(model.config.n_layers))


def interval(model: Model) -> int:
    """Positions between snapshots: whole pages that take as much memory, or 16 pages without K and V."""
    page = page_bytes(model)
    return 64 * (-(-state_bytes(model) // page) if page else 16)


def contents(session: Session) -> list[bytes]:
    """K and V of each layer with attention, and the states of the others."""
    return [np.asarray(part).tobytes() for part in session.native.export_state()[1]]


def fresh(model: Model, ids: Sequence[int] | Array) -> tuple[Array, list[bytes]]:
    """Logits and contents of a session that computes the tokens in one call."""
    with model.session() as session:
        return session.forward_prompt_logits(ids), contents(session)


def assert_equals_fresh(model: Model, session: Session, ids: Array, logits: Array) -> None:
    """Compare a session with one that computed the same tokens in one call."""
    expected, parts = fresh(model, ids)
    assert session.tokens == list(ids)
    if model.device.startswith("CPU"):
        np.testing.assert_array_equal(logits, expected)
        assert contents(session) == parts
    else:
        assert np.argmax(logits) == np.argmax(expected)
        np.testing.assert_allclose(logits, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_results_are_bit_identical_for_any_split_and_number_of_threads(
    name: str, kv_dtype: str, model_path: Callable[[str], Path]
) -> None:
    if kv_dtype == "q8_0" and MODELS[name].key_dim % 32:
        pytest.skip("heads that are no blocks")
    outcomes = []
    ids = ids_of(LONG)
    for threads, cuts in [
        (1, [LONG]),
        (2, [LONG]),
        (3, [1, 1, 1, 60, 1, 1, 135, 100]),
        (2, [1] * 10 + [64] + [2] * 113),
    ]:
        with Model(model_path(name), device="cpu", threads=threads, kv_dtype=kv_dtype) as model:
            session = model.session()
            done = 0
            for n in cuts:
                logits = session.forward_prompt_logits(ids[done : done + n])
                done += n
            outcomes.append((logits.tobytes(), contents(session)))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_that_of_the_reference(
    device: str, name: str, model_path: Callable[[str], Path]
) -> None:
    """Inputs of the next convolution, and the matrices of recurrences."""
    path = model_path(name)
    for n in (1, 2, 70):
        ids = ids_of(n)
        expected = ReferenceModel(path).forward(ids)
        with Model(path, device=device, compute="f32", kv_dtype="f32") as model, model.session() as session:
            session.forward_prompt(ids)
            parts = iter(session.native.export_state()[1])
            for layer, kind in enumerate(kinds_of(model)):
                if "attention" in kind:
                    next(parts), next(parts)
                if kind == "attention":
                    continue
                held = np.asarray(next(parts)).view(np.float32)
                last = expected.products[layer][-(model.config.conv_taps - 1) :]
                missing = (model.config.conv_taps - 1 - len(last)) * last.shape[1]  # before the first token
                wanted = np.concatenate(
                    [np.zeros(missing), last.ravel(), expected.states.get(layer, np.zeros(0)).ravel()]
                )
                assert len(held) == len(wanted) == core_config(model.config).state_values(layer)
                error = np.square(held - wanted).sum() / np.square(wanted).sum()
                assert error < (1e-9 if device == "cpu" else 5e-6)


def test_pages_hold_only_layers_with_attention(model: Model) -> None:
    with model.session() as session:
        session.forward_prompt(ids_of(64))
        page, states = page_bytes(model), state_bytes(model)
        assert page < session.stats()["kv_cache_bytes"] <= 1.5 * page + 2 * (states + 4096)


@pytest.mark.parametrize("position", [0, 1, 2, 63, 64, 65, 127, 200, 255, 256, 299])
def test_a_rewound_session_continues_like_a_fresh_one(model: Model, position: int) -> None:
    """Only tokens after the last snapshot are computed again."""
    ids, rest = ids_of(LONG), ids_of(40, seed=1)
    session = model.session()
    session.forward_prompt(ids)
    session.rewind(position)
    logits = session.forward_prompt_logits(rest)
    assert_equals_fresh(model, session, np.concatenate([ids[:position], rest]), logits)
    assert session.stats()["tokens_recomputed"] == position % interval(model)
    session.forward_token(3)
    assert session.stats()["tokens_recomputed"] == 0


def test_repeated_rewinds_discard_later_tokens(model: Model) -> None:
    session = model.session()
    kept: list[int] = []
    for round_, position in enumerate([0, 80, 70, 130, 64, 30]):
        session.rewind(position)
        added = ids_of(90, seed=round_)
        kept = [*kept[:position], *added.tolist()]
        logits = session.forward_prompt_logits(added)
    assert_equals_fresh(model, session, np.array(kept), logits)


def test_single_tokens_after_a_rewind_match_a_fresh_session(model: Model) -> None:
    ids = ids_of(100)
    session = model.session()
    session.forward_prompt(ids)
    for position in (97, 80, 66):
        session.rewind(position)
        logits = session.forward_token(int(ids[position]))
        assert_equals_fresh(model, session, ids[: position + 1], logits)


def test_a_fork_and_its_origin_do_not_see_each_other(model: Model) -> None:
    ids, one, other = ids_of(100), ids_of(30, seed=1), ids_of(30, seed=2)
    session = model.session()
    session.forward_prompt(ids)
    fork = session.fork()
    logits = session.forward_prompt_logits(one)
    of_fork = fork.forward_prompt_logits(other)
    assert_equals_fresh(model, session, np.concatenate([ids, one]), logits)
    assert_equals_fresh(model, fork, np.concatenate([ids, other]), of_fork)
    again = fork.fork()
    again.rewind(90)
    session.close()
    fork.close()
    assert_equals_fresh(model, again, np.append(ids[:90], 5), again.forward_token(5))


def test_a_fork_in_a_progress_callback_has_the_finished_chunks(
    device: str, name: str, model_path: Callable[[str], Path]
) -> None:
    ids, forks = ids_of(LONG), []
    with Model(model_path(name), device=device, chunk_tokens=64) as model:
        session = model.session()
        logits = session.forward_prompt_logits(ids, progress=lambda done, total: forks.append(session.fork()))
        assert [fork.position for fork in forks] == [64, 128, 192, 256, 300]
        for fork in forks:
            assert_equals_fresh(model, fork, np.append(ids[: fork.position], 9), fork.forward_token(9))
        assert_equals_fresh(model, session, ids, logits)


def test_a_stopped_prompt_keeps_its_chunks(device: str, name: str, model_path: Callable[[str], Path]) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 128:
            raise KeyError(done)

    ids = ids_of(LONG)
    with Model(model_path(name), device=device, chunk_tokens=64) as model:
        session = model.session()
        with pytest.raises(KeyError):
            session.forward_prompt(ids, progress=stop)
        assert session.position == 128
        assert_equals_fresh(model, session, ids, session.forward_prompt_logits(ids[128:]))


def test_reuse_continues_from_its_own_snapshots(model: Model) -> None:
    ids, end = ids_of(LONG), ids_of(50, seed=1)
    session = model.session()
    session.forward_prompt(ids)
    prompt = np.concatenate([ids[:250], end])
    logits = session.forward_prompt_logits(prompt, reuse=True)
    again = 250 % interval(model)
    assert (session.stats()["tokens_reused"], session.stats()["tokens_recomputed"]) == (250 - again, again)
    assert_equals_fresh(model, session, prompt, logits)
    longer = np.append(prompt, ids_of(3, seed=2))  # a turn of a chat: nothing is recomputed
    logits = session.forward_prompt_logits(longer, reuse=True)
    assert (session.stats()["tokens_reused"], session.stats()["tokens_recomputed"]) == (300, 0)
    assert_equals_fresh(model, session, longer, logits)


def test_a_later_session_finds_prefixes_at_their_snapshots(model: Model) -> None:
    ids, end = ids_of(200), ids_of(50, seed=1)
    with model.session() as session:
        session.forward_prompt(ids, reuse=True)
    for known in (200, 199, 130, 64, 63):
        reused = known if known == 200 else known - known % interval(model)  # 200: the end of the prompt
        prompt = np.concatenate([ids[:known], end])
        with model.session() as session:
            logits = session.forward_prompt_logits(prompt, reuse=True)
            assert session.stats()["tokens_reused"] == reused
            assert session.stats()["tokens_recomputed"] == known - reused
            assert_equals_fresh(model, session, prompt, logits)


def test_a_shared_prefix_is_not_overwritten(model: Model) -> None:
    ids = ids_of(150)
    with model.session() as session:
        session.forward_prompt(ids, reuse=True)
    for seed in (1, 2, 3):
        prompt = np.concatenate([ids[:140], ids_of(100, seed=seed)])
        with model.session() as session:
            assert_equals_fresh(model, session, prompt, session.forward_prompt_logits(prompt, reuse=True))
    with model.session() as session:
        logits = session.forward_prompt_logits(np.append(ids, 7), reuse=True)
        assert session.stats()["tokens_reused"] == 150
        assert_equals_fresh(model, session, np.append(ids, 7), logits)


def test_a_namespace_does_not_see_the_states_of_another(model: Model) -> None:
    ids = ids_of(200)
    with model.session(prefix_namespace="a") as session:
        session.forward_prompt(ids, reuse=True)
    with model.session(prefix_namespace="b") as session:
        session.forward_prompt(ids, reuse=True)
        assert session.stats()["tokens_reused"] == 0


@pytest.mark.parametrize("wrong", range(8))
def test_rejected_drafts_restore_the_state_before_them(model: Model, wrong: int) -> None:
    """Seven drafts, of which the one at this index is wrong; 7: none."""
    ids = ids_of(66)
    with model.session() as session:
        chosen = [session.forward_prompt(ids)]
        for _ in range(7):
            chosen.append(session.forward_token_greedy(chosen[-1]))
    drafts = chosen[:7]
    if wrong < 7:
        drafts[wrong] = (drafts[wrong] + 1) % 320
    session = model.session()
    session.forward_prompt(ids[:60])
    given = session.native.forward_drafts(np.array([*ids[60:], *drafts], np.int32), 7, None)
    assert given == chosen[: wrong + 1]
    kept = np.array([*ids, *chosen[:wrong]])
    assert_equals_fresh(model, session, np.append(kept, 11), session.forward_token(11))
    assert session.stats()["tokens_recomputed"] == 0


def test_no_snapshot_is_kept_of_rejected_drafts(model: Model) -> None:
    """The pass writes the state at position 64, which is an end of a page, after a wrong draft."""
    ids = ids_of(60)
    session = model.session()
    right = session.forward_prompt(ids)
    wrong = (right + 1) % 320
    session.native.forward_drafts(np.array([right, wrong, 1, 2, 3, 4, 5, 6], np.int32), 7, None)
    kept = [*ids, *session.tokens[60:]]
    assert len(kept) < 64
    kept += ids_of(30, seed=1).tolist()
    session.forward_prompt(kept[session.position :])
    session.rewind(65)
    assert_equals_fresh(model, session, np.array([*kept[:65], 3]), session.forward_token(3))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_speculation_does_not_change_the_text(model: Model, options: dict[str, Any]) -> None:
    prompt = np.tile(ids_of(7), 9)

    def text(speculate: Any) -> tuple[list[int], list[int]]:
        with model.session() as session:
            pieces = list(session.stream(prompt, 40, speculate=speculate, **options))
            return [piece.token for piece in pieces], session.tokens

    expected = text("off")
    made = [*prompt.tolist(), *expected[0]]
    assert text("lookup") == expected
    assert text(lambda ids: [*made[len(ids) : len(ids) + 3], 5]) == expected


@pytest.fixture(scope="module", params=LARGE)
def large_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("large") / "large.gguf", LARGE[request.param])


def test_large_states_are_recomputed_after_rejected_drafts(device: str, large_path: Path) -> None:
    ids = ids_of(30)
    with Model(large_path, device=device) as model, model.session() as session:
        right = session.forward_prompt(ids)
        session.rewind(29)
        assert (
            session.native.forward_drafts(
                np.array([ids[29], right, (right + 1) % 320, 5], np.int32), 3, None
            )[0]
            == right
        )
        position = session.position
        logits = session.forward_token(7)
        assert session.stats()["tokens_recomputed"] == position - 29
        assert_equals_fresh(model, session, np.append([*ids, right][:position], 7), logits)


def test_the_distance_of_snapshots_follows_from_the_size_of_a_state(device: str, large_path: Path) -> None:
    """Snapshots are as many pages apart as take the memory of a state."""
    ids = ids_of(2600)
    with Model(large_path, device=device) as model, model.session() as session:
        session.forward_prompt(ids)
        page = page_bytes(model)
        distance = 64 * -(-(1100 * 64 * 4) // page)
        for position in (2599, 2 * distance, 2 * distance - 1):
            session.rewind(position)
            session.forward_token(int(ids[position]))
            assert session.stats()["tokens_recomputed"] == position % distance
        assert session.stats()["kv_cache_bytes"] < 3 * page * 2600 / 64


def test_without_pages_snapshots_are_1024_positions_apart(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", replace(MODELS["mamba2"], layers=1, context=4096))
    ids = ids_of(2300)
    with Model(path, device=device) as model, model.session() as session:
        session.forward_prompt(ids)
        for position in (2299, 2048, 1500, 1023):
            session.rewind(position)
            logits = session.forward_token(int(ids[position]))
            assert session.stats()["tokens_recomputed"] == position % 1024
            assert_equals_fresh(model, session, ids[: position + 1], logits)
        assert session.stats()["kv_cache_bytes"] < 64 * 20 + 4 * (state_bytes(model) + 4096)


def test_a_saved_session_continues_bit_for_bit(model: Model, tmp_path: Path) -> None:
    ids = ids_of(150)
    session = model.session()
    session.forward_prompt(ids)
    session.save(tmp_path / "s.session")
    loaded = model.load_session(tmp_path / "s.session")
    assert loaded.tokens == session.tokens
    assert contents(loaded) == contents(session)
    assert loaded.forward_token(5).tobytes() == session.forward_token(5).tobytes()
    assert loaded.stats()["tokens_recomputed"] == 0


def test_a_session_saved_after_a_rewind_recomputes_the_rest(model: Model, tmp_path: Path) -> None:
    ids = ids_of(150)
    session = model.session()
    session.forward_prompt(ids)
    session.rewind(140)
    session.save(tmp_path / "s.session")
    loaded = model.load_session(tmp_path / "s.session")
    assert loaded.position == 140
    assert_equals_fresh(model, loaded, np.append(ids[:140], 5), loaded.forward_token(5))
    assert loaded.stats()["tokens_recomputed"] == 140 % interval(model)
    empty = model.session()
    empty.save(tmp_path / "empty.session")
    empty = model.load_session(tmp_path / "empty.session")
    assert_equals_fresh(model, empty, ids, empty.forward_prompt_logits(ids))


@pytest.mark.parametrize("name", PAGEWISE)
def test_a_prefix_stored_on_disk_continues_from_its_state(
    name: str, device: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    shared = ids_of(140)
    prompts = [np.append(shared, ids_of(20, seed=seed)).astype(np.int32) for seed in (1, 2, 3)]
    for prompt in prompts[:2]:
        with Model(model_path(name), device=device) as model:
            store = PrefixStore(model, tmp_path, 1 << 30)
            for known in prompts[:2]:
                with model.session() as session:
                    session.forward_prompt(known, reuse=True)
                store.note(known)
            store.close()
            assert store.saved == (1 if prompt is prompts[0] else 0)
    with Model(model_path(name), device=device) as model:
        store = PrefixStore(model, tmp_path, 1 << 30)
        store.load(prompts[2])
        assert store.loaded == 1
        with model.session() as session:
            logits = session.forward_prompt_logits(prompts[2], reuse=True)
            assert session.stats()["tokens_reused"] == 128
            assert_equals_fresh(model, session, prompts[2], logits)
        store.close()


def test_devices_continue_each_others_sessions(
    metal: None, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in NAMES:
        models = [Model(model_path(name), device=device, compute="f32") for device in ("cpu", "metal")]
        ids = ids_of(90)
        for first, second in (models, models[::-1]):
            session = first.session()
            session.forward_prompt(ids)
            session.save(tmp_path / "s.session")
            logits = second.load_session(tmp_path / "s.session").forward_token(3)
            expected = session.forward_token(3)
            np.testing.assert_allclose(logits, expected, atol=2e-3 * np.abs(expected).max())


def test_sequences_of_a_batch_are_bit_identical_to_single_ones(model: Model) -> None:
    """Some share a prefix, one was rewound, some are short."""
    ids = ids_of(LONG)
    prompts = [ids[:n] for n in (130, 131, 5, 1, 200)]
    prompts += [np.append(ids[:100], ids_of(40, seed=3)), ids_of(115, seed=4)]
    sessions = [model.session() for _ in prompts]
    sessions[6].forward_prompt(ids_of(50, seed=4))
    sessions[6].rewind(45)
    taken = [*prompts[:6], prompts[6][45:]]
    logits = model.forward_batch(sessions, taken, output="logits")
    for session, prompt, result in zip(sessions, prompts, logits, strict=True):
        assert_equals_fresh(model, session, prompt, result)
    logits = model.forward_batch(sessions, [[7]] * len(sessions), output="logits")
    for session, prompt, result in zip(sessions, prompts, logits, strict=True):
        assert_equals_fresh(model, session, np.append(prompt, 7), result)


def test_prompts_of_a_batch_compute_their_common_prefix_once(model: Model) -> None:
    ids = ids_of(150)
    prompts = [np.concatenate([ids[:100], ids_of(20, seed=seed)]) for seed in range(4)]
    logits = model.forward_prompts(prompts, return_logits=True)
    for prompt, result in zip(prompts, logits, strict=True):
        expected, _ = fresh(model, prompt)
        if model.device.startswith("CPU"):
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, atol=1e-3 * np.abs(expected).max())


def test_beams_match_single_sessions(model: Model) -> None:
    beams = model.generate_beams(ids_of(70).tolist(), 6, num_beams=3)
    for beam in beams:
        with model.session() as session:
            total = session.score([*ids_of(70), *beam.tokens])[69:]
        assert beam.logprob == pytest.approx(total.sum(), rel=1e-3)


def test_a_failed_prompt_restores_the_state(device: str, name: str, tmp_path: Path) -> None:
    """The second chunk fails: a token's embedding is NaN."""
    shape = replace(MODELS[name], embedding="F32", output="F32")
    plain = write(tmp_path / "plain.gguf", shape)

    def spoil(values: Array) -> None:
        values.reshape(shape.vocab, shape.dim)[319] = np.nan

    path = with_tensor(tmp_path / "nan.gguf", plain, "token_embd.weight", spoil)
    ids = ids_of(LONG) % 319
    with Model(path, device=device, chunk_tokens=64) as model, model.session() as session:
        session.forward_prompt(ids[:70])
        before = contents(session)
        for spoilt in ([*ids[70:200], 319], [319], [1, 319]):
            with pytest.raises(NumericalError):
                session.forward_prompt_logits(spoilt)
            assert session.position == 70
            assert contents(session) == before
        assert_equals_fresh(model, session, np.append(ids[:70], 5), session.forward_token(5))
        session.rewind(68)
        logits = session.forward_prompt_logits(ids[68:100])
        assert_equals_fresh(model, session, ids[:100], logits)


@pytest.mark.parametrize(("name", "slots"), [("lfm2", 4), ("qwen35", 6)])
def test_snapshots_are_evicted_if_memory_is_short(
    name: str, slots: int, device: str, model_path: Callable[[str], Path]
) -> None:
    """Three prompts of four pages fit; snapshots do not fit with them, and more is computed again."""
    ids = [ids_of(250, seed=seed) for seed in range(3)]
    with Model(model_path(name), device=device, prefix_memory=0) as model:
        page = page_bytes(model)
        limit = int(12 * page * 1.1) + slots * state_bytes(model)
        sessions = [model.session() for _ in ids]
        for session, prompt in zip(sessions, ids, strict=True):
            session.forward_prompt(prompt)
        assert model.stats()["kv_pool_bytes"] > limit
        expected = [fresh(model, np.append(prompt[:200], 5))[0] for prompt in ids]
    with Model(model_path(name), device=device, kv_memory=limit, prefix_memory=0) as model:
        sessions = [model.session() for _ in ids]
        for session, prompt in zip(sessions, ids, strict=True):
            session.forward_prompt(prompt)
        assert model.stats()["kv_pool_bytes"] <= limit
        for session, wanted in zip(sessions, expected, strict=True):
            session.rewind(200)
            logits = session.forward_token(5)
            bound = 0 if device == "cpu" else 1e-3 * np.abs(wanted).max()
            np.testing.assert_allclose(logits, wanted, atol=bound)
        one_more = model.session()
        with pytest.raises(KVMemoryError, match="kv_memory"):
            one_more.forward_prompt(ids_of(900))
        for session in sessions:
            assert session.position == 201


def test_closed_sessions_release_their_states(model: Model) -> None:
    with model.session() as session, session.fork() as fork:
        session.forward_prompt(ids_of(200))
        fork.forward_prompt(ids_of(100))
        session.rewind(100)
    assert model.stats()["kv_pool_bytes"] == 0
    with model.session() as session:
        session.forward_prompt(ids_of(200), reuse=True)
    stats = model.stats()
    assert stats["kv_pool_bytes"] == stats["prefix_bytes"] > 0


def changed(path: Path, whole: Path, key: str, kind: int, value: bytes) -> Path:
    """Write a copy of a file with another value of a key, or without the key if there is no value."""
    parts = take_apart(whole)
    (architecture,) = (held[8:] for name, _, held in parts.metadata if name == b"general.architecture")
    full = architecture + b"." + key.encode()
    parts.metadata = [
        (name, kind if name == full else own, value if name == full else held)
        for name, own, held in parts.metadata
        if value or name != full
    ]
    path.write_bytes(parts.assemble())
    return path


def heads_of_layers(*counts: int) -> bytes:
    return array(I32, [scalar(I32, count) for count in counts])


LFM2_ERRORS: list[tuple[str, int, bytes, type[Exception], str]] = [
    ("shortconv.l_cache", U32, b"", GGUFError, r"metadata lfm2\.shortconv\.l_cache is missing"),
    ("shortconv.l_cache", U32, u32(0), GGUFError, r"l_cache is 0, must be between 1 and"),
    ("shortconv.l_cache", U32, u32(1), GGUFError, r"l_cache is 1, must be at least 2"),
    (
        "shortconv.l_cache",
        U32,
        u32(4),
        GGUFError,
        r"shortconv\.conv\.weight has shape \(128, 3\), .*\(128, 4\)",
    ),
    ("shortconv.l_cache", U32, u32(2**31 - 1), GGUFError, r"has shape \(128, 3\), .*2147483647"),
    ("shortconv.l_cache", U32, u32(2**32 - 1), GGUFError, r"l_cache is 4294967295, must be between"),
    (
        "embedding_length",
        U32,
        u32(2**30),
        GGUFError,
        r"embedding_length 1073741824 is more than 715827882",
    ),
    (
        "attention.head_count_kv",
        ARRAY,
        heads_of_layers(0, 0, 0, 0),
        UnsupportedModelError,
        "none has attention",
    ),
    (
        "attention.head_count_kv",
        ARRAY,
        heads_of_layers(0, 2, 4, 0),
        UnsupportedModelError,
        "differs between",
    ),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 2), GGUFError, "lists 2 values for 4 layers"),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 0, -2, 0), GGUFError, "is -2, must be between"),
    ("attention.head_count_kv", ARRAY, heads_of_layers(0, 0, 3, 0), GGUFError, "4 is not a multiple of"),
    (
        "attention.head_count_kv",
        ARRAY,
        heads_of_layers(2, 0, 2, 0),
        GGUFError,
        r"blk\.0\.attn_q\.weight is missing",
    ),
    ("attention.head_count_kv", U32, u32(2), GGUFError, r"blk\.0\.attn_q\.weight is missing"),
]
QWEN35_ERRORS: list[tuple[str, int, bytes, type[Exception], str]] = [
    ("ssm.conv_kernel", U32, b"", GGUFError, r"metadata qwen35\.ssm\.conv_kernel is missing"),
    ("ssm.conv_kernel", U32, u32(1), GGUFError, r"conv_kernel is 1, must be at least 2"),
    ("ssm.conv_kernel", U32, u32(3), GGUFError, r"ssm_conv1d\.weight has shape \(128, 4\), .*\(128, 3\)"),
    ("ssm.time_step_rank", U32, u32(0), GGUFError, "time_step_rank is 0, must be between 1"),
    ("ssm.time_step_rank", U32, u32(3), GGUFError, "inner_size 64 is not a multiple of .*time_step_rank 3"),
    ("ssm.group_count", U32, u32(3), GGUFError, "time_step_rank 2 is not a multiple of .*group_count 3"),
    ("ssm.state_size", U32, u32(2**31 - 1), GGUFError, "more than 2147483647 rows"),
    ("ssm.state_size", U32, u32(16), GGUFError, r"attn_qkv\.weight has shape \(128, 96\), .*\(96, 96\)"),
    ("full_attention_interval", U32, u32(5), UnsupportedModelError, "no layer has attention"),
    ("full_attention_interval", U32, u32(2), GGUFError, r"blk\.1\.attn_q\.weight is missing"),
    ("attention.value_length", U32, u32(32), UnsupportedModelError, "32 differs from .*key_length 64"),
]


@pytest.mark.parametrize(
    ("name", "key", "kind", "value", "error", "message"),
    [
        (name, *case)
        for name, cases in zip(("lfm2", "qwen35"), (LFM2_ERRORS, QWEN35_ERRORS), strict=True)
        for case in cases
    ],
)
def test_a_contradictory_file_is_rejected(
    tmp_path: Path,
    model_path: Callable[[str], Path],
    name: str,
    key: str,
    kind: int,
    value: bytes,
    error: type[Exception],
    message: str,
) -> None:
    path = changed(tmp_path / "m.gguf", model_path(name), key, kind, value)
    with pytest.raises(error, match=message):
        Model(path, device="cpu")


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("conv_kernel", U32, b"", r"metadata granitehybrid\.ssm\.conv_kernel is missing"),
        ("conv_kernel", U32, u32(1), r"ssm\.conv_kernel is 1, must be at least 2"),
        ("conv_kernel", U32, u32(3), r"ssm_conv1d\.weight has shape \(320, 4\), .*\(320, 3\)"),
        ("inner_size", U32, u32(0), r"inner_size is 0, must be between 1 and"),
        ("inner_size", U32, u32(257), r"inner_size 257 is not a multiple of .*time_step_rank 8"),
        ("inner_size", U32, u32(264), r"blk\.0\.ssm_in\.weight has shape \(584, 128\), .*\(600, 128\)"),
        ("inner_size", U32, u32(2**31 - 8), r"ssm\.inner_size 2147483640, .*more than 2147483647 rows"),
        ("state_size", U32, u32(2**31 - 1), r"state_size 2147483647 .*more than 2147483647 rows"),
        ("group_count", U32, u32(3), r"time_step_rank 8 is not a multiple of .*group_count 3"),
        ("group_count", U32, u32(2), r"has shape \(584, 128\), .*\(648, 128\)"),
        ("time_step_rank", U32, u32(4), r"blk\.0\.ssm_in\.weight has shape"),
    ],
)
def test_a_state_space_layer_that_contradicts_itself_is_rejected(
    tmp_path: Path, model_path: Callable[[str], Path], key: str, kind: int, value: bytes, message: str
) -> None:
    whole = model_path("granitehybrid")
    path = changed(tmp_path / "m.gguf", whole, f"ssm.{key}", kind, value)
    with pytest.raises(GGUFError, match=message):
        Model(path, device="cpu")


def test_experts_are_rejected_by_name(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    parts = take_apart(model_path("granitehybrid"))
    parts.metadata.append((b"granitehybrid.expert_count", U32, u32(8)))
    (tmp_path / "m.gguf").write_bytes(parts.assemble())
    with pytest.raises(UnsupportedModelError, match=r"granitehybrid\.expert_count = 8 is not supported"):
        Model(tmp_path / "m.gguf", device="cpu")


def test_a_hybrid_whose_metadata_say_so_rotates(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    """Files of Bamba do, those of Granite 4 do not."""
    whole, key = model_path("granitehybrid"), "rope.scaling.finetuned"
    logits: list[Array] = []
    for value in (b"\0", b"\1", b""):  # without the key, layers rotate
        path = changed(tmp_path / f"{len(logits)}.gguf", whole, key, BOOL, value)
        ids = ids_of(20)
        with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
            found = model.forward_prompt_logits(ids)
            logits.append(found)
            expected = ReferenceModel(path).forward(ids).logits[-1]
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(logits[0] - logits[1]).max() > 1e-3 * np.abs(logits[0]).max()
    np.testing.assert_array_equal(logits[1], logits[2])


@pytest.mark.parametrize("name", PAGEWISE)
def test_a_filter_of_another_type_is_rejected(
    name: str, tmp_path: Path, model_path: Callable[[str], Path]
) -> None:
    tensor = {"lfm2": "blk.0.shortconv.conv.weight", "qwen35": "blk.0.ssm_conv1d.weight"}[name]
    parts = take_apart(model_path(name))
    parts.tensors = [
        (own, dims, 1 if own == tensor else kind, offset) for own, dims, kind, offset in parts.tensors
    ]
    (tmp_path / "m.gguf").write_bytes(parts.assemble())
    with pytest.raises(MetalPrefillError, match=re.escape(tensor)):
        Model(tmp_path / "m.gguf", device="cpu")


def test_layers_with_attention_may_be_listed(tmp_path: Path) -> None:
    """Attention is in the first and the last layer, which no interval describes."""
    qwen = MODELS["qwen35"]
    assert qwen.scan is not None
    shape = replace(qwen, scan=replace(qwen.scan, layers=(1, 2)))
    path = write(tmp_path / "m.gguf", shape)
    ids = ids_of(70)
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
        kinds = ("attention", "gated_delta", "gated_delta", "attention")
        assert model.config.layer_kinds == kinds
        expected = ReferenceModel(path).forward(ids).logits[-1]
        np.testing.assert_allclose(
            model.session().forward_prompt_logits(ids), expected, atol=1e-5 * np.abs(expected).max()
        )


@pytest.mark.parametrize("counted", [False, True], ids=["own names", "as another block"])
def test_tensors_of_multi_token_prediction_and_vision_are_ignored(
    tmp_path: Path, model_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str], counted: bool
) -> None:
    whole = model_path("qwen35")
    parts = take_apart(whole)
    (norm,) = (t for t in parts.tensors if t[0] == "output_norm.weight")
    if counted:
        extra = {
            "blk.4.nextn.enorm.weight": "multi-token prediction",
            "blk.4.attn_norm.weight": "multi-token prediction",
        }
        parts.metadata = [
            (key, kind, u32(5) if key == b"qwen35.block_count" else value)
            for key, kind, value in parts.metadata
        ]
        parts.metadata.append((b"qwen35.nextn_predict_layers", U32, u32(1)))
    else:
        extra = {"mtp.norm.weight": "multi-token prediction", "v.blk.0.ln1.weight": "vision"}
    for name in extra:
        parts.tensors.append((name, *norm[1:3], len(parts.data)))
        parts.data += parts.data[norm[3] :][: 4 * norm[1][0]]
    path = tmp_path / "m.gguf"
    path.write_bytes(parts.assemble())
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        assert config.n_layers == 4
        assert ignored_tensors(gguf, config) == extra
    assert cli.main(["info", "-m", str(path)]) == 0
    out = capsys.readouterr().out
    for purpose, count in Counter(extra.values()).items():
        assert f"{count} tensors for {purpose} are ignored" in out
    with Model(path, device="cpu") as model, Model(whole, device="cpu") as plain:
        ids = ids_of(40)
        found, expected = (m.session().forward_prompt_logits(ids) for m in (model, plain))
        np.testing.assert_array_equal(found, expected)


def test_scheduled_texts_match_single_ones(model: Model) -> None:
    prompts = [ids_of(n, seed=n % 3).tolist() for n in (5, 90, 91, 140, 33)]

    def texts(of: list[list[int]]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in of]
        for index, piece in model.stream_many(of, 12):
            assert not isinstance(piece, Exception)
            found[index].append(piece.token)
        return found

    together = texts(prompts)
    for prompt, text in zip(prompts, together, strict=True):
        assert texts([prompt]) == [text]
