"""Requests with many texts and those of others share streams and passes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.recurrent import ARCHITECTURES
from support.scheduled_texts import finish, passes_until_it_ends
from support.small_models import write
from support.tiny_models import TINY_RECURRENT

from metal_prefill import Model, Scheduler
from metal_prefill.generation import Stream
from metal_prefill.generation._scheduler import (
    LEAST_PROMPT_ROWS,
    PROMPT_TURN,
    ROWS_PER_WRITING,
    SHORT_PROMPT,
)
from metal_prefill.generation._stream import make_streams

Make = Callable[[Model, int], list[Stream]]


def short_text(model: Model) -> Stream:
    return make_streams(model.engine, [1, 2, 3], 1, 8, min_tokens=8, speculate="off")[0]


def many_answers(model: Model, client: int) -> list[Stream]:
    return make_streams(
        model.engine,
        [client + 1, 5, 9],
        124,
        60,
        min_tokens=60,
        temperature=1.0,
        seed=client,
        speculate="off",
    )


def many_prompts(
    model: Model, client: int, length: int = 200, made: int = 50, count: int = 124
) -> list[Stream]:
    streams: list[Stream] = []
    for i in range(count):
        ids = np.random.default_rng([client, i]).integers(1, 900, length)
        streams += make_streams(model.engine, ids, 1, made, min_tokens=made, speculate="off")
    return streams


MANY: dict[str, Make] = {
    "answers": many_answers,
    "prompts": many_prompts,
    "short prompts": partial(many_prompts, length=100, made=1),
    "long prompts": partial(many_prompts, length=400, made=8),
    "rows of one prompt": partial(many_prompts, length=1000, made=8, count=1),
}


def passes_of_a_short_text(scheduler: Scheduler, model: Model) -> list[int]:
    stream = short_text(model)
    scheduler.enter([stream])
    return passes_until_it_ends(scheduler, stream)


def single_rows(passes: list[int]) -> float:
    """Estimate the time of passes in passes of one row, where each further row adds 5 percent."""
    return sum(1 + 0.05 * (rows - 1) for rows in passes)


@pytest.mark.parametrize("begun", [1, 30])
@pytest.mark.parametrize(
    ("what", "clients", "most"),
    [
        *((what, 1, 3) for what in ("answers", "rows of one prompt")),
        *((what, 2, 4) for what in ("prompts", "short prompts", "long prompts")),
        *(("answers", 16, 3), ("prompts", 16, 4), ("rows of one prompt", 16, 5)),
    ],
)
def test_requests_with_many_tokens_delay_a_short_text_by_a_bounded_factor(
    cpu: Model, what: str, clients: int, most: int, begun: int
) -> None:
    scheduler = Scheduler(cpu)
    undisturbed = passes_of_a_short_text(scheduler, cpu)
    assert undisturbed == [3] + [1] * 7
    for client in range(clients):
        scheduler.enter(MANY[what](cpu, client))
    for _ in range(begun):
        scheduler.step()
    disturbed = passes_of_a_short_text(scheduler, cpu)
    assert len(disturbed) == len(undisturbed)
    assert single_rows(disturbed) <= most * single_rows(undisturbed)


def test_streams_are_divided_equally_among_requests(cpu: Model) -> None:
    scheduler = Scheduler(cpu, max_streams=8)
    requests = [many_answers(cpu, client) for client in range(3)]
    active = []
    for request in requests:
        scheduler.enter(request)
        scheduler.step()
        active.append([sum(s.core is not None for s in r) for r in requests])
    assert active == [[8, 0, 0], [4, 4, 0], [3, 3, 2]]
    for stream in requests[0]:
        stream.cancel()
    scheduler.step()
    assert [sum(s.core is not None for s in r) for r in requests] == [0, 4, 4]


def test_requests_take_turns_with_a_single_stream(cpu: Model) -> None:
    scheduler = Scheduler(cpu, max_streams=1)
    requests = [
        make_streams(cpu.engine, [1 + n, 2, 3], n, 3, min_tokens=3, temperature=1.0, seed=n)
        for n in (4, 2, 1)
    ]
    for request in requests:
        scheduler.enter(request)
    streams = [stream for request in requests for stream in request]
    ended: list[int] = []
    while scheduler.streams:
        scheduler.step()
        ended += [i for i, s in enumerate(streams) if s.finish_reason is not None and i not in ended]
    assert ended == [0, 4, 6, 1, 5, 2, 3]


def test_a_flow_of_short_requests_does_not_stop_one_with_many_texts(cpu: Model) -> None:
    scheduler = Scheduler(cpu, max_streams=8)
    many = many_answers(cpu, 0)
    scheduler.enter(many)
    for _ in range(4 * 60):
        while scheduler.waiting < 124:
            scheduler.enter([short_text(cpu)])
        scheduler.step()
    assert sum(s.finish_reason == "length" for s in many) >= 3


def test_prompts_of_the_only_request_have_rows_for_each_of_its_texts(cpu: Model) -> None:
    scheduler = Scheduler(cpu)
    # Prompts of whole turns: shorter last turns of all active prompts would fit one pass with 8 threads.
    scheduler.enter(many_prompts(cpu, 0, length=7 * PROMPT_TURN, made=8))
    while scheduler.last_pass.writing < 8:
        scheduler.step()
    assert scheduler.last_pass.prompts == LEAST_PROMPT_ROWS + scheduler.last_pass.writing * ROWS_PER_WRITING


def test_short_prompts_of_a_request_count_together(cpu: Model) -> None:
    """Many short prompts of one request take as long as a long prompt, and give way like one."""
    scheduler = Scheduler(cpu)
    scheduler.enter(many_prompts(cpu, 0, SHORT_PROMPT // 4, 2))
    few = [many_prompts(cpu, 1 + i, SHORT_PROMPT // 4, 2)[0] for i in range(3)]
    for stream in few:
        scheduler.enter([stream])
    scheduler.step()
    assert [len(stream._made) for stream in few] == [1, 1, 1]


def answers(scheduler: Scheduler, arrivals: list[tuple[int, list[Stream]]]) -> list[list[Any]]:
    """Let requests enter before passes with these numbers; return the pieces and errors of their streams."""
    made: dict[Stream, list[Any]] = {s: [] for _, streams in arrivals for s in streams}
    later = sorted(arrivals, key=lambda arrival: arrival[0])
    step = 0
    while later or scheduler.streams:
        while later and later[0][0] <= step:
            scheduler.enter(later.pop(0)[1])
        for stream, piece in scheduler.step_pieces():
            made[stream].append(piece)
        step += 1
    return [[*pieces, stream.finish_reason, stream.error] for stream, pieces in made.items()]


def requests(model: Model, random: Random, *, constrained: bool) -> list[list[Stream]]:
    """Make requests whose answers are the same for the same random numbers, the first with many texts."""
    found = [make_streams(model.engine, [3, 1, 4], 9, 40, temperature=1.0, seed=9)]
    for i in range(8):
        options: dict[str, Any] = random.choice(
            (
                {"temperature": 1.0, "seed": i},
                {"temperature": 0.8, "seed": i, "repeat_penalty": 1.3, "logprobs": 2},
                {},
                {"logprobs": 1, "prompt_logprobs": True},
                *([{"temperature": 1.0, "seed": i, "regex": "[a-f ]{30,60}"}] if constrained else []),
            )
        )
        n, made = random.choice((1, 1, 2, 9)), random.choice((1, 5, 40))
        n = n if options.get("temperature") else 1
        length = random.choice((1, 5, 64, 100))
        ids = np.random.default_rng(i % 3).integers(1, min(900, model.config.vocab_size), length)
        found.append(make_streams(model.engine, ids, n, made, **options))
    return found


def check_answers(model: Model, seed: int, *, constrained: bool) -> None:
    """Compare answers whose streams give way to others with those of requests alone."""
    expected = []
    for request in requests(model, Random(seed), constrained=constrained):
        expected += answers(Scheduler(model), [(0, request)])
    random = Random(seed)
    together = requests(model, random, constrained=constrained)
    scheduler = Scheduler(model, max_streams=random.choice((2, 3, 5)))
    suspended, real = 0, scheduler._suspend

    def suspend(stream: Stream) -> None:
        nonlocal suspended
        suspended += 1
        real(stream)

    scheduler._suspend = suspend  # type: ignore[method-assign]
    arrivals = [(random.randrange(60) if i else 0, request) for i, request in enumerate(together)]
    assert sorted(map(repr, answers(scheduler, arrivals))) == sorted(map(repr, expected))
    assert suspended > 0


@pytest.mark.parametrize("seed", range(3))
def test_streams_that_give_way_have_the_same_answers(cpu: Model, seed: int) -> None:
    pytest.importorskip("llguidance", reason="needs the extra guide")
    check_answers(cpu, seed, constrained=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streams_of_recurrent_models_that_give_way_have_the_same_answers(
    tmp_path: Path, architecture: str
) -> None:
    path = write(tmp_path / "tiny.gguf", TINY_RECURRENT[architecture])
    with Model(path, device="cpu", threads=1, kv_dtype="f32") as model:
        check_answers(model, 0, constrained=False)


def test_giving_way_does_not_change_how_many_tokens_were_cached(cpu: Model) -> None:
    prompt = np.random.default_rng(3).integers(1, 900, 100)
    scheduler = Scheduler(cpu, max_streams=2)
    scheduler.submit(prompt[:70], 1)
    scheduler.step()
    many = make_streams(cpu.engine, prompt, 2, 40, min_tokens=40, temperature=1.0, seed=0)
    scheduler.enter(many)
    for _ in range(20):
        scheduler.step()
    before = [stream.cached_tokens for stream in many]
    other = short_text(cpu)
    scheduler.enter([other])
    scheduler.step()
    assert [stream.core is None for stream in many] == [False, True]
    finish(scheduler)
    assert other.finish_reason == "length"
    assert [stream.cached_tokens for stream in many] == before
    assert before == [70, 99]
