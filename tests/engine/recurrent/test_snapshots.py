"""Snapshots of recurrent layers: sessions that reuse prefixes or were saved equal fresh ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.recurrent import (
    NAMES,
    PAGEWISE,
    assert_equals_fresh,
    contents,
    fresh,
    ids_of,
    interval,
    long_ids,
    page_bytes,
    state_bytes,
)
from support.saved_sessions import rewrite
from support.small_models import MODELS, write

from metal_prefill import KVMemoryError, Model, StateError
from metal_prefill.serve._prefix_store import PrefixStore


def test_reuse_continues_from_its_own_snapshots(model: Model) -> None:
    ids, end = long_ids(model.device), ids_of(50, seed=1)
    known = len(ids) - 50
    session = model.session()
    session.forward_prompt(ids)
    prompt = np.concatenate([ids[:known], end])
    logits = session.forward_prompt_logits(prompt, reuse=True)
    again = known % interval(model)
    assert (session.stats()["tokens_reused"], session.stats()["tokens_recomputed"]) == (known - again, again)
    assert_equals_fresh(model, session, prompt, logits)
    longer = np.append(prompt, ids_of(3, seed=2))  # a turn of a chat: nothing is recomputed
    logits = session.forward_prompt_logits(longer, reuse=True)
    assert (session.stats()["tokens_reused"], session.stats()["tokens_recomputed"]) == (len(ids), 0)
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


@pytest.mark.parametrize("states", [1, 4, 13])
def test_a_growing_conversation_is_computed_once_while_its_prefix_fits(large_path: Path, states: int) -> None:
    """States at the ends of earlier turns take no memory from later ones."""
    with Model(large_path, device="cpu", threads=1) as model:
        page, state, distance = page_bytes(model), state_bytes(model), interval(model)
    turns, tokens = 25, 40
    pages = turns * tokens // 64 + 1
    room = pages * page + (turns * tokens // distance + states) * state
    ids = ids_of(turns * tokens)
    with Model(large_path, device="cpu", threads=1, prefix_memory=room) as model:
        for turn in range(1, turns + 1):
            with model.session() as session:
                session.forward_prompt(ids[: turn * tokens], reuse=True)
                assert session.stats()["tokens_reused"] == (turn - 1) * tokens


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


def test_the_distance_of_snapshots_follows_from_the_size_of_a_state(device: str, large_path: Path) -> None:
    """Snapshots are as many pages apart as take the memory of a state."""
    ids = ids_of(680)
    with Model(large_path, device=device) as model, model.session() as session:
        session.forward_prompt(ids)
        page = page_bytes(model)
        distance = 64 * -(-(1100 * 64 * 4) // page)
        for position in (679, 2 * distance, 2 * distance - 1):
            session.rewind(position)
            session.forward_token(int(ids[position]))
            assert session.stats()["tokens_recomputed"] == position % distance
        assert session.stats()["kv_cache_bytes"] < 3 * page * 680 / 64


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
    name: str, device: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    shared = ids_of(140)
    prompts = [np.append(shared, ids_of(20, seed=seed)).astype(np.int32) for seed in (1, 2, 3)]
    for prompt in prompts[:2]:
        with Model(tiny_path(name), device=device) as model:
            store = PrefixStore(model.engine, tmp_path, 1 << 30)
            for known in prompts[:2]:
                with model.session() as session:
                    session.forward_prompt(known, reuse=True)
                store.note(known)
            store.close()
            assert store.saved == (1 if prompt is prompts[0] else 0)
    with Model(tiny_path(name), device=device) as model:
        store = PrefixStore(model.engine, tmp_path, 1 << 30)
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


@pytest.mark.parametrize(("name", "slots"), [("lfm2", 4), ("qwen35", 6)])
def test_snapshots_are_evicted_if_memory_is_short(
    name: str, slots: int, device: str, model_path: Callable[[str], Path]
) -> None:
    """Three prompts of four pages fit; snapshots do not fit as well, so more tokens are recomputed."""
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


@pytest.mark.parametrize("cached", [-1, 6])
def test_a_file_with_states_of_other_tokens_is_rejected(
    cached: int, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without K and V, the number of tokens whose states a file has is a tensor of its own."""
    path = tmp_path / "s.session"
    with Model(model_path("mamba2"), device="cpu") as model:
        with model.session() as session:
            session.forward_prompt(ids_of(5))
            session.save(path)
        rewrite(path, arrays={"computed": np.array([cached], np.int32)})
        with pytest.raises(StateError, match=f"states of {cached} tokens, and 5 tokens"):
            model.load_session(path)
