"""Errors that name the tensors that are missing or wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.files.gguf_bytes import integer
from support.files.llama_file import DIM, FFN, HEAD, VOCAB, Open, base_tensors

from metal_prefill import GGUFError, UnsupportedModelError, _core
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import collect_tensors

BAD, NOT = GGUFError, UnsupportedModelError
NORM = "blk.0.attn_q_norm.weight"
OTHERS = ("blk.2.attn_norm.weight", "blk.0.attn_norm.bias", "blk.0.ffn_gate_inp.weight", NORM, "x")
# Architectures, their tensors that are changed or left out, and the errors.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *(
        ("llama", {name: None}, BAD, f"tensor {name} is missing")
        for name in base_tensors() if not name.startswith("blk.0.")
    ),
    ("qwen2", {}, BAD, "tensor blk.0.attn_q.bias is missing"),
    *((name, {}, BAD, f"{NORM} is missing") for name in ("qwen3", "gemma3", "hunyuan-dense", "exaone4")),
    *(
        ("llama", {name: (shape, 0)}, BAD, rf"tensor {name} has shape \({shape[0]}.*\), .* requires \(")
        for name, shape in (
            ("token_embd.weight", (VOCAB + 1, DIM)), ("output_norm.weight", (DIM + 1,)),
            ("output_norm.weight", (1, DIM)), ("rope_freqs.weight", (HEAD,)),
            ("blk.0.attn_q.weight", (DIM, DIM, 1)), ("blk.0.ffn_down.weight", (FFN, DIM)),
            ("blk.0.attn_v.bias", (DIM,)),
        )
    ),
    ("llama", {"output.weight": ((VOCAB, DIM), 26)}, NOT, "has type I32; supported types are F32, F16"),
    ("llama", {"output.weight": ((VOCAB, DIM), 28)}, NOT, "tensor output.weight has type F64"),
    ("llama", {"output_norm.weight": ((DIM,), 1)}, NOT, "has type F16; supported types are F32"),
    ("llama", {"blk.0.attn_q.bias": ((DIM,), 30)}, NOT, "tensor blk.0.attn_q.bias has type BF16"),
    *(
        ("llama", {name: ((DIM,), 0)}, NOT, f"tensor {name} is not part of a llama model with 2 layers")
        for name in OTHERS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "tensors", "error", "message"), REFUSED)
def test_tensors_that_are_missing_or_wrong_are_named(
    open_model: Open, architecture: str, tensors: dict[str, Any], error: type[Exception], message: str
) -> None:
    metadata = {"gemma3.attention.sliding_window": integer(8)} if architecture == "gemma3" else {}
    gguf = open_model(metadata, tensors, architecture)
    with pytest.raises(error, match=message):
        collect_tensors(gguf, read_config(gguf))


def test_a_stacked_tensor_that_is_missing_or_too_short_is_named(model_path: Callable[[str], Path]) -> None:
    with GGUFFile(model_path("phi3")) as gguf:
        config = read_config(gguf)
        name = "blk.1.attn_qkv.weight"
        whole = gguf.tensors[name]
        gguf.tensors[name] = replace(whole, shape=(whole.shape[0] - 1, whole.shape[1]))
        with pytest.raises(GGUFError, match=r"qkv.weight has shape \(383, 128\), .* requires \(384, 128\)"):
            collect_tensors(gguf, config)
        del gguf.tensors[name]
        with pytest.raises(
            GGUFError, match=r"tensor blk\.1\.attn_q\.weight is missing, as is blk\.1\.attn_qkv\.weight"
        ):
            collect_tensors(gguf, config)


def test_shapes_of_other_models_do_not_overflow() -> None:
    """The table is read before any tensor is checked."""
    config = _core.ModelConfig(dim=2**30)
    assert (3 * 2**30, 2**30) in {spec.shape for spec in _core.tensors(config)}
