"""Texts of many prompts match those of single prompts, from a loop and from tasks."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scheduled_texts import TEXTS, alone, finish
from support.threads import at_once

from metal_prefill import ClosedError, ContextOverflowError, Model, Piece, Scheduler, SessionBusyError
from metal_prefill.generation import Stream


@pytest.mark.parametrize("max_streams", [1, 3, 32])
def test_pieces_match_those_of_single_prompts(cpu: Model, max_streams: int) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.8 if i % 2 else 0.0, "seed": i, "max_tokens": 5 + 3 * i, "logprobs": 2}
        for i in range(8)
    ]
    prompts = [(TEXTS[i % 4], more) for i, more in enumerate(options)]
    made: list[list[Any]] = [[] for _ in prompts]
    for index, piece in cpu.stream_many(prompts, max_streams=max_streams):
        made[index].append(piece)
    assert made == [list(cpu.session().stream(text, **more)) for text, more in prompts]
    assert cpu.position == 0


def test_each_text_has_its_finish_reason(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", max_context=30) as model:
        scheduler = Scheduler(model)
        length = scheduler.submit([1, 2, 3], 4)
        context = scheduler.submit([1] * 20, 40)
        stopped = scheduler.submit([1, 2, 3], 20, stop=alone(model, [1, 2, 3], 20)[5])
        cancelled = scheduler.submit([4], 100)
        cancelled.cancel()
        finish(scheduler)
        reasons = [s.finish_reason for s in (length, context, stopped, cancelled)]
        assert reasons == ["length", "context", "stop", "cancelled"]
        assert model.stats()["kv_pool_bytes"] == model.stats()["prefix_bytes"]


def test_memory_does_not_grow_with_the_number_of_prompts(demo_path: Path) -> None:
    most = {}
    for prompts in (10, 200):
        with Model(demo_path, device="cpu", prefix_memory=0) as model:
            texts = ([i % 50 + 1, 5] for i in range(prompts))
            pieces = model.generate_many(texts, 2, max_streams=4)
            most[prompts] = max(model.stats()["kv_pool_bytes"] for _ in pieces)
    assert most[200] == most[10] > 0


@pytest.mark.parametrize("n", [1, 2])
def test_errors_of_single_prompts_are_raised_or_returned(cpu: Model, n: int) -> None:
    prompts: list[Any] = [[1, 2], [1 << 20], [3] * 2000, [4, 5]]
    with pytest.raises(ValueError, match="prompt 1: token id"):
        list(cpu.generate_many(prompts, 3, n=n))
    results = list(cpu.generate_many(prompts, 3, n=n, errors="return"))
    errors = {index: type(item) for index, item in results if isinstance(item, Exception)}
    assert errors == dict(zip(range(n, 3 * n), [ValueError] * n + [ContextOverflowError] * n, strict=True))
    assert all(str(item).startswith(f"prompt {i // n}: ") for i, item in results if i in errors)
    assert {index for index, item in results if isinstance(item, str)} == {*range(n), *range(3 * n, 4 * n)}
    with pytest.raises(ValueError, match="errors must be"):
        cpu.generate_many([], errors="ignore")
    with pytest.raises(TypeError, match="prompts must be a sequence of prompts, got one str"):
        cpu.generate_many("one prompt")


class CodedError(Exception):
    """An exception that needs more than a message."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


def test_errors_of_any_class_name_their_prompt(cpu: Model) -> None:
    def drafts(tokens: list[int]) -> list[int]:
        raise CodedError(7, "no drafts")

    prompts: list[Any] = ["\ud800", ([1, 2], {"speculate": drafts, "max_tokens": 9}), ([3], {"n": 2}), [4]]
    results = dict(cpu.generate_many(prompts, 2, errors="return"))
    assert [type(results[i]) for i in range(4)] == [UnicodeError, Exception, TypeError, str]
    assert str(results[0]).startswith("prompt 0: 'utf-8' codec can't encode character")
    assert str(results[1]) == "prompt 1: no drafts (7)"
    assert str(results[2]).startswith("prompt 2: 'n' is not an option of a text")
    with pytest.raises(UnicodeError, match="prompt 0: ") as raised:
        list(cpu.generate_many(prompts, 2))
    assert isinstance(raised.value.__cause__, UnicodeEncodeError)


