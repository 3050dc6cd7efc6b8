"""Requests that several passes compute, and prefixes that they share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.folders import model_folders

from metal_prefill import KVMemoryError, Model, SessionBusyError, _core
from metal_prefill.conversion import convert

Ids = npt.NDArray[np.int32]
SHARED, OWN = 150, (5, 40, 1)


@pytest.fixture
def model(demo_path: Path) -> Any:
    with Model(demo_path, device="cpu", prefix_memory=0) as model:
        yield model


def ids_of(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng([seed, n]).integers(1, 900, n).astype(np.int32)


def prompts() -> list[Ids]:
    return [np.concatenate([ids_of(SHARED), ids_of(n, 1)]) for n in OWN]


def finish(model: Model, requests: Sequence[_core.Request], rows: int, turn: int = 64) -> list[list[int]]:
    """Compute passes until all requests are finished; return the rows of each request by pass."""
    passes = []
    before = [0] * len(requests)
    while not all(request.finished for request in requests):
        some = [request for request in requests if not request.finished]
        model.engine.core.forward_pass([(some, rows, turn), ([], 0, 0)])
        after = [request.computed for request in requests]
        passes.append([b - a for a, b in zip(before, after, strict=True)])
        before = after
        assert sum(passes[-1]) > 0
    return passes


def test_rows_are_given_in_turns_and_the_rest_in_order(model: Model) -> None:
    requests = [_core.Request.hidden(model.session().native, ids_of(n, n)) for n in (100, 20, 100)]
    assert finish(model, requests, rows=90, turn=32) == [[38, 20, 32], [58, 0, 32], [4, 0, 36]]


def test_a_request_of_several_passes_has_the_result_of_one(model: Model) -> None:
    ids = ids_of(200)
    for make, rows in ((_core.Request.hidden, 70), (_core.Request.log_probs, 199), (_core.Request.greedy, 9)):
        request = make(model.session().native, ids, rows)
        finish(model, [request], rows=31)
        whole = make(model.session().native, ids, rows).run()
        assert np.array_equal(request.take_result(), whole)


def test_a_prefix_is_computed_once_by_the_passes_of_a_scheduler(model: Model) -> None:
    requests = [_core.Request.logits(model.session().native, ids, reuse=True) for ids in prompts()]
    finish(model, requests, rows=60)
    assert sum(request.computed for request in requests) == SHARED + sum(OWN)
    for request, ids in zip(requests, prompts(), strict=True):
        assert np.array_equal(request.take_result(), model.session().forward_prompt_logits(ids))


def test_log_probabilities_of_a_prefix_are_copied(model: Model) -> None:
    scratch = _core.Scratch(model.engine.core)
    requests = [_core.Request.log_probs(scratch, ids, len(ids) - 1) for ids in prompts()]
    passes = finish(model, requests, rows=60)
    # All but the last token of the first; of others, the last shared token and all but the last after it.
    assert sum(map(sum, passes)) == SHARED + sum(OWN) - 1
    for request, ids in zip(requests, prompts(), strict=True):
        assert np.array_equal(request.take_result(), model.session().score(ids))


def test_scratches_share_prefixes_with_no_others_and_release_their_pages(model: Model) -> None:
    core = model.engine.core
    requests = [_core.Request.hidden(_core.Scratch(core), ids) for ids in prompts()]
    core.forward_batch(list(requests))
    assert [request.computed for request in requests] == [SHARED + n for n in OWN]
    assert model.stats()["kv_pool_bytes"] == 0


def test_many_texts_need_the_memory_of_those_in_progress(demo_path: Path) -> None:
    with Model(demo_path, device="cpu") as model:
        page = int(model.stats()["kv_page_bytes"])
    with Model(demo_path, device="cpu", kv_memory=8 * page, prefix_memory=0, chunk_tokens=64) as model:
        scratch = _core.Scratch(model.engine.core)
        requests = [_core.Request.hidden(scratch, ids_of(40, i)) for i in range(100)]
        assert not any(isinstance(r, Exception) for r in model.engine.core.forward_batch(list(requests)))


def test_a_request_ends_if_another_call_changes_its_session(model: Model) -> None:
    session = model.session()
    request = _core.Request.greedy(session.native, ids_of(50))
    core = model.engine.core
    core.forward_pass([([request], 20, 20), ([], 0, 0)])
    assert session.position == 20
    session.rewind(3)
    core.forward_pass([([request], 20, 20), ([], 0, 0)])
    assert request.finished
    assert isinstance(request.take_result(), SessionBusyError)


def test_a_request_that_fails_in_a_later_pass_changes_nothing(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", kv_memory=1, prefix_memory=0) as model:  # one page
        session = model.session()
        session.forward_prompt(ids_of(10))
        request = _core.Request.greedy(session.native, ids_of(100))
        core = model.engine.core
        core.forward_pass([([request], 40, 40), ([], 0, 0)])
        assert session.position == 50
        core.forward_pass([([request], 40, 40), ([], 0, 0)])
        assert isinstance(request.take_result(), KVMemoryError)
        assert session.tokens == ids_of(10).tolist()


def test_a_request_is_in_one_call_at_a_time(model: Model) -> None:
    request = _core.Request.greedy(model.session().native, ids_of(5))
    with pytest.raises(ValueError, match="a request is computed once"):
        model.engine.core.forward_pass([([request, request], 5, 5)])
    finish(model, [request], rows=2)


def test_common_prefixes_are_measured_in_tokens() -> None:
    a = np.array([1, 2, 3], np.int32)
    for b, expected in (([1, 2, 3], 3), ([1, 2], 2), ([1, 5, 3, 4], 1), ([2], 0), ([], 0)):
        assert _core.common_prefix(a, np.array(b, np.int32)) == expected


def test_whole_texts_are_divided_among_passes(tmp_path: Path) -> None:
    with Model(
        convert(model_folders.bert(tmp_path / "m").write(), tmp_path / "m.gguf"), device="cpu"
    ) as model:
        core, lengths = model.engine.core, np.array([5, 9, 3, 8], np.int32)
        tokens = np.arange(1, lengths.sum() + 1, dtype=np.int32)
        texts, whole = (_core.Texts(core, tokens, lengths, "mean") for _ in range(2))
        rows = []
        while not texts.finished:
            before = texts.computed
            core.forward_pass([([texts], 9, 9), ([], 0, 0)])
            rows.append(texts.computed - before)
        assert rows == [8, 9, 8]
        ((expected, errors),) = core.forward_batch([whole])
        assert not errors
        assert np.array_equal(texts.take_result()[0], expected)
