"""Sessions that several threads, or their own progress callbacks, use at the same time."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.kernels.emulated_gpu import require_cpu_executor
from support.programs import output
from support.threads import HANGS, at_once, in_use

from metal_prefill import Model, Session, SessionBusyError

PROMPT = list(range(100, 140))
CHUNK = 16
T = TypeVar("T")


def within_time(call: Callable[[], T]) -> T:
    """Return the result of `call`; fail instead of hanging."""
    return at_once(lambda number: call(), threads=1)[0]


@pytest.fixture
def model(device: str, fast_demo_path: Path) -> Iterator[Model]:
    """Open the bundled model, with small chunks."""
    with Model(fast_demo_path, device=device, chunk_tokens=CHUNK) as model:
        yield model


def test_a_progress_callback_can_read_its_own_session(model: Model) -> None:
    session = model.session()
    seen: list[Any] = []

    def look(done: int, total: int) -> None:
        stats = session.stats()
        has_memory = stats["kv_cache_bytes"] > 0
        seen.append((done, total, session.tokens, stats["position"], has_memory, repr(session)))
        assert session.position == done

    within_time(lambda: session.forward_prompt(PROMPT, progress=look))
    assert seen == [
        (n, 40, PROMPT[:n], n, True, f"<metal_prefill.Session position={n} of {session.max_context}>")
        for n in (16, 32, 40)
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.forward_prompt([1]),
        lambda s: s.forward_prompt([1], reuse=True),
        lambda s: s.forward_prompt_logits([1]),
        lambda s: s.forward_token(1),
        lambda s: s.forward_token_greedy(1),
        lambda s: s.score([1, 2]),
        lambda s: s.rewind(3),
        lambda s: s.reset(),
        lambda s: list(s.generate([1], 2)),
    ],
)
def test_a_progress_callback_cannot_change_its_session(
    model: Model, change: Callable[[Session], object]
) -> None:
    expected = model.forward_prompt(PROMPT)
    session = model.session()
    refused: list[str] = []

    def meddle(done: int, total: int) -> None:
        with pytest.raises(
            SessionBusyError, match="inside the progress callback of its forward_prompt"
        ) as error:
            change(session)
        refused.append(str(error.value))

    assert within_time(lambda: session.forward_prompt(PROMPT, progress=meddle)) == expected
    assert len(refused) == 3
    assert session.tokens == PROMPT
    change(session)  # and afterwards it is allowed


def test_a_progress_callback_may_wait_for_another_session_of_another_thread(model: Model) -> None:
    expected = model.forward_prompt(PROMPT)
    session, other = model.session(), model.session()
    results: list[int] = []

    def wait(done: int, total: int) -> None:
        results.append(within_time(lambda: other.forward_prompt(PROMPT, reuse=True)))

    assert within_time(lambda: session.forward_prompt(PROMPT, progress=wait)) == expected
    assert results == [expected] * 3


def test_reads_do_not_wait_while_a_chunk_is_computed(
    device: str, demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole prompt in one pass takes far longer than a read, and until it is done there are no tokens."""
    n = 256 if device == "cpu" else 100  # the CPU engine's chunk; the emulator of a GPU is slow
    monkeypatch.setenv("METAL_PREFILL_CPU_ISA", "scalar")  # a pass takes half a second
    with Model(demo_path, device=device, chunk_tokens=1024) as model:
        session = model.session()
        session.forward_prompt(PROMPT)
        for _ in range(5):
            session.reset()
            pass_seconds, reads = reads_during(session, [1] * n)
            assert {value for _, read in reads for value in read} <= {0, n}
            # One that waits takes as long as the rest of the pass.
            if len(reads) > 20 and max(seconds for seconds, _ in reads) < pass_seconds / 2:
                return
    pytest.fail(f"the longest of {len(reads)} reads took {max(reads)[0]} of {pass_seconds} s")


def reads_during(
    session: Session, prompt: list[int]
) -> tuple[float, list[tuple[float, tuple[int, int, float]]]]:
    """Read a session while another thread processes a prompt; return the duration of that and of each read.

    On a busy machine, starting a thread in free-threaded Python can take longer than a pass: the locks of
    CPython 3.14 yield the core many times. So the thread is started first, and waits.
    """
    go, times, reads = threading.Event(), list[float](), list[tuple[float, float, tuple[int, int, float]]]()

    def compute() -> None:
        while not go.is_set():
            time.sleep(0.001)
        times.append(time.perf_counter())
        session.forward_prompt(prompt)
        times.append(time.perf_counter())

    thread = threading.Thread(target=compute)
    thread.start()
    go.set()
    while len(times) < 2 and thread.is_alive():
        begin = time.perf_counter()
        read = (session.position, len(session.tokens), session.stats()["position"])
        reads.append((begin, time.perf_counter(), read))
    thread.join()
    first, last = times
    return last - first, [(end - begin, read) for begin, end, read in reads if first < end and begin < last]


