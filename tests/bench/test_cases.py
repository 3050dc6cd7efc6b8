"""What is measured: the tests of a benchmark, and the tokens that every engine gets."""

from __future__ import annotations

import pytest

from metal_prefill._bench.cases import make_cases, token_ids


def test_cases_are_named_as_llama_bench_names_them() -> None:
    cases = make_cases([32, 512], 64, depth=32)
    assert [case.name for case in cases] == ["pp32", "pp512", "tg64"]
    assert [case.timed_tokens for case in cases] == [32, 512, 64]
    assert [case.context for case in cases] == [32, 512, 96]


def test_decoding_can_be_left_out() -> None:
    assert [case.name for case in make_cases([7], 0)] == ["pp7"]


@pytest.mark.parametrize(("prompts", "n_gen"), [([0], 1), ([-3], 1), ([4, 4], 1), ([], 0), ([4], -1)])
def test_impossible_cases_are_refused(prompts: list[int], n_gen: int) -> None:
    with pytest.raises(ValueError, match=r"prompt|decod|measure"):
        make_cases(prompts, n_gen)


def test_every_engine_gets_the_same_tokens() -> None:
    ids = token_ids(100, vocab_size=50)
    assert ids.min() >= 0
    assert ids.max() < 50
    assert (token_ids(100, 50) == ids).all()
    assert (token_ids(30, 50) == ids[:30]).all()
