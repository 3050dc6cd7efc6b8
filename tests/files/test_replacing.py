"""Files that the package writes: what they may replace, permissions, and leftovers of killed writers."""

import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.programs import finished
from support.threads import at_once

from metal_prefill import Model, OutputError, synth
from metal_prefill._support.atomic_write import replacing
from metal_prefill.storage import _session_file


def save(path: Path) -> None:
    with Model(device="cpu", threads=1) as model, model.session() as session:
        session.forward_prompt([1, 2, 3])
        session.save(path)


def write_model(path: Path) -> None:
    synth.synthesize(path, preset="tiny")


def write_report(path: Path) -> None:
    options = ["--demo", "-p", "4", "-n", "0", "-r", "1", "--patience", "0", "--json", str(path)]
    done = finished([sys.executable, "-m", "metal_prefill", "bench", *options])
    if done.returncode:
        raise OutputError(0, done.stderr, str(path))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("write", "make", "kind"),
    [
        *((write, os.mkfifo, "FIFO") for write in (save, write_model, write_report)),
        (save, make_socket, "socket"),
    ],
)
def test_special_files_are_rejected_and_kept(
    tmp_path: Path, write: Callable[[Path], None], make: Callable[[Path], None], kind: str
) -> None:
    path = tmp_path / "out"
    make(path)
    before = os.lstat(path)
    with pytest.raises(OutputError, match=f"{kind}; name a regular file"):
        write(path)
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["/dev/null", "/dev/fd/1", "/proc/self/fd/1", "{tmp}/link"])
def test_devices_and_open_files_are_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("/dev/fd/1")  # as /dev/stdout is
    name = name.format(tmp=tmp_path)
    if not os.path.exists(os.path.dirname(name)):
        pytest.skip(f"there is no {name}")
    with pytest.raises(OutputError, match=r"device|open file") as error, replacing(name):
        pytest.fail("the work began")
    assert error.value.filename == name
    assert isinstance(error.value, OSError)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # for a file between `open` and `with`
def test_ctrl_c_at_any_call_leaves_nothing(tmp_path: Path) -> None:
    def is_interrupted(number: int) -> bool:
        calls = itertools.count()

        def interrupt(frame: FrameType, event: str, argument: Any) -> None:
            if event in ("call", "c_call") and next(calls) == number:
                signal.raise_signal(signal.SIGINT)

        try:
            sys.setprofile(interrupt)
            with replacing(tmp_path / "out") as temporary:
                temporary.write_bytes(b"new")
            sys.setprofile(None)
        except KeyboardInterrupt:  # which has removed the function
            return True
        return False

    descriptors = os.listdir("/proc/self/fd")
    for number in itertools.count():
        interrupted = is_interrupted(number)
        assert set(os.listdir(tmp_path)) <= {"out"}, f"after call {number}"
        assert len(os.listdir("/proc/self/fd")) == len(descriptors), f"after call {number}"
        if not interrupted:
            break
    assert number > 50


def test_ctrl_c_that_native_code_makes_another_error_of_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise SystemError("returned a result with an exception set")

    monkeypatch.setattr(_session_file, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "session")


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "shared.session"
    path.write_bytes(b"old")
    path.chmod(0o664)
    save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_a_new_file_has_the_users_default_permissions(tmp_path: Path) -> None:
    path, plain = tmp_path / "new.session", tmp_path / "plain"
    old = os.umask(0o027)
    try:
        save(path)
        plain.touch()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode) == 0o640


@pytest.mark.parametrize("write", [save, write_model])
def test_names_of_the_maximum_length_are_written(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / ("n" * 250 + ".gguf")
    write(path)
    assert path.stat().st_size > 0
    assert list(tmp_path.iterdir()) == [path]


def kill_while_writing(path: Path, number: int) -> None:
    """Let a process start to replace `path`, and kill it there."""
    program = (
        "import sys, time\n"
        "from metal_prefill._support.atomic_write import replacing\n"
        "with replacing(sys.argv[1]) as part:\n"
        "    part.write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        child.send_signal(number)
        child.wait(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_write_removes_leftovers_of_a_killed_one(tmp_path: Path, number: int) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    kill_while_writing(path, number)
    assert len(list(tmp_path.iterdir())) == 2
    assert path.read_bytes() == b"old"
    with replacing(tmp_path / "other") as part:
        part.write_bytes(b"new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "state"]


def test_concurrent_writes_do_not_interfere(tmp_path: Path) -> None:
    """Many threads replace files of one folder, and each looks for abandoned ones."""

    def work(number: int) -> None:
        for i in range(50):
            with replacing(tmp_path / f"file{number % 3}") as part:
                part.write_text(f"{i}")

    at_once(work, 6)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {f"file{i}": "49" for i in range(3)}


def test_a_folder_of_another_writer_is_not_a_leftover(tmp_path: Path) -> None:
    with replacing(tmp_path / "slow") as slow:
        with replacing(tmp_path / "quick") as quick:
            quick.write_bytes(b"quick")
        slow.write_bytes(b"slow")
    assert {p.name for p in tmp_path.iterdir()} == {"slow", "quick"}
