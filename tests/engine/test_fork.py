"""Models and sessions in a forked process, and calls in progress when their process exits."""

import asyncio
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.forked import HANGS, in_child
from support.programs import finished
from support.threads import in_use, running_threads

from metal_prefill import ForkError, Model
from metal_prefill._support.cached_property import cached_property
from metal_prefill.text import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

PROMPT = list(range(100, 140))


@pytest.fixture
def model(demo_path: Path) -> Iterator[Model]:
    """Open the bundled model on the CPU, on more threads than one."""
    with Model(demo_path, device="cpu", threads=3, chunk_tokens=16) as model:
        yield model


def test_a_child_and_a_grandchild_continue_a_session_bitwise(model: Model) -> None:
    session = model.session()
    session.forward_prompt(PROMPT)

    def work() -> str:
        return session.forward_token(5).tobytes().hex()

    answers = in_child(work), in_child(lambda: in_child(work))
    assert answers == (work(),) * 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_child_computes_on_all_threads(model: Model) -> None:
    model.forward_prompt(PROMPT)

    def work() -> str:
        before = running_threads()
        model.forward_prompt(PROMPT)
        return f"{running_threads() - before} more"

    assert in_child(work) == "2 more"


def test_a_child_releases_inherited_models_and_opens_new_ones(model: Model, demo_path: Path) -> None:
    session = model.session()
    expected = session.forward_prompt(PROMPT)

    def work() -> str:
        session.close()
        model.close()
        with Model(demo_path, device="cpu", threads=2) as own:
            return str(own.forward_prompt(PROMPT))

    assert in_child(work) == str(expected)


def test_a_fork_while_another_thread_computes_works_or_raises(model: Model) -> None:
    """It works if the fork happened between two passes; it never hangs and never computes anything else."""
    expected = str(model.session().forward_prompt(PROMPT))
    stop, begun = threading.Event(), threading.Event()

    def compute() -> None:
        session = model.session()
        while not stop.is_set():
            session.forward_prompt([1] * 900, reuse=False)
            begun.set()
            session.reset()

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait(HANGS)
    answers = []
    try:
        own = model.session()
        for i in range(12):
            time.sleep(0.003 * i)
            answers.append(in_child(lambda: str(own.forward_prompt(PROMPT, reuse=True))))
    finally:
        stop.set()
        thread.join()
    lost = [a for a in answers if a.startswith("ForkError: this process was forked while another thread")]
    assert lost
    assert set(answers) - set(lost) <= {expected}
    assert str(own.forward_prompt(PROMPT)) == expected  # nothing happened in the parent


def test_a_session_in_use_by_another_thread_is_lost_in_the_child(model: Model) -> None:
    """Its thread is in a callback, between two chunks: reads return the progress, other sessions work."""
    session, other = model.session(), model.session()
    expected = (
        "ForkError: {}: this process was forked while another thread was in the session's forward_prompt"
    )
    calls: dict[str, Callable[[], object]] = {
        "forward_token": lambda: session.forward_token(1),
        "rewind": session.reset,
        "fork": session.fork,
    }
    with in_use(session, PROMPT):
        for name, call in calls.items():
            assert in_child(call).startswith(expected.format(name))
        assert in_child(lambda: str(session.position)) == "16"
        assert in_child(lambda: str(other.forward_prompt(PROMPT))) == str(model.forward_prompt(PROMPT))


def test_a_callback_may_fork_and_the_child_finishes_the_prompt(model: Model) -> None:
    """The forking thread is the one that computes, so the child has it."""
    expected = model.session().forward_prompt_logits(PROMPT)
    reading, writing = os.pipe()
    children: list[int] = []

    def fork_once(done: int, total: int) -> None:
        if not children:
            children.append(os.fork())

    logits = model.session().forward_prompt_logits(PROMPT, progress=fork_once)
    if children[0] == 0:
        os.write(writing, logits.tobytes())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        of_child = np.frombuffer(file.read(), np.float32)
    os.waitpid(children[0], 0)
    assert (logits == expected).all()
    assert (of_child == expected).all()


@pytest.mark.usefixtures("metal")
def test_a_gpu_cannot_be_used_in_a_child(demo_path: Path) -> None:
    with Model(demo_path, device="metal") as model:
        session = model.session()
        expected = session.forward_prompt(PROMPT)

        def work() -> str:
            for call in (lambda: session.forward_token(1), lambda: session.fork(), lambda: model.session()):
                with pytest.raises(
                    ForkError, match="start processes by 'spawn', or open the model here with device='cpu'"
                ):
                    call()
            session.close()
            model.close()
            with Model(demo_path, device="cpu") as own:
                return str(own.forward_prompt(PROMPT))

        assert in_child(work) == str(expected)
        assert session.position == len(PROMPT)


def test_a_child_generates_after_its_parent_ran_the_engine_loop(model: Model) -> None:
    """The loop's thread is not in the child, which must not wait for it."""

    async def text(tokens: int) -> str:
        return "".join([piece async for piece in model.generate_async("ROMEO:", tokens)])

    expected = asyncio.run(text(8))
    begun = threading.Event()

    async def stream() -> None:
        async for _ in model.generate_async("JULIET:", 300):
            begun.set()

    thread = threading.Thread(target=asyncio.run, args=(stream(),))
    thread.start()
    begun.wait(HANGS)
    answers = [in_child(lambda: asyncio.run(text(8))) for _ in range(4)]
    thread.join()
    answers.append(in_child(lambda: asyncio.run(text(8))))
    assert answers[-1] == expected
    assert all(a == expected or a.startswith("ForkError: ") for a in answers), answers