def test_progress_counts_prompts_that_ended(cpu: Model) -> None:
    seen: list[tuple[int, int]] = []
    list(cpu.generate_many([[i + 1] for i in range(5)], 3, progress=lambda *counts: seen.append(counts)))
    assert seen[-1] == (5, 5)
    assert [done for done, _ in seen] == [1, 2, 3, 4, 5]


async def text_of_task(model: Model, prompt: Any, max_tokens: int) -> str:
    return "".join([piece async for piece in model.generate_async(prompt, max_tokens)])


def test_tasks_of_several_event_loops_share_one_engine_loop(cpu: Model) -> None:
    expected = [alone(cpu, p, 20) for p in TEXTS]

    async def all_texts() -> list[str]:
        return await asyncio.gather(*(text_of_task(cpu, p, 20) for p in TEXTS))

    assert asyncio.run(all_texts()) == expected
    assert at_once(lambda i: asyncio.run(text_of_task(cpu, TEXTS[i], 20))) == expected  # a loop for each


def test_leaving_the_loop_cancels_the_rest(cpu: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Stream] = []
    enter = Scheduler.enter

    def noting(self: Scheduler, entering: list[Stream]) -> None:
        streams.extend(entering)
        enter(self, entering)

    monkeypatch.setattr(Scheduler, "enter", noting)

    async def first_piece() -> str:
        pieces = cpu.generate_async(TEXTS[0], 900)
        async for piece in pieces:
            await pieces.aclose()  # type: ignore[attr-defined]
            assert streams[0].finish_reason == "cancelled"
            return piece
        return ""

    assert asyncio.run(first_piece())


def test_errors_reach_the_task(cpu: Model) -> None:
    with pytest.raises(ContextOverflowError, match="a prompt of 2000 tokens"):
        asyncio.run(text_of_task(cpu, [1] * 2000, 3))
    cpu.close()
    with pytest.raises(ClosedError):
        asyncio.run(text_of_task(cpu, [1], 3))


def test_a_draft_function_cannot_start_a_pass(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    errors: list[Exception] = []

    def draft(ids: Any) -> list[int]:
        with pytest.raises(SessionBusyError, match="the scheduler is computing a pass") as caught:
            scheduler.step()
        errors.append(caught.value)
        return []

    streams = [scheduler.submit(TEXTS[0], 20, speculate=draft), scheduler.submit(TEXTS[1], 20)]
    assert list(finish(scheduler, streams).values()) == [alone(cpu, text, 20) for text in TEXTS[:2]]
    assert errors


def test_answers_to_a_prompt_share_one_prefill(demo: Model) -> None:
    ids = np.random.default_rng(5).integers(1, 900, 24 if demo.backend == "metal" else 300)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "speculate": "off"}
    scheduler = Scheduler(demo)
    texts_by_stream = dict.fromkeys(scheduler.submit_answers(ids, 3, 5, min_tokens=5, **options), "")
    rows = 0
    while scheduler.streams:
        for stream, text in scheduler.step():
            texts_by_stream[stream] += text
        rows += scheduler.last_pass.prompts + scheduler.last_pass.writing
    assert rows == len(ids) + 2 + 3 * 4  # the last token once more for each other answer
    texts = list(texts_by_stream.values())
    assert texts[0] == alone(demo, ids, 5, min_tokens=5, **options)
    assert len(set(texts)) == 3
    pieces = list(demo.stream_many([ids], 5, n=3, logprobs=1, min_tokens=5, **options))
    for i, text in enumerate(texts):
        own = [piece for answer, piece in pieces if answer == i and isinstance(piece, Piece)]
        assert "".join(piece.text for piece in own) == text
        assert [piece.finish_reason for piece in own] == [None] * 4 + ["length"]
        assert all(piece.logprob is not None for piece in own)


def test_answers_continue_if_the_first_ends_immediately(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    streams = scheduler.submit_answers([1, 2, 3], 3, 1, temperature=1.0, seed=1)
    finish(scheduler)
    assert [s.finish_reason for s in streams] == ["length"] * 3
