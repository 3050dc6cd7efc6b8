"""Files that conversion writes, opened by llama.cpp: the same tokens, vectors and logits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.closeness import lowest_cosine
from support.folders import decoder_folders, model_folders
from support.folders.model_folders import Folder
from support.minilm_texts import TEXTS, VECTORS

from metal_prefill import Model
from metal_prefill.bench._engines import Options
from metal_prefill.conversion import convert
from metal_prefill.tasks._embedding import encode_texts

llama = pytest.importorskip("llama_cpp")
# Its log has parts of binary metadata, which its Python callback cannot decode.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SENTENCES = [
    "Now my charms are all o'erthrown,",
    "and what strength I have's mine own",
    "Now",
    "most faint: 1611",
]
# GELU in a table of half precision, and attention in half precision.
NEAR = 1e-4
# Both programs round activations to 8 bits, on models of 32 columns, but not to the same codes everywhere.
NEAR_INT8 = 2e-3


ENCODERS: dict[str, Callable[[Path], Folder]] = {
    "bert": lambda path: model_folders.bert(path).pool("mean_tokens"),
    "bert, first token": lambda path: model_folders.bert(path).pool("cls_token"),
    "xlm-r": lambda path: model_folders.bert(path, "XLMRobertaModel", "unigram").pool("mean_tokens"),
}


def vectors_of(path: Path, prompts: list[Any]) -> Any:
    """Return llama.cpp's vectors of token ids."""
    from metal_prefill.bench._peers import llama_cpp

    engine = llama_cpp.load(
        Options(path=str(path), max_context=512, max_prompt=1, threads=1, device="cpu", compute="int8")
    )
    return engine.embed(prompts)


@pytest.mark.parametrize(("kind", "near"), [("F32", NEAR), ("Q8_0", NEAR_INT8)])
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_of_written_encoders_are_those_of_llama_cpp(
    tmp_path: Path, name: str, kind: str, near: float
) -> None:
    path = convert(ENCODERS[name](tmp_path / "m").write(), tmp_path / "m.gguf", tensor_type=kind)
    with Model(path, device="cpu") as model:
        prompts = encode_texts(model.engine, SENTENCES).prompts
        assert lowest_cosine(vectors_of(path, prompts), model.embed(SENTENCES)) > 1 - near


@pytest.mark.parametrize("name", ENCODERS)
def test_tokens_of_written_encoders_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    path = convert(ENCODERS[name](tmp_path / "m").write(), tmp_path / "m.gguf")
    theirs = llama.Llama(str(path), vocab_only=True, verbose=False)
    with Model(path, device="cpu") as model:
        for text in SENTENCES:
            expected = theirs.tokenize(text.encode(), add_bos=True, special=False)
            ids = model.tokenizer.frame.text(model.tokenizer.encode(text, add_bos=False))
            assert ids == expected, text


def yarn(path: Path) -> Folder:
    """Make a folder whose attention YaRN scales by another factor than the usual one."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 10}
    return model_folders.llama(path, rope_parameters={**rope, "attention_factor": 2.0})


# llama.cpp ignores the windows of phi3 and starcoder2, and that of exaone4 unless it has 64 layers. It takes
# the factors of LongRoPE for a context of at least 256 tokens, and divides the scores of Gemma 2 and 3 by the
# root of the width of a head. Keys and values of its gated delta rule have one width.
_OTHERS = ("window", "moe", "experts", "gemma", "short texts", "two widths")
DECODERS = [
    *(make for name, make in decoder_folders.RECORDED.items() if not any(word in name for word in _OTHERS)),
    *(partial(decoder_folders.RECORDED[name], query_pre_attn_scalar=16) for name in ("gemma2", "gemma3")),
]


@pytest.mark.parametrize("make", [model_folders.llama, yarn, *DECODERS])
def test_logits_of_written_decoders_are_those_of_llama_cpp(
    tmp_path: Path, make: Callable[[Path], Folder]
) -> None:
    path = convert(make(tmp_path / "m").write(), tmp_path / "m.gguf")
    ids = np.array([5, 17, 3, 200, 42, 9, 9, 150], np.int32)
    theirs = llama.Llama(str(path), n_ctx=32, n_threads=1, logits_all=True, verbose=False)
    theirs.eval(ids.tolist())
    expected = np.array(theirs.scores[len(ids) - 1])
    with Model(path, device="cpu", compute="f32") as model:
        logits = model.session().forward_prompt_logits(ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.real_model
@pytest.mark.parametrize(("kind", "near"), [("F32", NEAR), ("F16", NEAR), ("Q8_0", NEAR_INT8)])
def test_vectors_of_minilm_are_those_of_llama_cpp(
    minilm_folder: Path, tmp_path: Path, kind: str, near: float
) -> None:
    path = convert(minilm_folder, tmp_path / "m.gguf", tensor_type=kind)
    with Model(path, device="cpu", max_context=512) as model:
        prompts = encode_texts(model.engine, TEXTS).prompts
        assert lowest_cosine(vectors_of(path, prompts), model.embed(TEXTS)) > 1 - near


@pytest.mark.real_model
def test_8_bit_vectors_of_minilm_are_as_near_to_float64_as_those_of_llama_cpp(
    minilm_folder: Path, tmp_path: Path
) -> None:
    path = convert(minilm_folder, tmp_path / "m.gguf", tensor_type="Q8_0")
    exact = np.load(VECTORS)["vectors"].astype(np.float64)
    with Model(path, device="cpu", max_context=512) as model:
        prompts = encode_texts(model.engine, TEXTS).prompts
        ours, theirs = model.embed(TEXTS), vectors_of(path, prompts)
    distances = [1 - (made * exact).sum(axis=1) for made in (ours, theirs)]
    assert distances[0].mean() <= distances[1].mean()
