"""The oracle compared with logits of llama.cpp and transformers, recorded by tools/record."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from support import comparison, small_models
from support.folders import decoder_folders, llama_cpp_folders
from support.kernels.float64 import softmax
from support.reference import ReferenceModel
from support.small_models import SmallModel

from metal_prefill.conversion import convert
from metal_prefill.files._architecture import ARCHITECTURES

COMPARED = dict(comparison.compared_models())
# Folders with the usual settings of their architectures, which the reference takes for granted.
FOLDERS = decoder_folders.RECORDED.keys() - {
    *("ministral3", "gpt_neox, blocks in sequence", "qwen3_moe, one of three"),
    "gpt2, exact GELU, usual width",
}

POOLED = small_models.EMBEDDERS | small_models.CLASSIFIERS
LLAMA_CPP_VECTORS = 1e-3  # of the largest value: its GELU looks up half-precision values

# Relative to the largest logit: transformers computes in float32, which keeps 24 bits of every sum.
TRANSFORMERS_TOLERANCE = 1e-5


def tolerance(name: str) -> float:
    """Largest difference allowed, relative to the largest logit.

    With float32 weights llama.cpp computes in float32; its GELU looks up half-precision values. With other
    weights it rounds activations to the type, or to 8 bits per block.
    """
    if name.startswith(("type ", "mixed ")):
        return 3e-2
    return 1e-3 if name.startswith(("gemma", "gpt", "starcoder2", "phi2")) else 1e-5


def test_a_small_model_without_an_architecture_in_its_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="model 'qwen33, mean' has no architecture"):
        small_models._named({"qwen33, mean": SmallModel()})


@pytest.mark.parametrize("name", COMPARED)
def test_logits_match_llama_cpp(tmp_path: Path, name: str) -> None:
    path = small_models.write(tmp_path / "model.gguf", COMPARED[name])
    logits = ReferenceModel(path).forward(comparison.tokens_for(COMPARED[name])).logits[-1]
    with np.load(comparison.LOGITS) as logits_of:
        expected = logits_of[name].astype(np.float64)
    assert np.abs(logits - expected).max() <= tolerance(name) * np.abs(expected).max()
    assert logits.argmax() == expected.argmax()


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_logits_of_folders_match_transformers(tmp_path: Path, name: str) -> None:
    path = convert(decoder_folders.RECORDED[name](tmp_path / "m").write(), tmp_path / "m.gguf")
    logits = ReferenceModel(path).forward(decoder_folders.IDS).logits[decoder_folders.ROWS]
    with np.load(decoder_folders.RECORD) as recorded:
        expected = recorded[name]
    assert np.abs(logits - expected).max() <= TRANSFORMERS_TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", [n for n, m in POOLED.items() if len(m.labels) != 1])
def test_vectors_match_llama_cpp(tmp_path: Path, name: str) -> None:
    model = POOLED[name]
    reference = ReferenceModel(small_models.write(tmp_path / "model.gguf", model))
    with np.load(comparison.VECTORS) as vectors:
        for tokens, wanted in zip(comparison.random_texts(model.vocab), vectors[name], strict=True):
            vector = reference.pooled(tokens)
            if model.labels:  # llama.cpp returns probabilities
                vector = softmax(vector)
            assert np.abs(vector - wanted).max() <= LLAMA_CPP_VECTORS * np.abs(wanted).max()


@pytest.mark.parametrize("name", comparison.OF_TRANSFORMERS)
def test_states_of_encoders_match_transformers(tmp_path: Path, name: str) -> None:
    model = comparison.OF_TRANSFORMERS[name]
    reference = ReferenceModel(small_models.write(tmp_path / "model.gguf", model))
    with np.load(comparison.TRANSFORMERS_ENCODERS) as recorded:
        for tokens in comparison.encoder_tokens(model):
            expected = recorded[f"{name}/{len(tokens)}"]
            states = reference.forward(tokens).hidden
            assert np.abs(states - expected).max() <= TRANSFORMERS_TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", comparison.OF_LLAMA_CPP)
def test_means_of_encoders_match_llama_cpp(tmp_path: Path, name: str) -> None:
    model = comparison.OF_LLAMA_CPP[name]
    reference = ReferenceModel(small_models.write(tmp_path / "model.gguf", model))
    with np.load(comparison.ENCODERS_OF_LLAMA_CPP) as recorded:
        for tokens, expected in zip(
            comparison.random_texts(model.vocab, first=5), recorded[name], strict=True
        ):
            mean = reference.forward(tokens).hidden.mean(axis=0)
            assert np.abs(mean - expected).max() <= LLAMA_CPP_VECTORS * np.abs(expected).max()


def test_every_architecture_was_recorded() -> None:
    """Gemma 4, whose models llama.cpp is not compared with, has folders."""
    models = COMPARED | POOLED | comparison.OF_LLAMA_CPP
    architectures = {model.architecture for model in models.values()}
    architectures |= {"gemma4", *llama_cpp_folders.ARCHITECTURES}
    assert architectures == set(ARCHITECTURES) & set(gguf.MODEL_ARCH_NAMES.values())
    with np.load(comparison.LOGITS) as llama_cpp, np.load(decoder_folders.RECORD) as transformers:
        assert set(llama_cpp) == set(COMPARED)
        assert set(transformers) == set(decoder_folders.RECORDED)


def test_log_probs_are_normalized_and_of_the_next_token(tmp_path: Path) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.SmallModel(layers=1))
    tokens = np.array([5, 9, 2, 7])
    result = ReferenceModel(path).forward(tokens)
    probabilities = softmax(result.logits)
    expected = np.log([probabilities[i, tokens[i + 1]] for i in range(3)])
    assert result.log_probs(tokens) == pytest.approx(expected)


def test_rounding_the_cache_has_a_small_effect(tmp_path: Path) -> None:
    path = small_models.write(tmp_path / "model.gguf", small_models.SmallModel())
    tokens = np.arange(50)
    exact = ReferenceModel(path).forward(tokens).logits
    rounded = ReferenceModel(path, kv_dtype=np.float16).forward(tokens).logits
    assert 0 < np.abs(exact - rounded).max() < 1e-2