class Slow:
    """An object with an attribute that takes a while, such as a model with a tokenizer."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.computed = list[int]()  # processes that computed it

    @cached_property
    def value(self) -> list[int]:
        self.computed.append(os.getpid())
        self.begun.set()
        if len(self.computed) == 1:
            self.end.wait(HANGS)
        return self.computed


def test_threads_compute_a_cached_attribute_once_and_a_child_does_not_wait_for_them() -> None:
    slow, found = Slow(), list[list[int]]()
    threads = [threading.Thread(target=lambda: found.append(slow.value)) for _ in range(3)]
    for thread in threads:
        thread.start()
    slow.begun.wait(HANGS)
    assert in_child(lambda: len(slow.value), hangs=20) == "2"
    slow.end.set()
    for thread in threads:
        thread.join()
    assert found == [[os.getpid()]] * 3


def test_tokenizers_prepare_their_structures_in_such_attributes() -> None:
    for name in ("_model", "_words", "_finders", "_divisible", "_longest_token", "_splits_pieces"):
        assert isinstance(vars(Tokenizer)[name], cached_property), name


EXITING_CHILD = """
import os, sys
from metal_prefill import Model

model = Model(device=sys.argv[1], threads=2)
session = model.session()
session.forward_prompt([1, 2, 3])
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
session.position
sys.exit(0 if child else 3)
"""


def test_parent_and_child_exit_cleanly(device: str) -> None:
    """Each runs Python's complete shutdown, with its modules and their objects."""
    done = finished([sys.executable, "-W", "ignore", "-c", EXITING_CHILD, device], timeout=2 * HANGS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Forks for each activity and delay, so that the package is imported once. In the child, daemon threads
# compute endlessly; `between` runs between calls, and `callback` is the callback of their prompts.
PROGRAM = """
import atexit, json, os, sys, threading, time
{first}
from metal_prefill import Model

activities = json.loads(sys.argv[1])
delays = (0, 0.015)
for name, delay in ((name, delay) for name in activities for delay in delays):
    child = os.fork()
    if child == 0:
        break
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{{name}}, delay {{delay}}: exit status {{status}}")
else:
    sys.exit()

activity = activities[name]
during, between = (compile(activity.get(key, "pass"), name, "exec") for key in ("callback", "between"))
model = Model(device="cpu", threads=2, chunk_tokens=64)
shared = model.session()
begun = threading.Semaphore(0)

def callback(done, total):
    begun.release()
    exec(during)

def work():
    session = model.session()
    while True:
        session.forward_prompt([1] * 300, progress=callback if "callback" in activity else None)
        begun.release()
        exec(between)
        session.reset()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(3):
    begun.acquire()
time.sleep(delay)
print(name)
"""

ACTIVITIES = {
    "inside a prompt": {},
    "between the chunks of a prompt": {"callback": "pass"},
    "in Python code of a callback": {"callback": "while True: sum(range(99))"},
    "asleep in a callback": {"callback": "time.sleep(999)"},
    "token by token": {"between": "for _ in range(99): session.forward_token(1)"},
    "waiting for another thread's session": {"between": "shared.forward_prompt([1] * 64); shared.reset()"},
    "scoring": {"between": "model.score([1] * 300)"},
}


@pytest.mark.parametrize(
    ("first", "activities"),
    [
        ("pass", ACTIVITIES),
        ("atexit.register(time.sleep, 0.2)", {"between the chunks of a prompt": {"callback": "pass"}}),
    ],
    ids=["all activities", "while handlers of exits that are registered first take their time"],
)
def test_a_process_exits_cleanly_with_daemon_threads(
    first: str, activities: dict[str, dict[str, str]]
) -> None:
    """It prints nothing and has exit status 0, whenever the interpreter ends."""
    done = finished([sys.executable, "-c", PROGRAM.format(first=first), json.dumps(activities)])
    assert done.stderr == ""  # separately, so that pytest shows all of it
    assert (done.returncode, done.stdout.splitlines()) == (0, [name for name in activities for _ in range(2)])


LAST_REFERENCE = """
import atexit, gc, threading

exits, released = threading.Event(), threading.Event()

@atexit.register
def after_the_package():  # functions that are registered first are called last
    exits.set()
    print(released.wait(60))

from metal_prefill import Model
models = [Model(device="cpu", threads=1)]

def release():
    exits.wait()
    models.clear()
    gc.collect()
    released.set()

threading.Thread(target=release, daemon=True).start()
"""


def test_a_daemon_thread_may_release_a_model_while_the_process_exits() -> None:
    done = finished([sys.executable, "-c", LAST_REFERENCE])
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


LEAKING = """
import ctypes
from metal_prefill import Model

model = Model(device="cpu", threads=1)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(model.engine.core))
"""


@pytest.mark.parametrize("asked", [False, True], ids=["users", "developers"])
def test_leak_reports_at_exit_are_for_developers_only(asked: bool) -> None:
    if asked and sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("nanobind reports no leaks in free-threaded Python")
    environment = {k: v for k, v in os.environ.items() if k != "METAL_PREFILL_LEAK_WARNINGS"}
    if asked:
        environment["METAL_PREFILL_LEAK_WARNINGS"] = "1"
    done = finished([sys.executable, "-c", LEAKING], env=environment)
    assert (done.returncode, done.stdout) == (0, "")
    assert ("leaked 1 instances" in done.stderr) == asked
    assert asked or done.stderr == ""