# While the pass of a prompt, which is slow on the emulator, holds the slots, another prompt waits for them
# with the lock of the pool of pages, which it has to grow. The pass takes the GIL ten times a second to look
# for Ctrl-C.
WAITS_FOR_SLOTS = """
import sys, threading, time
from metal_prefill import Model

model = Model(sys.argv[1], device="metal", chunk_tokens=1024, kv_dtype="f32")
first, second = model.session(), model.session()
slab = (8 << 20) // int(model.stats()["kv_page_bytes"])  # pages by which the pool grows
full = [model.session() for _ in range(slab - 5)]
for third in full:
    third.forward_prompt([1])
threads = [threading.Thread(target=session.forward_prompt, args=([1] * 300,)) for session in (first, second)]
for thread in threads:
    thread.start()
    time.sleep(0.1)
assert threads[0].is_alive()
CALL
for thread in threads:
    thread.join()
"""


@pytest.mark.emulator
@pytest.mark.parametrize("call", ["model.stats()", "third.stats()", "del full, third"])
def test_calls_release_the_gil_while_they_wait_for_a_pool(demo_path: Path, call: str) -> None:
    require_cpu_executor("takes so long")
    program = WAITS_FOR_SLOTS.replace("CALL", call)
    output([sys.executable, "-c", program, str(demo_path)], timeout=HANGS)


def test_calls_of_other_threads_that_change_a_session_wait(model: Model) -> None:
    session = model.session()
    threads: list[threading.Thread] = []
    positions: list[int] = []

    def start(done: int, total: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=session.rewind, args=(7,), daemon=True))
            threads[0].start()
            threads[0].join(0.3)
        positions.append(session.position)

    session.forward_prompt(PROMPT, progress=start)
    threads[0].join(HANGS)
    assert positions == [16, 32, 40]
    assert session.position == 7


@pytest.mark.parametrize("wait", [lambda s: s.rewind(0), lambda s: s.forward_prompt([1]), lambda s: s.fork()])
def test_ctrl_c_interrupts_the_wait_for_a_session(model: Model, wait: Callable[[Session], object]) -> None:
    session = model.session()
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with in_use(session, PROMPT):
        interrupt.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                wait(session)
            assert session.position == CHUNK, "the wait ended with the prompt, not before"
        finally:
            interrupt.join()
    assert session.position == len(PROMPT)


def test_the_slower_of_two_generators_on_a_session_raises(model: Model) -> None:
    alone = list(model.session().generate("JULIET:", 12))
    session = model.session()
    first, second = session.generate("ROMEO:", 12), session.generate("JULIET:", 12)
    next(first)
    begun = [next(second)]
    with pytest.raises(SessionBusyError, match="another call changed the session while text was generated"):
        list(first)
    assert begun + list(second) == alone


@pytest.mark.parametrize(
    ("change", "temperature"),
    [
        (lambda s: s.rewind(1), 0.0),
        (lambda s: s.rewind(s.position), 0.8),
        (lambda s: s.forward_token(5), 0.0),
        (lambda s: s.forward_prompt([5], reuse=True), 0.8),
        (lambda s: s.score([5, 6]), 0.0),
    ],
)
def test_a_generator_raises_if_its_session_was_changed(
    model: Model, change: Callable[[Session], object], temperature: float
) -> None:
    session = model.session()
    pieces = session.generate("ROMEO:", 12, temperature=temperature, seed=1)
    next(pieces)
    change(session)
    tokens = session.tokens
    with pytest.raises(SessionBusyError, match="another call changed the session while text was generated"):
        next(pieces)
    assert session.tokens == tokens


def test_reads_forks_and_other_sessions_do_not_affect_a_generator(model: Model, tmp_path: Path) -> None:
    expected = list(model.session().generate("ROMEO:", 12))
    session, other = model.session(), model.session()
    pieces = []
    for piece in session.generate("ROMEO:", 12):
        pieces.append(piece)
        assert session.position == len(session.tokens) == session.stats()["position"]
        with session.fork() as fork:
            fork.forward_token(5)
        session.save(tmp_path / "x.session")
        other.forward_prompt(PROMPT, reuse=True)
    assert pieces == expected
