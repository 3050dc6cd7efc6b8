"""Streams that run out of memory wait, and fail only if they fail alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.recurrent import LARGE, page_bytes, state_bytes
from support.scheduled_texts import finish, texts_of
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


TEXTS = st.lists(
    st.tuples(
        st.integers(1, 256),  # tokens of the prompt, at most as many as fit
        st.integers(1, 90),  # tokens of the text
        st.integers(1, 3),  # kind of prompt: those of one kind have a common prefix
        st.booleans(),  # whether the text is sampled
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    pages=st.integers(1, 4),
    snapshots=st.integers(0, 5),
    prefix_pages=st.sampled_from([0, 4, 1000]),
    max_streams=st.integers(2, 6),
    speculate=st.sampled_from(["lookup", "off"]),
    texts=TEXTS,
)
@example(5, 0, 0, 6, "off", [(100, 40, kind, False) for kind in range(6)])  # they wait for each other
@example(2, 0, 0, 6, "off", [(60, 20, 1, False), (60, 20, 2, False)])  # both need a page in one pass
# The second time, its second page is shared in part: that page is kept next to that of the session.
@example(4, 0, 4, 6, "off", [(104, 90, 1, False)] * 2)
# If only the prefix cache shares a page, no copy of it is needed before the text continues in it.
@example(1, 0, 1, 6, "off", [(40, 5, 0, False)] * 2)
# The first prompt is known without states. Its first page is evicted before the others are copied.
@example(4, 0, 1000, 3, "lookup", [(129, 2, 1, False), (129, 1, 1, False), (65, 1, 2, False)])
# The last prompt writes states where others end: not where only the state after its rows has room.
@example(3, 0, 0, 3, "lookup", [(1, 1, 1, False), (16, 2, 1, False), (189, 1, 1, False)])
def test_a_stream_fails_for_memory_only_where_it_fails_alone(
    path: Path,
    pages: int,
    snapshots: int,
    prefix_pages: int,
    max_streams: int,
    speculate: str,
    texts: list[tuple[int, int, int, bool]],
) -> None:
    with Model(path, device="cpu", threads=1) as model:
        page, state, ids = page_bytes(model), state_bytes(model), min(900, model.config.vocab_size)
    states = (3 + snapshots) * (state and state + 4096)  # what one text needs, in whole pages of the system
    memory: dict[str, Any] = {"kv_memory": pages * page + states, "prefix_memory": prefix_pages * page}
    with Model(path, device="cpu", threads=1, **memory) as model:
        prompts = [
            np.random.default_rng(kind).integers(1, ids, min(length, 64 * pages))
            for length, _, kind, _ in texts
        ]
        options: list[dict[str, Any]] = [
            {"max_tokens": made, "seed": i, "temperature": 0.9 if sampled else 0.0, "speculate": speculate}
            for i, (_, made, _, sampled) in enumerate(texts)
        ]
        expected = [result_alone(model, p, **o) for p, o in zip(prompts, options, strict=True)]
        for prompt, (_, made, _, _), (_, error) in zip(prompts, texts, expected, strict=True):
            assert error is None or len(prompt) + made - 1 > 64 * pages
        # The prefix cache takes no memory from a text.
        for _ in range(2):
            scheduler = Scheduler(model, max_streams=max_streams)
            streams = [scheduler.submit(p, **o) for p, o in zip(prompts, options, strict=True)]
            assert results_together(scheduler, streams) == expected


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
