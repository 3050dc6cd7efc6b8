"""Waits for a GPU or a compiler that never answers: they end by themselves, and by Ctrl-C.

Each test is a process of its own, since a process does not use a GPU again that it has lost.
"""

import os
import sys
from pathlib import Path

import pytest
from support.kernels.emulated_gpu import require_emulator
from support.programs import finished

pytestmark = pytest.mark.emulator

require_emulator()

PATIENCE = 2  # seconds
START = """
import os, signal, sys, threading, time
from metal_prefill import DeviceError, Model, _core
gpu = _core.emulator
path = sys.argv[1]

def limit(**limits):
    gpu.set_limits(gpu.Limits(**limits))

def attempt(call):
    begin = time.monotonic()
    try:
        call()
        print("no error")
    except (DeviceError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error} after {round(time.monotonic() - begin)} s", flush=True)

def interrupt():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
"""


def run(path: Path, code: str, patience: float = PATIENCE) -> list[str]:
    """Run code in a process that must end by itself."""
    environment = os.environ | {"METAL_PREFILL_PATIENCE": str(patience)}
    command = [sys.executable, "-c", START + code, str(path)]
    done = finished(command, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_pass_that_never_ends_is_named_and_the_gpu_is_not_used_again(path: Path) -> None:
    first, *others = run(
        path,
        """
model = Model(path, device="metal")
limit(endless_kernels={"argmax_stage2"})
for _ in range(2):
    attempt(lambda: model.forward_prompt([1, 2, 3]))
attempt(lambda: Model(path, device="metal").forward_prompt([1, 2, 3]))
model.close()
""",
    )
    assert first.startswith("DeviceError: the GPU did not finish 3 tokens at position 0 within 2 s")
    assert all(line.startswith("DeviceError: ") for line in others)
    assert all(line.endswith(" after 0 s") for line in others)
    assert len(others) == 2


def test_a_pass_that_never_ends_can_be_interrupted(path: Path) -> None:
    (line,) = run(
        path,
        """
model = Model(path, device="metal")
limit(endless_kernels={"argmax_stage2"})
interrupt()
attempt(lambda: model.forward_prompt([1, 2, 3]))
""",
        patience=100,
    )
    assert line.startswith("KeyboardInterrupt")
    assert int(line.split()[-2]) <= 30


def test_an_interrupted_pass_changes_nothing(path: Path) -> None:
    """The GPU finishes it, and the session continues."""
    lines = run(
        path,
        """
model = Model(path, device="metal")
expected = model.forward_prompt([1, 2, 3])
model.reset()
raised = []
def stop(*_):
    raised.append(1)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, stop)
signal.setitimer(signal.ITIMER_REAL, 0)
interrupt()
while not raised:
    try:
        model.reset()
        model.forward_prompt([5] * 100)
    except KeyboardInterrupt:
        pass
model.reset()
print(model.forward_prompt([1, 2, 3]) == expected)
""",
        patience=100,
    )
    assert lines == ["True"]


@pytest.mark.parametrize("interrupted", [False, True], ids=["by itself", "Ctrl-C"])
def test_a_compiler_that_never_answers_ends_the_opening(path: Path, interrupted: bool) -> None:
    (line,) = run(
        path,
        f"""
limit(compiler=False)
if {interrupted}:
    interrupt()
attempt(lambda: Model(path, device="metal"))
""",
        patience=100 if interrupted else 0.4,
    )
    if interrupted:
        assert line.startswith("KeyboardInterrupt")
    else:
        assert line.startswith("DeviceError: Metal's compiler has not answered for 2 s")


def test_a_forked_process_is_not_given_the_gpu(path: Path) -> None:
    """On macOS it would be aborted; a model that chooses its device uses the CPU."""
    (line,) = run(
        path,
        """
limit(survives_fork=False)
model = Model(path, device="metal")
model.forward_prompt([1, 2, 3])
_core.has_emulator = False  # as on a Mac
os.environ["METAL_PREFILL_CHECK"] = "0"
child = os.fork()
if child == 0:
    try:
        Model(path, device="metal")
    except DeviceError as error:
        named = "start processes by 'spawn'" in str(error)
    with Model(path) as own:
        print(named, "matvec_rows" not in own.stats(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
""",
        patience=100,
    )
    assert line == "True True"
