"""Benchmark cases: their names, and the tokens that every engine receives."""

import pytest

from metal_prefill.bench._cases import Case, make_cases, stream_ids, token_ids


def test_cases_have_the_names_of_llama_bench() -> None:
    cases = make_cases([32, 512], 64, depth=32)
    assert [case.name for case in cases] == ["pp32", "pp512", "tg64"]
    assert [case.timed_tokens for case in cases] == [32, 512, 64]
    assert [case.context for case in cases] == [32, 512, 96]


def test_decoding_is_optional() -> None:
    assert [case.name for case in make_cases([7], 0)] == ["pp7"]


@pytest.mark.parametrize(("prompts", "n_gen"), [([0], 1), ([-3], 1), ([4, 4], 1), ([], 0), ([4], -1)])
def test_invalid_cases_are_rejected(prompts: list[int], n_gen: int) -> None:
    with pytest.raises(ValueError, match=r"prompt|decod|measure"):
        make_cases(prompts, n_gen)


def test_stream_cases_are_named_by_count_and_count_all_tokens() -> None:
    cases = make_cases([32], 64, depth=30, streams=[1, 8])
    assert [case.name for case in cases] == ["pp32", "tg64", "tg64x1", "tg64x8", "pp16x64"]
    assert [case.timed_tokens for case in cases] == [32, 64, 64, 512, 1024]
    assert [case.context for case in cases] == [32, 94, 94, 94, 16]  # of each stream


@pytest.mark.parametrize(("n_gen", "streams"), [(4, [0]), (4, [-1]), (4, [2, 2]), (0, [2])])
def test_invalid_streams_are_rejected(n_gen: int, streams: list[int]) -> None:
    with pytest.raises(ValueError, match="streams"):
        make_cases([8], n_gen, streams=streams)


def test_streams_start_with_different_tokens() -> None:
    ids = stream_ids(Case(16, 0, 0, 64), vocab_size=50_000)
    assert ids.shape == (64, 16)
    assert len(set(ids[:, 0].tolist())) == 64  # nothing to share
    assert (ids == stream_ids(Case(16, 0, 0, 64), 50_000)).all()


def test_every_engine_gets_the_same_tokens() -> None:
    ids = token_ids(100, vocab_size=50)
    assert ids.min() >= 0
    assert ids.max() < 50
    assert (token_ids(100, 50) == ids).all()
    assert (token_ids(30, 50) == ids[:30]).all()
