"""A text whose constraint answers late is left out of passes, and the other texts continue."""

import threading
import time
from typing import Any

import pytest
from support.scheduled_texts import finish

from metal_prefill import Model, Scheduler
from metal_prefill._support import threads
from metal_prefill.generation import Stream, _constraint, _scheduler
from metal_prefill.generation._constraint import Constraint, _Compiled
from metal_prefill.generation._stream import make_streams

pytest.importorskip("llguidance", reason="needs the extra guide")

SLOW: dict[str, Any] = {"regex": "[ab]{12}", "seed": 5, "temperature": 1.0}


class Gate:
    """Holds back answers of constraints, and counts the requests that arrive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.arrived = 0
        real = _Compiled.ask

        def ask(compiled: _Compiled, text: Constraint, asked: str, *arguments: Any) -> Any:
            if asked == "advance":
                self.arrived += 1
                self.reached.set()
                assert self.open.wait(60)
            return real(compiled, text, asked, *arguments)

        monkeypatch.setattr(_Compiled, "ask", ask)


@pytest.mark.parametrize("late_before", [False, True])
def test_other_texts_continue_while_a_constraint_is_slow(
    model: Model, monkeypatch: pytest.MonkeyPatch, late_before: bool
) -> None:
    """A source whose last answer was late is not waited for."""
    expected = ["".join(model.generate("A:", 20, **SLOW)), "".join(model.generate("ROMEO:\n", 20))]
    gate = Gate(monkeypatch)
    scheduler = Scheduler(model)
    slow, other = scheduler.submit("A:", 20, **SLOW), scheduler.submit("ROMEO:\n", 20)
    assert slow.text.guide is not None
    constraint, begin = slow.text.guide.constraint, time.monotonic()
    if late_before:
        constraint._compiled.slow = True
        for module in (_constraint, _scheduler):
            monkeypatch.setattr(module, "BATCH_PATIENCE", 60.0)
    texts = {slow: "", other: ""}
    while other.finish_reason is None:
        for stream, text in scheduler.step():
            texts[stream] += text
    assert texts == {slow: "", other: expected[1]}
    assert gate.reached.wait(60)
    assert gate.arrived == 1
    if late_before:
        assert constraint.ahead([1], begin + 60) == []
    assert time.monotonic() < begin + 60
    gate.open.set()
    assert list(finish(scheduler, texts).values()) == expected
    assert not (late_before and constraint.slow)  # the latest answer was not late


def test_a_pass_is_not_computed_while_every_text_waits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    scheduler = Scheduler(model)
    stream = scheduler.submit("A:", 20, **SLOW)
    scheduler.step()
    passes = scheduler.passes
    begin = time.perf_counter()
    for _ in range(3):
        assert scheduler.step() == []
    assert time.perf_counter() - begin >= 2 * _constraint.BATCH_PATIENCE  # the loop does not spin
    assert (scheduler.passes, scheduler.busy) == (passes, True)
    gate.open.set()
    finish(scheduler)
    assert stream.finish_reason == "stop"


def test_a_text_that_waits_for_its_constraint_does_not_give_way(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that a pass chose for it would be lost."""
    scheduler = Scheduler(model)
    expected = finish(scheduler, scheduler.submit_answers("A:", 2, 20, **SLOW))
    gate = Gate(monkeypatch)
    scheduler = Scheduler(model, max_streams=2)
    slow = make_streams(model.engine, "A:", 2, 20, **SLOW)
    scheduler.enter(slow)
    while gate.arrived < 2:
        scheduler.step()
    (other,) = make_streams(model.engine, "ROMEO:\n", 1, 20)
    scheduler.enter([other])
    assert scheduler.step() == []
    assert other.core is None
    gate.open.set()
    texts = finish(scheduler, (*slow, other))
    assert list(texts.values())[:2] == list(expected.values())


def test_late_masks_for_drafts_do_not_change_the_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def proposed(so_far: list[int]) -> list[int]:
        return [*so_far[-1:], *ab]

    ab = [model.tokenizer.encode(letter, add_bos=False)[0] for letter in "ab"]
    expected = "".join(model.generate("A:", 20, **SLOW, speculate="off"))
    aheads, real = 0, _Compiled.ask

    def late(compiled: _Compiled, text: Constraint, action: str, *arguments: Any) -> Any:
        nonlocal aheads
        if action == "ahead":
            aheads += 1
            time.sleep(2 * _constraint.BATCH_PATIENCE)
        return real(compiled, text, action, *arguments)

    monkeypatch.setattr(_Compiled, "ask", late)
    monkeypatch.setattr("metal_prefill.generation._speculation.Speculation._best_count", lambda *_: 2)
    scheduler = Scheduler(model)
    scheduler.submit("A:", 20, **SLOW, speculate=proposed)
    assert list(finish(scheduler).values()) == [expected]
    assert aheads > 1


def test_a_text_cancelled_while_its_constraint_computes_is_released(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would otherwise look up a text that it has released, and end."""
    gate = Gate(monkeypatch)
    scheduler = Scheduler(model)
    streams = [scheduler.submit("A:", 20, **SLOW) for _ in range(2)]
    gate.open.set()
    while not streams[0].text.sampler or streams[0]._made == []:
        scheduler.step()
    gate.open.clear()
    scheduler.step()
    assert streams[0].text.guide is not None
    guide = streams[0].text.guide.constraint
    assert guide.pending is not None
    pending, worker = guide.pending, guide.worker
    streams[0].cancel()
    scheduler.step()
    assert guide.worker is worker
    gate.open.set()
    pending.result(60)
    while guide.worker is not None:
        time.sleep(0.001)
    finish(scheduler)
    assert streams[1].finish_reason == "stop"
    assert guide._compiled.refusal is None
    assert guide._compiled._worker is worker


def test_results_left_by_ctrl_c_are_used_by_the_next_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["A:", "ROMEO:\n", "B:"]
    expected = ["".join(model.generate(prompt, 12)) for prompt in prompts]
    scheduler = Scheduler(model)
    texts = {scheduler.submit(prompt, 12): "" for prompt in prompts}
    real, calls = Stream.take, 0

    def interrupted(stream: Stream, chosen: list[int]) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 2:
            raise KeyboardInterrupt
        return real(stream, chosen)

    monkeypatch.setattr(Stream, "take", interrupted)
    interrupts = 0
    while scheduler.busy:
        try:
            for stream, text in scheduler.step():
                texts[stream] += text
        except KeyboardInterrupt:
            interrupts += 1
    assert list(texts.values()) == expected
    assert interrupts > 3


def test_jobs_do_not_wait_for_each_other_and_threads_are_kept() -> None:
    gate = threading.Event()
    blocked = [threads.in_thread(gate.wait, 60) for _ in range(3)]
    assert threads.in_thread(threading.get_ident).result(60) != threading.get_ident()
    gate.set()
    assert all(future.result(60) for future in blocked)
    before = threading.active_count()
    for _ in range(20):
        threads.in_thread(int).result(60)
    assert threading.active_count() == before
