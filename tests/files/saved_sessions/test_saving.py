"""Saving replaces a file completely or not at all, whatever else reads it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saved_sessions import PROMPT

from metal_prefill import ClosedError, Model
from metal_prefill.storage import _session_file


def fail(*_: object, **__: object) -> None:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("step", ["save_file", "os.fsync", "os.replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    demo: Model, saved: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr(f"metal_prefill.storage._session_file.{step}", fail)
    with demo.session() as session:
        session.forward_prompt(PROMPT[:5])
        with pytest.raises(OSError, match="the disk is gone"):
            session.save(saved)
        assert session.position == 5
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # the child only writes, and dies
def test_a_killed_save_leaves_the_old_file(demo: Model, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies, without any clean-up, when half of the new file is written."""

    def die(arrays: object, path: Path, metadata: object) -> None:
        path.write_bytes(before[:99])
        os._exit(9)

    before = saved.read_bytes()
    monkeypatch.setattr(_session_file, "save_file", die)
    child = os.fork()
    if child == 0:
        try:
            owner, n = demo.engine.state_owner, 3
            rows = [np.zeros(n * shape[1] * shape[2] * 2, np.uint8) for _, shape in owner.tensors(n).values()]
            _session_file.write(saved, owner, _session_file.State(np.arange(n, dtype=np.int32), n, rows))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert saved.read_bytes() == before
    assert demo.load_session(saved).tokens == PROMPT


@pytest.mark.parametrize("step", ["_read_header", "_check_owner"])
def test_a_save_does_not_affect_a_concurrent_load(
    demo: Model, saved: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    original = getattr(_session_file, step)

    def save_first(*arguments: object) -> object:
        with demo.session() as other:
            other.forward_prompt([7, 8, 9])
            other.save(saved)
        return original(*arguments)

    monkeypatch.setattr(_session_file, step, save_first)
    assert demo.load_session(saved).tokens == PROMPT
    monkeypatch.undo()
    assert demo.load_session(saved).tokens == [7, 8, 9]


def test_concurrent_loads_find_a_complete_state(demo_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.session"
    with Model(demo_path, device="cpu", threads=1) as model:
        states = [list(range(3, 3 + n)) for n in (5, 40)]
        sessions = [model.session() for _ in states]
        for session, tokens in zip(sessions, states, strict=True):
            session.forward_prompt(tokens)
        sessions[0].save(path)
        stop = threading.Event()

        def save() -> None:
            while not stop.is_set():
                for session in sessions:
                    session.save(path)

        thread = threading.Thread(target=save)
        thread.start()
        try:
            for _ in range(500):
                with model.load_session(path) as loaded:
                    assert loaded.tokens in states
        finally:
            stop.set()
            thread.join()


def test_saving_over_a_loaded_state_does_not_disturb_the_session(demo: Model, saved: Path) -> None:
    with demo.load_session(saved) as session, demo.session() as other:
        other.forward_prompt(PROMPT[:3])
        other.save(saved)
        session.save(saved)
    assert demo.load_session(saved).tokens == PROMPT


def test_saving_through_a_link_keeps_the_link(demo: Model, saved: Path) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved)
    with demo.session() as session:
        session.save(link)
    assert link.is_symlink()
    assert demo.load_session(saved).position == 0


@pytest.mark.parametrize(
    "call", [lambda m, s, p: m.load_session(p), lambda m, s, p: s.save(p)], ids=["load", "save"]
)
def test_closed_models_and_sessions_raise(
    demo: Model, saved: Path, call: Callable[[Model, Any, Path], object]
) -> None:
    session = demo.session()
    session.close()
    demo.close()
    with pytest.raises(ClosedError):
        call(demo, session, saved)
