"""Errors that name the tensors that are missing or wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import small_models
from support.llama_file import DIM, FFN, HEAD, VOCAB, Open, base_tensors, integer

from metal_prefill import GGUFError, UnsupportedModelError, _core
from metal_prefill.files import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_tensors import collect_tensors


def collect(open_model: Open, *args: Any, **kwargs: Any) -> None:
    gguf = open_model(*args, **kwargs)
    collect_tensors(gguf, read_config(gguf))


@pytest.mark.parametrize("name", [name for name in base_tensors() if not name.startswith("blk.0.")])
def test_missing_tensor_is_named(open_model: Open, name: str) -> None:
    with pytest.raises(GGUFError, match=f"tensor {name} is missing"):
        collect(open_model, tensors={name: None})


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen2", "blk.0.attn_q.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
        ("gemma3", "blk.0.attn_q_norm.weight"),
        ("hunyuan-dense", "blk.0.attn_q_norm.weight"),
        ("exaone4", "blk.0.attn_q_norm.weight"),
    ],
)
def test_architectures_require_their_own_tensors(open_model: Open, architecture: str, name: str) -> None:
    metadata = {"gemma3.attention.sliding_window": integer(8)} if architecture == "gemma3" else {}
    with pytest.raises(GGUFError, match=f"tensor {name} is missing"):
        collect(open_model, metadata, architecture=architecture)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embd.weight", (VOCAB + 1, DIM)),
        ("output_norm.weight", (DIM + 1,)),
        ("output_norm.weight", (1, DIM)),
        ("rope_freqs.weight", (HEAD,)),
        ("blk.0.attn_q.weight", (DIM, DIM, 1)),
        ("blk.0.ffn_down.weight", (FFN, DIM)),
        ("blk.0.attn_v.bias", (DIM,)),
    ],
)
def test_contradicting_shape_is_named(open_model: Open, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        GGUFError, match=rf"tensor {name} has shape \({shape[0]}.*\), the metadata requires \("
    ):
        collect(open_model, tensors={name: (shape, 0)})


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        (
            "output.weight",
            (VOCAB, DIM),
            26,
            "tensor output.weight has type I32; supported types are F32, F16",
        ),
        ("output.weight", (VOCAB, DIM), 28, "tensor output.weight has type F64"),
        ("output_norm.weight", (DIM,), 1, "tensor output_norm.weight has type F16; supported types are F32"),
        ("blk.0.attn_q.bias", (DIM,), 30, "tensor blk.0.attn_q.bias has type BF16"),
    ],
)
def test_an_unsupported_type_is_named(
    open_model: Open, name: str, shape: tuple[int, ...], kind: int, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        collect(open_model, tensors={name: (shape, kind)})


@pytest.mark.parametrize(
    "name",
    [
        *("blk.2.attn_norm.weight", "blk.0.attn_norm.bias", "blk.0.ffn_gate_inp.weight"),
        *("blk.0.attn_q_norm.weight", "x"),
    ],
)
def test_an_unknown_tensor_is_rejected(open_model: Open, name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"tensor {name} is not part of a llama model with 2 layers"
    ):
        collect(open_model, tensors={name: ((DIM,), 0)})


@pytest.fixture(scope="module")
def phi3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write(tmp_path_factory.mktemp("phi3") / "m.gguf", small_models.MODELS["phi3"])


def test_a_stacked_tensor_that_is_missing_or_too_short_is_named(phi3_path: Path) -> None:
    with GGUFFile(phi3_path) as gguf:
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
    config = _core.Config()
    config.dim = 2**30
    assert (3 * 2**30, 2**30) in {spec.shape for spec in _core.tensors(config)}
