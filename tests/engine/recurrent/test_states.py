"""States of recurrent layers: their values, their memory, and the distances of their snapshots."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.engine_options import set_engine_options
from support.kinds import assert_equals_fresh, assert_same, fresh, ids_of
from support.native_requests import choose
from support.recurrent import ARCHITECTURES, LARGE, PAGEWISE, interval, page_bytes, state_bytes
from support.small_models import MODELS, write
from support.threads import at_once
from support.tiny_models import TINY_RECURRENT

from metal_prefill import KVMemoryError, Model
from metal_prefill.serve._prefix_store import PrefixStore


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the tiny model of each architecture once."""
    folder = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: write(folder / f"{name}.gguf", TINY_RECURRENT[name]))


@pytest.fixture(scope="module", params=LARGE)
def large_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose states are larger than its pages."""
    return write(tmp_path_factory.mktemp("large") / "large.gguf", LARGE[request.param])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pages_hold_only_layers_with_attention(
    device: str, name: str, tiny_path: Callable[[str], Path]
) -> None:
    with Model(tiny_path(name), device=device) as model, model.session() as session:
        session.forward_prompt(ids_of(64))
        page, states = page_bytes(model), state_bytes(model)
        assert page < session.stats()["kv_cache_bytes"] <= 1.5 * page + 2 * (states + 4096)


def test_large_states_are_recomputed_after_rejected_drafts(device: str, large_path: Path) -> None:
    ids = ids_of(30)
    with Model(large_path, device=device) as model, model.session() as session:
        right = session.forward_prompt(ids)
        session.rewind(29)
        assert choose(session.native, [ids[29], right, (right + 1) % 320, 5], 3)[0] == right
        position = session.position
        logits = session.forward_token(7)
        assert session.stats()["tokens_recomputed"] == position - 29
        assert_equals_fresh(model, session, np.append([*ids, right][:position], 7), logits)


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


def test_the_distance_of_snapshots_follows_from_the_size_of_a_state(large_path: Path) -> None:
    """The pages between two snapshots take about as much memory as a snapshot."""
    ids = ids_of(680)
    with Model(large_path, device="cpu") as model, model.session() as session:
        session.forward_prompt(ids)
        page = page_bytes(model)
        distance = 64 * -(-(1100 * 64 * 4) // page)
        for position in (679, 2 * distance, 2 * distance - 1):
            session.rewind(position)
            session.forward_token(int(ids[position]))
            assert session.stats()["tokens_recomputed"] == position % distance
        assert session.stats()["kv_cache_bytes"] < 3 * page * 680 / 64


def test_without_pages_snapshots_are_1024_positions_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", replace(MODELS["mamba2"], layers=1, context=4096))
    ids = ids_of(2300)
    with Model(path, device="cpu") as model, model.session() as session:
        session.forward_prompt(ids)
        for position in (2299, 2048, 1500, 1023):
            session.rewind(position)
            logits = session.forward_token(int(ids[position]))
            assert session.stats()["tokens_recomputed"] == position % 1024
            assert_equals_fresh(model, session, ids[: position + 1], logits)
        assert session.stats()["kv_cache_bytes"] < 64 * 20 + 4 * (state_bytes(model) + 4096)


@pytest.mark.parametrize("name", PAGEWISE)
def test_a_prefix_stored_on_disk_continues_from_its_state(
    name: str, device: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    shared = ids_of(140)
    prompts = [np.append(shared, ids_of(20, seed=seed)).astype(np.int32) for seed in (1, 2, 3)]
    for _ in range(2):
        with Model(tiny_path(name), device=device) as model:
            store = PrefixStore(model.engine, tmp_path, 1 << 30)
            for known in prompts[:2]:
                with model.session() as session:
                    session.forward_prompt(known, reuse=True)
                store.note(known)
            store.close()
        assert len(list(tmp_path.glob("*/*.session"))) == 1
    with Model(tiny_path(name), device=device) as model:
        store = PrefixStore(model.engine, tmp_path, 1 << 30)
        store.load(prompts[2])
        with model.session() as session:
            logits = session.forward_prompt_logits(prompts[2], reuse=True)
            assert session.stats()["tokens_reused"] == 128
            assert_equals_fresh(model, session, prompts[2], logits)
        store.close()


def test_devices_continue_each_others_sessions(
    metal: None, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("values wider than keys", *ARCHITECTURES):
        models = [Model(model_path(name), device=device, compute="f32") for device in ("cpu", "metal")]
        ids = ids_of(90)
        for first, second in (models, models[::-1]):
            session = first.session()
            session.forward_prompt(ids)
            session.save(tmp_path / "s.session")
            logits = second.load_session(tmp_path / "s.session").forward_token(3)
            expected = session.forward_token(3)
            np.testing.assert_allclose(logits, expected, atol=2e-3 * np.abs(expected).max())


def test_snapshots_are_evicted_if_memory_is_short(device: str, tiny_path: Callable[[str], Path]) -> None:
    """Three prompts of four pages fit; snapshots do not fit as well, so more tokens are recomputed."""
    ids = [ids_of(250, seed=seed) for seed in range(3)]
    with Model(tiny_path("qwen35"), device=device, prefix_memory=0) as model:
        page = page_bytes(model)
        limit = int(12 * page * 1.1) + 6 * state_bytes(model)
        sessions = [model.session() for _ in ids]
        for session, prompt in zip(sessions, ids, strict=True):
            session.forward_prompt(prompt)
        assert model.stats()["kv_pool_bytes"] > limit
        expected = [fresh(model, np.append(prompt[:200], 5))[0] for prompt in ids]
    with Model(tiny_path("qwen35"), device=device, kv_memory=limit, prefix_memory=0) as model:
        sessions = [model.session() for _ in ids]
        for session, prompt in zip(sessions, ids, strict=True):
            session.forward_prompt(prompt)
        assert model.stats()["kv_pool_bytes"] <= limit
        for session, wanted in zip(sessions, expected, strict=True):
            session.rewind(200)
            assert_same(model, session.forward_token(5), wanted)
        one_more = model.session()
        with pytest.raises(KVMemoryError, match="kv_memory"):
            one_more.forward_prompt(ids_of(900))
        for session in sessions:
            assert session.position == 201


@pytest.mark.parametrize(("name", "device"), [("mamba2", "cpu"), ("lfm2", "metal")], indirect=["device"])
def test_threads_generate_at_the_same_time(
    name: str, device: str, tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state that is taken waits for passes in flight, as it does while the memory of states grows."""
    set_engine_options(monkeypatch, poison_cache=True)
    with Model(tiny_path(name), device=device, threads=2) as model:

        def text(number: int) -> str:
            with model.session() as session:
                return "".join(session.generate([1 + number] * 20, 12))

        expected = [[text(i)] * 3 for i in range(4)]
        assert at_once(lambda i: [text(i) for _ in range(3)]) == expected
