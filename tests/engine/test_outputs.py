"""Outputs of several rows equal those of single tokens: logits, verified drafts, hidden states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.closeness import assert_close, ids_for, random_ids
from support.kinds import assert_same
from support.native_requests import choose
from support.reference import ReferenceModel
from support.sampling_reference import log_softmax
from support.small_models import MODELS, SmallModel, write, write_with_nan

from metal_prefill import ContextOverflowError, Model, NumericalError, _core
from metal_prefill.generation import Options
from metal_prefill.generation._sampling import core_sampler

SAMPLED = Options(1.0, top_k=50, repeat_penalty=1.3, frequency_penalty=0.2)


def sampler_of(prompt: npt.NDArray[np.int32], sampled: bool) -> _core.Sampler | None:
    return core_sampler(SAMPLED, 7, prompt.tolist()) if sampled else None


def one_by_one(model: Model, prompt: npt.NDArray[np.int32], n: int, sampled: bool) -> list[int]:
    """Tokens after a prompt, each computed separately."""
    with model.session() as session:
        core, sampler = session.native, sampler_of(prompt, sampled)
        made: list[int] = []
        for _ in range(n):
            made += choose(core, made[-1:] if made else prompt, 0, sampler)
    return made


def test_the_largest_logit_is_found_after_each_token(tiny_demo: Model) -> None:
    prompts = [ids_for(tiny_demo, n, n) for n in (7, 1, 40)]
    sessions = [tiny_demo.session() for _ in prompts]
    each, last, long = tiny_demo.forward_batch(sessions, prompts, rows=["all", None, "all"])
    for found, prompt in ((each, prompts[0]), ([last], prompts[1]), (long, prompts[2])):
        with tiny_demo.session() as session:
            logits = [session.forward_token(int(token)) for token in prompt]
        for token, expected in zip(found, logits, strict=True):
            # Metal's kernels for many tokens may decide between logits that nearly agree.
            near = 1e-3 * np.abs(expected).max() if tiny_demo.backend == "metal" else 0
            assert expected[token] >= expected.max() - near
    assert each.dtype == np.int32
    assert [s.position for s in sessions] == [7, 1, 40]


def test_every_output_follows_the_limit_of_logits(device: str, tmp_path: Path) -> None:
    """A sampler that keeps half of the probability finds fewer tokens without the limit."""
    path = write(tmp_path / "model.gguf", MODELS["gemma2"])
    with Model(path, device=device, compute="auto" if device == "metal" else "f32", kv_dtype="f32") as model:
        ids = ids_for(model, 40)
        expected = ReferenceModel(path).forward(ids)
        last = expected.logits[-1]
        assert np.abs(expected.logits).max() < 6.0  # the limit
        np.testing.assert_allclose(model.score(ids), expected.log_probs(ids), rtol=0, atol=0.02)
        np.testing.assert_allclose(model.session().forward_prompt_logits(ids), last, rtol=0, atol=0.02)
        assert model.session().forward_prompt(ids) == last.argmax()
        probabilities = np.sort(np.exp(log_softmax(last)))[::-1]
        kept = int(np.searchsorted(np.cumsum(probabilities), 0.5)) + 1
        drawn = set()
        with model.session() as session:
            session.forward_prompt(ids[:-1])
            for seed in range(300 if device == "cpu" else 100):
                sampler = core_sampler(Options(1.0, top_p=0.5, top_k=0), seed, ids.tolist())
                drawn |= set(choose(session.native, ids[-1:], 0, sampler))
                session.rewind(39)
        assert drawn <= set(np.argsort(-last)[: kept + 2].tolist())
        assert len(drawn) > kept / 2


def test_drafts_are_limited_by_a_full_pass(tiny_demo_path: Path) -> None:
    for sampled in (False, True):
        with Model(tiny_demo_path, device="cpu") as model:
            prompt = ids_for(model, 9)
            expected = one_by_one(model, prompt, 14, sampled)
        with Model(tiny_demo_path, device="cpu", chunk_tokens=4) as model, model.session() as session:
            for wrong in (2, 4, 5, 12):
                session.reset()
                sampler = sampler_of(prompt, sampled)
                core = session.native
                choose(core, prompt, 0, sampler)
                drafts = np.array(expected[:13], np.int32)
                drafts[wrong] ^= 1
                assert choose(core, drafts, 12, sampler) == expected[1 : wrong + 1]
                assert session.position == 9 + wrong


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("right", [0, 2])
def test_a_wrong_draft_with_nan_is_not_an_error(
    device: str, tmp_path: Path, right: int, sampled: bool
) -> None:
    """In a tile of attention 0 * NaN reaches earlier rows. Correct drafts may then be lost as well."""
    small = SmallModel(head_dim=64, output_type="Q8_0")
    path = write_with_nan(tmp_path / "m.gguf", small, 7)
    prompt = np.arange(8, 20, dtype=np.int32)
    with Model(path, device=device) as model, model.session() as session:
        expected = one_by_one(model, prompt, right + 1, sampled)
        assert 7 not in expected
        core, sampler = session.native, sampler_of(prompt, sampled)
        ids = np.array([*prompt, *expected[:right], 7, 7], np.int32)
        made = choose(core, ids, right + 2, sampler)
        assert made
        assert made == expected[: len(made)]
        assert session.tokens == [*prompt, *made[:-1]]
        with pytest.raises(NumericalError):
            choose(core, [7, 8], 1, sampler)
        assert session.tokens == [*prompt, *made[:-1]]


def test_an_error_in_a_draft_changes_nothing(tiny_demo_path: Path) -> None:
    with Model(tiny_demo_path, device="cpu") as model, model.session(max_context=12) as session:
        core = session.native
        session.forward_prompt(ids_for(model, 8))
        with pytest.raises(ContextOverflowError):
            choose(core, range(5), 4)
        with pytest.raises(ValueError, match="token id 4096 at index 2 is outside the vocabulary"):
            choose(core, [1, 2, 4096], 2)
        with pytest.raises(ValueError, match="the prompt is empty"):
            _core.Request.none(core, np.empty(0, np.int32)).run()
        assert session.position == 8


def hidden(model: Model, ids: npt.NDArray[Any], output: Any = "hidden", rows: Any = "all") -> Any:
    with model.session() as session:
        return model.forward_batch([session], [ids], output=output, rows=rows)[0]


@pytest.mark.parametrize("name", ["gqa 3", "granite", "dimensions that fit no block"])
def test_hidden_states_match_the_reference(device: str, model_path: Callable[[str], Path], name: str) -> None:
    path = model_path(name)
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        for n in (1, 5, 37):
            ids = random_ids(n)
            expected = reference.forward(ids)
            for output, wanted in (("hidden", expected.hidden), ("residual", expected.residual)):
                assert_close(device, hidden(model, ids, output), wanted)
                assert_close(device, hidden(model, ids, output, None), wanted[-1])
                assert_close(device, hidden(model, ids, output, 1), wanted[-1:])


def test_every_output_is_the_same_alone_and_with_others(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MODELS["gqa 3"])
    prompts = [random_ids(n, seed=n) for n in (90, 3, 90, 20, 33, 70, 9)]
    outputs: list[Any] = ["hidden", "hidden", "log_probs", "residual", "greedy", "logits", "none"]
    rows: list[Any] = ["all", None, 30, 15, None, None, None]
    with Model(path, device=device, chunk_tokens=64) as model:
        sessions = [model.session() for _ in prompts]
        results = model.forward_batch(sessions, prompts, output=outputs, rows=rows)
        assert [s.position for s in sessions] == [90, 3, 89, 20, 33, 70, 9]
        for ids, output, wanted_rows, result in zip(prompts, outputs, rows, results, strict=True):
            with model.session() as session:
                alone = model.forward_batch([session], [ids], output=output, rows=wanted_rows)[0]
            if output in ("greedy", "none"):
                assert result == alone
            else:
                assert_same(model, result, alone)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_tokens_before_the_first_row_with_an_output_are_reused(tiny_demo: Model, rows: int) -> None:
    ids = random_ids(40)
    with tiny_demo.session() as session:
        whole, again = (
            tiny_demo.forward_batch([session], [ids], output="hidden", rows=rows, reuse=reuse)[0]
            for reuse in (False, True)
        )
        assert session.stats()["tokens_reused"] == 40 - rows
    assert_same(tiny_demo, again, whole)


@pytest.mark.parametrize("rows", [1, 5, 39])
def test_log_probabilities_of_the_last_tokens_match_those_of_all(tiny_demo: Model, rows: int) -> None:
    ids = random_ids(40)
    with tiny_demo.session() as session:
        last = tiny_demo.forward_batch([session], [ids], output="log_probs", rows=rows)[0]
    assert_same(tiny_demo, last, tiny_demo.score(ids)[-rows:])


def test_a_nan_hidden_state_is_an_error(device: str, tmp_path: Path) -> None:
    path = write_with_nan(tmp_path / "model.gguf", SmallModel(layers=1, types={"*": "F32"}), 7)
    with Model(path, device=device) as model:
        with pytest.raises(NumericalError, match=r"the hidden state of the token at position \d is NaN"):
            hidden(model, np.array([1, 2, 7, 3]))
        assert np.isfinite(hidden(model, np.array([1, 2, 3]))).all()
