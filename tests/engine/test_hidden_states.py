"""Hidden states as an output of a pass: of the last token or of all, before and after the output norm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.reference import ReferenceModel
from support.small_models import MODELS, SmallModel, with_tensor, write

from metal_prefill import Model, NumericalError

# Normalized squared errors, as in test_engine.py: sums in float32, and products of half precision on Metal.
NMSE_F32, NMSE_HALF = 1e-9, 5e-6
# Relative to the largest element: Metal's kernels for a few tokens and for many add in different orders.
METAL_TOLERANCE = 1e-3


def ids_of(n: int, vocab: int = 320, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab, n)


def hidden(model: Model, ids: npt.NDArray[Any], output: Any = "hidden", rows: Any = "all") -> Any:
    with model.session() as session:
        return model.forward_batch([session], [ids], output=output, rows=rows)[0]


def assert_close(device: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    nmse = np.square(actual - expected).sum() / np.square(expected).sum()
    assert nmse <= (NMSE_F32 if device == "cpu" else NMSE_HALF)


@pytest.mark.parametrize("name", ["gqa 3", "gemma3", "granite", "dimensions that fit no block"])
def test_hidden_states_match_the_reference(device: str, model_path: Callable[[str], Path], name: str) -> None:
    path = model_path(name)
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        for n in (1, 5, 37):
            ids = ids_of(n)
            expected = reference.forward(ids)
            for output, wanted in (("hidden", expected.hidden), ("residual", expected.residual)):
                assert_close(device, hidden(model, ids, output), wanted)
                assert_close(device, hidden(model, ids, output, None), wanted[-1])
                assert_close(device, hidden(model, ids, output, 1), wanted[-1:])


def test_hidden_states_are_the_same_alone_and_with_other_outputs(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MODELS["gqa 3"])
    prompts = [ids_of(n, seed=n) for n in (40, 3, 90, 20, 33, 70)]
    outputs: list[Any] = ["hidden", "hidden", "log_probs", "residual", "greedy", "logits"]
    rows: list[Any] = ["all", None, 30, 15, None, None]
    with Model(path, device=device, chunk_tokens=64) as model:
        sessions = [model.session() for _ in prompts]
        results = model.forward_batch(sessions, prompts, output=outputs, rows=rows)
        for ids, output, wanted_rows, result in zip(prompts, outputs, rows, results, strict=True):
            with model.session() as session:
                alone = model.forward_batch([session], [ids], output=output, rows=wanted_rows)[0]
            bound = 0.0 if device == "cpu" else METAL_TOLERANCE * float(np.abs(alone).max())
            if output == "greedy":
                assert result == alone
            else:
                np.testing.assert_allclose(result, alone, rtol=0, atol=bound)


def test_a_prompt_of_several_passes_returns_one_array(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", MODELS["gqa 3"])
    ids = ids_of(150)
    with Model(path, device=device) as model, Model(path, device=device, chunk_tokens=32) as cut:
        whole = hidden(model, ids)
        bound = 0.0 if device == "cpu" else METAL_TOLERANCE * float(np.abs(whole).max())
        np.testing.assert_allclose(hidden(cut, ids), whole, rtol=0, atol=bound)


def test_invalid_requests_are_rejected(demo: Model) -> None:
    session = demo.session()

    def forward(output: Any, rows: Any, **options: Any) -> None:
        demo.forward_batch([session], [[1, 2]], output=output, rows=rows, **options)

    with pytest.raises(ValueError, match="session 0: rows of output 'logits' must be between 1 and 1, got 2"):
        forward("logits", 2)
    with pytest.raises(ValueError, match="session 0: rows of output 'hidden' must be between 1 and 2, got 3"):
        forward("hidden", 3)
    with pytest.raises(ValueError, match="session 0: rows of output 'log_probs' must be between 1 and 1"):
        forward("log_probs", 2)
    with pytest.raises(ValueError, match="rows 'first' of output 'hidden' is not known"):
        forward("hidden", "first")
    assert session.position == 0


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_tokens_before_the_first_row_with_an_output_are_reused(demo: Model, rows: int) -> None:
    ids = ids_of(40)
    with demo.session() as session:
        whole, again = (
            demo.forward_batch([session], [ids], output="hidden", rows=rows, reuse=reuse)[0]
            for reuse in (False, True)
        )
        assert session.stats()["tokens_reused"] == 40 - rows
    bound = 0.0 if demo.backend == "cpu" else METAL_TOLERANCE * float(np.abs(whole).max())
    np.testing.assert_allclose(again, whole, rtol=0, atol=bound)


@pytest.mark.parametrize("rows", [1, 5, 39])
def test_log_probabilities_of_the_last_tokens_match_those_of_all(demo: Model, rows: int) -> None:
    ids = ids_of(40)
    with demo.session() as session:
        last = demo.forward_batch([session], [ids], output="log_probs", rows=rows)[0]
    bound = 0.0 if demo.backend == "cpu" else METAL_TOLERANCE * 20
    np.testing.assert_allclose(last, demo.score(ids)[-rows:], rtol=0, atol=bound)


def test_a_nan_hidden_state_is_an_error(device: str, tmp_path: Path) -> None:
    small = SmallModel(layers=1, embedding="F32", types={"*": "F32"})

    def damage(values: Any) -> None:
        values.reshape(small.vocab, -1)[7, 0] = np.nan

    whole = write(tmp_path / "whole.gguf", small)
    path = with_tensor(tmp_path / "model.gguf", whole, "token_embd.weight", damage)
    with Model(path, device=device) as model:
        with pytest.raises(NumericalError, match=r"the hidden state of the token at position \d is NaN"):
            hidden(model, np.array([1, 2, 7, 3]))
        assert np.isfinite(hidden(model, np.array([1, 2, 3]))).all()
