"""Calls in progress when their process exits."""

import os
import sys
import sysconfig

import pytest
from support.programs import finished

# Forks for each delay, so that the package is imported once. In the child, daemon threads compute endlessly;
# `{between}` runs between calls, and `callback` is the callback of their prompts.
PROGRAM = """
import atexit, os, sys, threading, time
{first}
from metal_prefill import Model

for delay in (0, 0.01, 0.02, 0.03):
    child = os.fork()
    if child == 0:
        break
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"delay {{delay}}: exit status {{status}}")
else:
    sys.exit()

model = Model(device="cpu", threads=2, chunk_tokens=64)
shared = model.session()
begun = threading.Semaphore(0)

def callback(done, total):
    begun.release()
    {callback}

def work():
    session = model.session()
    while True:
        session.forward_prompt([1] * 300, progress={progress})
        begun.release()
        {between}
        session.reset()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(3):
    begun.acquire()
time.sleep(delay)
print("the last line")
"""

ACTIVITIES = {
    "inside a prompt": {},
    "between the chunks of a prompt": {"progress": "callback"},
    "between the chunks of a prompt, while handlers of exits that are registered first take their time": {
        "progress": "callback",
        "first": "atexit.register(time.sleep, 0.2)",
    },
    "in Python code of a callback": {"progress": "callback", "callback": "while True: sum(range(99))"},
    "asleep in a callback": {"progress": "callback", "callback": "time.sleep(999)"},
    "token by token": {"between": "for _ in range(99): session.forward_token(1)"},
    "waiting for another thread's session": {"between": "shared.forward_prompt([1] * 64); shared.reset()"},
    "scoring": {"between": "model.score([1] * 300)"},
}


@pytest.mark.parametrize("activity", ACTIVITIES.values(), ids=ACTIVITIES.keys())
def test_a_process_exits_cleanly_with_daemon_threads(activity: dict[str, str]) -> None:
    """Without messages and with exit status 0, at whatever moment the interpreter ends."""
    plain = {"first": "pass", "callback": "pass", "progress": "None", "between": "pass"}
    program = PROGRAM.format(**{**plain, **activity})
    done = finished([sys.executable, "-c", program])
    assert done.stderr == ""  # separately, so that pytest shows all of it
    assert (done.returncode, done.stdout) == (0, 4 * "the last line\n")


LEAKING = """
import ctypes
from metal_prefill import Model

model = Model(device="cpu", threads=1)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(model.engine.core))
"""


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(False, id="users"),
        pytest.param(
            True,
            id="developers",
            marks=pytest.mark.skipif(
                bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
                reason="nanobind reports no leaks in free-threaded Python",
            ),
        ),
    ],
)
def test_leak_reports_at_exit_are_for_developers_only(asked: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "METAL_PREFILL_LEAK_WARNINGS"}
    if asked:
        environment["METAL_PREFILL_LEAK_WARNINGS"] = "1"
    done = finished([sys.executable, "-c", LEAKING], env=environment)
    assert (done.returncode, done.stdout) == (0, "")
    assert ("leaked 1 instances" in done.stderr) == asked
    assert asked or done.stderr == ""
