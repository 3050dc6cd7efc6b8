"""Streams that run out of memory wait, and fail only where they fail alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recurrent import LARGE, page_bytes, state_bytes
from support.scheduled_texts import alone, finish, texts_of
from support.small_models import write

from metal_prefill import KVMemoryError, Model, Scheduler
from metal_prefill.generation import Stream


@pytest.fixture(scope="module", params=["attention", *LARGE])
def path(
    request: pytest.FixtureRequest, tiny_demo_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Path of a tiny model, or of one whose states take more memory than a page."""
    if request.param == "attention":
        return tiny_demo_path
    return write(tmp_path_factory.mktemp("large") / f"{request.param}.gguf", LARGE[request.param])


def test_a_prompt_that_never_fits_is_rejected_before_anything_is_computed(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", kv_memory=1, prefix_memory=0) as model:  # one page
        limit = r"65 tokens do not fit: .* exceeds kv_memory of \d+ bytes \(1 pages of 64 positions\)"
        with pytest.raises(KVMemoryError, match=f"prompt 1: {limit}"):
            list(model.generate_many([[1] * 64, [1] * 65], 1))
        scheduler = Scheduler(model)
        with pytest.raises(KVMemoryError, match=limit):
            scheduler.submit([1] * 60, 10, min_tokens=6)  # of which the last one needs no memory
        assert not scheduler.busy
        assert model.stats()["kv_pool_bytes"] == 0
        assert len(texts_of(model.generate_many([[1] * 64], 1), 1)) == 1
        scheduler.submit([1] * 60, 10, min_tokens=5)
        assert scheduler.step()


def result_alone(model: Model, prompt: Any, max_tokens: int, **options: Any) -> tuple[str, type | None]:
    """Continue a prompt in a separate session; return its text and its error."""
    text = ""
    with model.session() as session:
        try:
            for piece in session.generate(prompt, max_tokens, **options):
                text += piece
        except KVMemoryError as error:
            return text, type(error)
    return text, None


def results_together(scheduler: Scheduler, streams: list[Stream]) -> list[tuple[str, type | None]]:
    texts = finish(scheduler, streams)
    return [(texts[s], None if s.error is None else type(s.error)) for s in streams]


def check_together(
    model: Model, prompts: list[Any], options: list[dict[str, Any]], max_streams: int
) -> list[tuple[str, type | None]]:
    """Return the result of each prompt alone, which is the same in common passes."""
    expected = [result_alone(model, p, **o) for p, o in zip(prompts, options, strict=True)]
    scheduler = Scheduler(model, max_streams=max_streams)
    streams = [scheduler.submit(p, **o) for p, o in zip(prompts, options, strict=True)]
    assert results_together(scheduler, streams) == expected
    return expected


@pytest.mark.parametrize(
    ("pages", "prefix_pages", "texts"),
    [
        (5, 0, [(100, 40, kind) for kind in range(6)]),  # which wait for each other
        (2, 0, [(60, 20, 1), (60, 20, 2)]),  # both need a page in the same pass
        # The second time, its second page is shared in part: that page is kept next to that of the session.
        (4, 4, [(104, 90, 1)] * 2),
        # Where only the prefix cache shares a page, no copy of it is needed before the text continues in it.
        (1, 1, [(40, 5, 0)] * 2),
    ],
)
def test_texts_fit_together_where_each_fits(
    bundled: Model, demo_path: Path, pages: int, prefix_pages: int, texts: list[tuple[int, int, int]]
) -> None:
    page = page_bytes(bundled)
    with Model(demo_path, device="cpu", kv_memory=pages * page, prefix_memory=prefix_pages * page) as model:
        prompts = [np.random.default_rng(kind).integers(1, 900, length) for length, _, kind in texts]
        options: list[dict[str, Any]] = [
            {"max_tokens": n, "min_tokens": n, "speculate": "off"} for _, n, _ in texts
        ]
        expected = [(alone(bundled, p, **o), None) for p, o in zip(prompts, options, strict=True)]
        for _ in range(2):
            assert check_together(model, prompts, options, max_streams=6) == expected


@pytest.mark.parametrize(
    ("pages", "texts", "prefix_memory"),
    [
        # The first prompt is known without states. Its first page is evicted before the others are copied.
        (4, [(129, 2, 1), (129, 1, 1), (65, 1, 2)], 1 << 30),
        # The last prompt writes states where others end: not where only the state after its rows has room.
        (3, [(1, 1, 1), (16, 2, 1), (189, 1, 1)], 0),
    ],
)
def test_texts_with_states_fit_together_where_each_fits(
    tmp_path: Path, pages: int, texts: list[tuple[int, int, int]], prefix_memory: int
) -> None:
    path = write(tmp_path / "m.gguf", LARGE["lfm2"])
    with Model(path, device="cpu", threads=1) as model:
        memory = pages * page_bytes(model) + 3 * (state_bytes(model) + 4096)
        ids = model.config.vocab_size
    with Model(path, device="cpu", threads=1, kv_memory=memory, prefix_memory=prefix_memory) as model:
        prompts = [np.random.default_rng(kind).integers(1, ids, length) for length, _, kind in texts]
        options = [{"max_tokens": most} for _, most, _ in texts]
        results = check_together(model, prompts, options, max_streams=3)
        assert [error for _, error in results] == [None] * 3


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_stream_fails_for_memory_only_where_it_fails_alone(path: Path, data: st.DataObject) -> None:
    with Model(path, device="cpu", threads=1) as model:
        page, state, ids = page_bytes(model), state_bytes(model), min(900, model.config.vocab_size)
    pages = data.draw(st.integers(1, 4), label="pages")
    states = 3 + data.draw(st.integers(0, 5), label="states")  # what one text needs, and snapshots
    memory = pages * page + states * (state and state + 4096)  # a whole number of the system's pages
    texts = data.draw(
        st.lists(
            st.tuples(
                st.integers(1, 64 * pages),
                st.integers(1, 90),
                st.integers(1, 3),
                st.booleans(),
                st.sampled_from(["lookup", "off"]),
            ),
            min_size=2,
            max_size=6,
        ),
        label="tokens of the prompt, of the text, kind of prompt, sampled, speculate",
    )
    prefix_memory = data.draw(st.sampled_from([0, 4 * page, memory]), label="prefix_memory")
    with Model(path, device="cpu", threads=1, kv_memory=memory, prefix_memory=prefix_memory) as model:
        prompts = [np.random.default_rng(kind).integers(1, ids, length) for length, _, kind, _, _ in texts]
        options: list[dict[str, Any]] = [
            {"max_tokens": made, "seed": i, "temperature": 0.9 if sampled else 0.0, "speculate": speculate}
            for i, (_, made, _, sampled, speculate) in enumerate(texts)
        ]
        expected = [result_alone(model, p, **o) for p, o in zip(prompts, options, strict=True)]
        # What the prefix cache holds takes no memory from a text.
        max_streams = data.draw(st.integers(2, 6), label="max_streams")
        assert check_together(model, prompts, options, max_streams) == expected


def test_streams_enter_again_after_memory_ran_out(bundled: Model, demo_path: Path) -> None:
    page = page_bytes(bundled)
    with Model(demo_path, device="cpu", kv_memory=6 * page, prefix_memory=0) as model:
        scheduler = Scheduler(model, max_streams=4)
        for i in range(4):
            scheduler.submit([1 + i] * 180, 8, min_tokens=8)  # three pages each
        least = 4
        while scheduler.streams:
            scheduler.step()
            least = min(least, scheduler.max_streams)
        assert least < 4
        for i in range(20):
            scheduler.submit([1 + i] * 5, 8, min_tokens=8)
        together: list[int] = []
        while scheduler.streams:
            scheduler.step()
            together.append(scheduler.last_pass.writing)
        assert max(together) == 4
        assert scheduler.max_streams == 4


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_that_do_not_fit_in_memory_are_dropped(demo_path: Path, sampled: bool) -> None:
    ids = np.random.default_rng(0).integers(1, 900, 60)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3} if sampled else {}
    with Model(demo_path, device="cpu", kv_memory=1) as model:  # one page
        tokens = [p.token for p in model.session().stream(ids, 5, speculate="off", **options)]
        options |= {"stop": tokens[4], "speculate": lambda so_far: [*tokens[len(so_far) - 60 :], *[7] * 9]}
        expected = model.tokenizer.decode(tokens[:4])
        assert result_alone(model, ids, 30, **options) == (expected, None)
        scheduler = Scheduler(model)
        assert results_together(scheduler, [scheduler.submit(ids, 30, **options)]) == [(expected, None)]
