"""Hostile constraints: each is a ConstraintError, within limits of size, depth, time and memory."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.forked import in_child
from support.hostile_constraints import HANGING, space_of
from support.programs import finished
from support.servers.running_server import wait_until

from metal_prefill import ConstraintError, Model, Scheduler
from metal_prefill._support.threads import in_thread
from metal_prefill.generation import _constraint, _constraint_process
from metal_prefill.generation._constraint import MOST_CHARACTERS, Constraint
from metal_prefill.generation._constraint_process import ForkServer, Worker
from metal_prefill.generation._constraint_worker import _Texts
from metal_prefill.generation._stream import make_streams

pytest.importorskip("llguidance", reason="needs the extra guide")

Source = dict[str, Any]


def rules(n: int) -> Source:
    lines = [f"r{i}: r{i + 1}" for i in range(n)]
    return {"grammar": "\n".join(["start: r0", *lines, f'r{n}: "a"'])}


def terminals(n: int) -> Source:
    lines = [f'T{i}: "b" T{i + 1}' for i in reversed(range(n))]
    return {"grammar": "\n".join([f'T{n}: "a"', *lines, "start: T0"])}


def definitions(link: Callable[[Source], Source]) -> Callable[[int], Source]:
    """Return a function that makes a chain of definitions, linked by `link`."""

    def schema(n: int) -> Source:
        chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
        return {"json_schema": {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{n}": {"type": "null"}}}}

    return schema


CHAINS = {
    "rules": rules,
    "terminals": terminals,
    "references": definitions(lambda ref: ref),
    "objects": definitions(lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]}),
    "arrays": definitions(lambda ref: {"type": "array", "items": ref, "minItems": 1, "maxItems": 1}),
    "anyOf": definitions(lambda ref: {"anyOf": [ref, {"type": "integer"}]}),
    "allOf": definitions(lambda ref: {"allOf": [ref]}),
    "oneOf": definitions(lambda ref: {"oneOf": [ref]}),
}


def refused(model: Model, **source: Any) -> str:
    """Return why a constraint is refused; afterwards another one still compiles."""
    with pytest.raises(ConstraintError) as caught:
        Constraint(model.tokenizer, **source)
    assert Constraint(model.tokenizer, regex="[ab]").mask()
    return str(caught.value)


def before_each_request(monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]) -> None:
    """Call a function with the worker, the limits, the action and its arguments."""
    real = Worker.ask

    def ask(self: Worker, limits: Any, encode: Any, *request: Any) -> Any:
        call(self, limits, *request)
        return real(self, limits, encode, *request)

    monkeypatch.setattr(Worker, "ask", ask)


def test_the_size_and_the_nesting_of_a_source_are_limited(model: Model) -> None:
    message = refused(model, regex="a" * (MOST_CHARACTERS + 1))
    assert message == "regex: 1,048,577 characters exceed the limit of 1,048,576"
    schema: Source = {"type": "null"}
    for _ in range(50_000):
        schema = {"not": schema}
    assert refused(model, json_schema=schema) == "json_schema: its objects are nested too deeply"
    text = '{"not":' * 50_000 + "{}" + "}" * 50_000
    assert "recursion" in refused(model, json_schema=text)


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [("COMPILE_SECONDS", 0.01, r"0\.01 s of processor time"), ("MEMORY", 4 << 20, "4 MiB of memory")],
)
def test_the_time_and_memory_of_a_source_are_limited(
    model: Model, monkeypatch: pytest.MonkeyPatch, name: str, limit: float, message: str
) -> None:
    if name == "MEMORY" and sys.platform != "linux":
        pytest.skip("macOS ignores limits on memory")
    monkeypatch.setattr(_constraint, name, limit)
    with pytest.raises(ConstraintError, match=f"regex: compiling it takes more than {message}"):
        Constraint(model.tokenizer, regex="(a{900}){900}")


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_stack_overflow_ends_only_a_worker(model: Model, chain: Callable[[int], Source]) -> None:
    """The compiler recurses over rules and definitions that each name the next."""
    assert Constraint(model.tokenizer, **chain(300)).mask()
    message = refused(model, **chain(8000))
    assert "compiling it takes more than 256 MiB of memory, or 4 MiB of stack" in message


def test_a_limited_number_of_constraints_and_errors_is_known(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_constraint, "MOST_KEPT", 2)
    asked, found = list[str](), list[int]()
    before_each_request(monkeypatch, lambda worker, limits, action, *_: asked.append(action))
    for source in ("a", "(", "(", "a", "c", "a", "("):
        with suppress(ConstraintError):
            Constraint(model.tokenizer, regex=source).mask()
        found.append(len(asked))
    assert found == [1, 2, 2, 2, 3, 3, 4]


def interrupted(*arguments: Any, **named: Any) -> Any:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_interrupts_a_compiling_worker(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Constraint(model.tokenizer, regex="[ab]c")
    a = model.tokenizer.encode("a", add_bos=False)
    before = text.advance(a), text.mask()
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Constraint(model.tokenizer, regex="(")
        with pytest.raises(KeyboardInterrupt):
            text.advance([])
    assert text.advance([]).forced == []
    assert text.mask() == before[1]
    assert Constraint(model.tokenizer, regex="c").advance([], most_forced=1).forced == model.tokenizer.encode(
        "c", add_bos=False
    )


def test_ctrl_c_interrupts_forced_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is called in this process, for the worker, which waits."""
    sentence = "a long text without a choice"
    constraint = Constraint(model.tokenizer, json_schema={"const": sentence})
    with monkeypatch.context() as patched:
        patched.setattr(type(model.tokenizer), "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            constraint.advance([], most_forced=40)
    forced = constraint.advance([], most_forced=40).forced
    assert f'"{sentence}"'.startswith(model.tokenizer.decode(forced))
    assert len(forced) > 3


def test_a_forked_process_has_its_own_workers_and_threads(model: Model) -> None:
    """It repeats requests that wait for an answer, since it does not have the threads that send them."""
    a, c = (model.tokenizer.encode(letter, add_bos=False) for letter in "ac")
    text, waiting = (Constraint(model.tokenizer, regex=regex) for regex in ("[ab]c", "[ab]{9}"))
    text.advance(a)
    expected, parents = text.mask(), text._compiled._worker.pid
    gate = threading.Event()
    waiting.pending = in_thread(gate.wait, 60)
    in_thread(int).result(60)  # another thread, which then waits for the next job

    def work() -> bool:
        assert in_thread(int).result(60) == 0
        assert not waiting.advance(a).take()
        text.advance([])
        assert text.mask() == expected
        assert text._compiled._worker.pid != parents
        return text.advance(c).take()

    assert in_child(work) == "True"
    gate.set()
    assert not text.advance([], room=0).met
    assert text._compiled._worker.pid == parents
    assert text.advance(c).take()


def test_workers_end_with_the_process() -> None:
    program = (
        "from metal_prefill import Model\n"
        "from metal_prefill.generation._constraint import Constraint\n"
        "text = Constraint(Model(device='cpu', threads=1).tokenizer, regex='a')\n"
        "print(text._compiled._worker.pid, text._compiled._server._process.pid)\n"
    )
    done = finished([sys.executable, "-c", program], check=True)
    assert done.stderr == ""
    for pid in map(int, done.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_cannot_start_is_reported(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Model(demo_path, device="cpu", threads=1) as model:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", "/bin/false")
            with pytest.raises(ConstraintError, match="did not start: /bin/false, status 1"):
                Constraint(model.tokenizer, regex="a")
        assert Constraint(model.tokenizer, regex="a").mask()


def test_a_grammar_that_hangs_in_matching_fails_only_its_text(model: Model) -> None:
    others: list[Any] = [("A:", {"regex": "[a-z ]{60}"}), "ROMEO:\n"]
    expected = [
        "".join(model.generate("A:", 70, regex="[a-z ]{60}")),
        "".join(model.generate("ROMEO:\n", 70)),
    ]
    results: dict[int, Any] = {i: "" for i in range(3)}
    hanging = {"grammar": HANGING, "logit_bias": {space_of(model): 100.0}, "min_tokens": 80}
    many: list[Any] = [*others, ("A:", hanging)]
    for i, result in model.generate_many(many, 70, errors="return"):
        results[i] = result if isinstance(result, Exception) else results[i] + result
    assert [results[0], results[1]] == expected
    assert isinstance(results[2], ConstraintError)
    assert str(results[2]) == "prompt 2: grammar: matching it takes more than 0.25 s of processor time"


def hang(text: Constraint, model: Model) -> str:
    """Advance the grammar that hangs until it does, and return the error."""
    try:
        for _ in range(90):
            text.advance([space_of(model)]).take()
    except ConstraintError as error:
        return str(error)
    return ""


def test_a_worker_that_hangs_fails_only_its_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have stopped it."""
    text = Constraint(model.tokenizer, regex="[ab]{9}")
    a = model.tokenizer.encode("a", add_bos=False)
    with monkeypatch.context() as patched:
        patched.setattr(_constraint, "STEP_PATIENCE", 0.05)
        os.kill(text._compiled._worker.pid, signal.SIGSTOP)
        with pytest.raises(ConstraintError, match=r"regex: matching it, .* did not respond within 0\.05 s"):
            text.advance(a)
    assert not Constraint(model.tokenizer, regex="[ab]{9}").advance(a).take()


def test_a_fork_server_that_hangs_is_replaced(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Constraint(model.tokenizer, regex="[ab]{9}")
    a = model.tokenizer.encode("a", add_bos=False)
    process = known._compiled._server._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(_constraint_process, "FORK_PATIENCE", 2.0)
    thread = threading.Thread(target=lambda: Constraint(model.tokenizer, regex="c"))
    thread.start()
    assert not known.advance(a).take()  # its worker does not need the fork server
    assert thread.is_alive()
    thread.join(60)
    assert process.poll() == -signal.SIGKILL
    assert Constraint(model.tokenizer, regex="d").mask()


def test_a_source_that_exceeded_a_limit_in_matching_is_rejected(model: Model) -> None:
    texts = [Constraint(model.tokenizer, grammar=HANGING) for _ in range(4)]
    b = model.tokenizer.encode("b", add_bos=False)
    texts[3].advance(b)
    expected = texts[3].mask()
    message = hang(texts[0], model)
    assert message == "grammar: matching it takes more than 0.25 s of processor time"
    with pytest.raises(ConstraintError) as refused:
        Constraint(model.tokenizer, grammar=HANGING)
    assert str(refused.value) == message
    texts[3].advance([])  # others continue, until it happens again
    assert texts[3].mask() == expected
    assert hang(texts[1], model) == message
    with pytest.raises(ConstraintError, match="matching it takes more than"):
        texts[2].advance([])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_killing_a_worker_does_not_change_its_texts(model: Model, how: signal.Signals) -> None:
    kwargs: dict[str, Any] = {"temperature": 1.0, "seed": 3, "json_schema": {"type": "string"}}
    prompts = ["A:", "ROMEO:\n"]
    expected = ["".join(model.generate(prompt, 60, **kwargs)) for prompt in prompts]
    worker = Constraint(model.tokenizer, json_schema={"type": "string"})._compiled
    shorter = min(map(len, expected))
    texts, lengths = ["", ""], [shorter // 4, shorter // 2, 3 * shorter // 4]
    for i, piece in model.generate_many(prompts, 60, **kwargs):
        texts[i] += str(piece)
        # Both texts have gone on since, for a request survives the end of one worker only.
        if lengths and min(map(len, texts)) > lengths[0]:
            del lengths[0]
            os.kill(worker._worker.pid, how)
    assert texts == expected
    assert not lengths


def test_a_text_with_rejected_drafts_continues_in_another_worker(model: Model) -> None:
    a, c = (model.tokenizer.encode(letter, add_bos=False) for letter in "ac")
    text = Constraint(model.tokenizer, regex="(ac){9}b")
    expected = []
    for kill in (False, True):
        text = Constraint(model.tokenizer, regex="(ac){9}b")
        found: list[Any] = []
        for _ in range(4):
            text.advance(a)
            found += text.ahead([*c, *a, *a])
            if kill:
                os.kill(text._compiled._worker.pid, signal.SIGKILL)
            text.advance(c)
            found.append(text.mask())
        expected.append(found)
    assert expected[0] == expected[1]
    assert len(expected[0]) == 4 * 3


def test_replaying_a_text_has_a_longer_time_limit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text takes longer than a step then, and has done nothing wrong."""
    text = Constraint(model.tokenizer, regex="a{50}")
    a = model.tokenizer.encode("a", add_bos=False)
    text.advance(a)
    seconds: list[tuple[str, float]] = []
    before_each_request(
        monkeypatch, lambda worker, limits, action, *_: seconds.append((action, limits.seconds))
    )
    text.advance(a)
    os.kill(text._compiled._worker.pid, signal.SIGKILL)
    text.advance(a)
    text.advance(a)
    again = [("advance", 0.25), ("compile", 1.0), ("advance", 1.25), ("advance", 0.25)]
    assert seconds == [("advance", 0.25), *again]


def test_a_worker_that_crashes_again_fails_only_the_text(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other = (Constraint(model.tokenizer, regex="[ab]{9}") for _ in range(2))
    a = model.tokenizer.encode("a", add_bos=False)

    def crash(worker: Worker, limits: Any, action: str, *arguments: Any) -> None:
        if action == "advance" and arguments[0] == text.number:
            os.kill(worker.pid, signal.SIGSEGV)

    before_each_request(monkeypatch, crash)
    with pytest.raises(ConstraintError, match=r"matching it takes more than 256 MiB.*exit status -11"):
        text.advance(a)
    assert not other.advance(a).take()


@pytest.mark.parametrize("how", ["dropped", "ended", "cancelled", "closed"])
def test_a_worker_releases_finished_texts(model: Model, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    compiled = Constraint(model.tokenizer, regex="[ab]{9}")._compiled
    released: list[int] = []
    real = Worker.release

    def noted(self: Worker, text: int) -> None:
        assert self is compiled._worker
        released.append(text)
        real(self, text)

    monkeypatch.setattr(Worker, "release", noted)
    if how == "ended":
        "".join(model.generate("A:", 20, regex="[ab]{9}"))
    elif how == "dropped":
        pieces = model.generate("A:", 20, regex="[ab]{9}")
        next(iter(pieces))
        del pieces
    elif how == "closed":
        with model.session() as session:
            stream = session.stream("A:", 20, regex="[ab]{9}")
            next(stream)
        del stream
    else:
        scheduler = Scheduler(model)
        kept = scheduler.submit("A:", 20, regex="[ab]{9}")
        while not scheduler.step_pieces():
            pass  # a worker on a busy machine takes longer than a pass waits for it
        kept.cancel()
        scheduler.step_pieces()
        wait_until(lambda: released)  # after the answer that the pass asked for
    gc.collect()
    assert len(released) == 1


def test_a_worker_releases_texts_that_are_cancelled_after_they_gave_way(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(Worker, "release", lambda self, text: released.append(text))
    scheduler = Scheduler(model, max_streams=2)
    kept = make_streams(model.engine, "A:", 2, 90, regex="[ab]{90}")
    scheduler.enter(kept)
    # One whose constraint has not answered does not give way.
    while not all(stream.writing and stream.text.pending is None for stream in kept):
        scheduler.step_pieces()
    scheduler.enter(make_streams(model.engine, "B:", 1, 90, min_tokens=90))
    while kept[1].core is not None:
        scheduler.step_pieces()
    assert released == []
    kept[1].cancel()
    scheduler.step_pieces()
    assert len(released) == 1


def test_a_worker_drops_finished_texts_immediately() -> None:
    """Their memory is not kept until the next text."""
    ours, theirs = Pipe()
    worker = Worker(ForkServer([], [], []), ours, 0)
    worker._finalizer.detach()
    worker.release(1)
    assert theirs.poll(0)
    with worker._lock:  # a request is in flight: the next one tells it
        worker.release(2)
    assert list(worker._released) == [2]
    ours.close()
    texts = _Texts(None, [])
    texts._texts = {1: (None, []), 2: (None, [])}
    texts.answer(theirs)
    assert list(texts._texts) == [2]
    theirs.close()


def test_dropped_constraints_leave_no_process_and_no_descriptor(model: Model) -> None:
    if sys.platform != "linux":
        pytest.skip("counts descriptors in /proc")
    pids: list[int] = []
    Constraint(model.tokenizer, regex="x")
    before = len(os.listdir("/proc/self/fd"))
    for i in range(3 * _constraint.MOST_KEPT):
        pids.append(Constraint(model.tokenizer, regex=f"a{i}")._compiled._worker.pid)
    assert len(os.listdir("/proc/self/fd")) <= before + _constraint.MOST_KEPT
    gone = [pid for pid in pids if not Path(f"/proc/{pid}").exists()]
    assert len(gone) >= _constraint.MOST_KEPT


def test_worker_processes_end_with_their_tokenizer(demo_path: Path) -> None:
    model = Model(demo_path, device="cpu", threads=1)
    compiled = Constraint(model.tokenizer, regex="a")._compiled
    process, pid = compiled._server._process, compiled._worker.pid
    assert process is not None
    del compiled
    gc.disable()  # nothing waits for the next collection
    try:
        model.close()
        del model
        assert process.returncode is not None
    finally:
        gc.enable()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
