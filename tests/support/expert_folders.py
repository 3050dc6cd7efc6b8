"""Small folders of decoders with experts, with random weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support.decoder_folders import HEAD, with_head_norms
from support.model_folders import DIM, KV, LAYERS, Folder, llama, values
from support.recurrent_folders import granite_hybrid, lfm2

WIDTH = 24  # of an expert
_SIZE = 4  # of weights of experts, relative to others: so that they matter
_DENSE = ("gate_proj", "up_proj", "down_proj")


def _add_experts(folder: Folder, layer: str, count: int, width: int, names: tuple[str, ...] = _DENSE) -> None:
    """Add a router whose products differ between tokens, and matrices of each expert."""
    folder.tensors[f"{layer}.gate.weight"] = 10 * values((count, DIM), 500)
    for expert in range(count):
        for i, (name, shape) in enumerate(
            zip(names, ((width, DIM), (width, DIM), (DIM, width)), strict=True)
        ):
            folder.tensors[f"{layer}.experts.{expert}.{name}.weight"] = _SIZE * values(
                shape, 600 + 3 * expert + i
            )


def _with_experts(folder: Folder, count: int, width: int) -> Folder:
    """Give all layers experts in place of their dense feed-forward."""
    for layer in range(folder.config["num_hidden_layers"]):
        for name in _DENSE:
            del folder.tensors[f"model.layers.{layer}.mlp.{name}.weight"]
        _add_experts(folder, f"model.layers.{layer}.mlp", count, width)
    return folder


def qwen3_moe(path: Path, count: int = 8, used: int = 3, **config: Any) -> Folder:
    settings = {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True,
        "head_dim": HEAD,
        "pad_token_id": 0,
        **config,
    }
    folder = llama(path, "Qwen3MoeForCausalLM", model_type="qwen3_moe", **settings)
    with_head_norms(folder, ("q_norm", HEAD), ("k_norm", HEAD))
    return _with_experts(folder, count, WIDTH)


def olmoe(path: Path, count: int = 64, used: int = 8, **config: Any) -> Folder:
    """Make a folder of OLMoE, whose factors are not divided by their sum."""
    settings = {"num_experts": count, "num_experts_per_tok": used, "intermediate_size": WIDTH, **config}
    folder = llama(path, "OlmoeForCausalLM", model_type="olmoe", pad_token_id=0, **settings)
    with_head_norms(folder, ("q_norm", DIM), ("k_norm", KV))
    return _with_experts(folder, count, WIDTH)


def _with_granite_experts(folder: Folder, count: int, width: int) -> Folder:
    """Add experts of which gate and up are one matrix."""
    for layer in range(folder.config["num_hidden_layers"]):
        name = f"model.layers.{layer}.block_sparse_moe"
        folder.tensors |= {
            f"{name}.input_linear.weight": _SIZE * values((count, 2 * width, DIM), 700 + layer),
            f"{name}.output_linear.weight": _SIZE * values((count, DIM, width), 800 + layer),
            f"{name}.router.layer.weight": 10 * values((count, DIM), 900 + layer),
        }
    return folder


def granite_moe(path: Path, count: int = 5, used: int = 2, shared: int = 0, **config: Any) -> Folder:
    """Make a folder of Granite 3 with experts; `shared` is the width of one for all tokens."""
    family = "Shared" if shared else ""
    settings = {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": WIDTH,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.3,
        **({"shared_intermediate_size": shared} if shared else {}),
        **config,
    }
    folder = llama(
        path, f"GraniteMoe{family}ForCausalLM", model_type=f"granitemoe{family.lower()}", **settings
    )
    for layer in range(LAYERS):
        for name in _DENSE:
            del folder.tensors[f"model.layers.{layer}.mlp.{name}.weight"]
        if shared:
            mlp = f"model.layers.{layer}.shared_mlp"
            folder.tensors[f"{mlp}.input_linear.weight"] = _SIZE * values((2 * shared, DIM), layer)
            folder.tensors[f"{mlp}.output_linear.weight"] = _SIZE * values((DIM, shared), layer)
    return _with_granite_experts(folder, count, WIDTH)


def granite_hybrid_experts(path: Path, count: int = 6, used: int = 2, **config: Any) -> Folder:
    """Make a folder of Granite 4 with experts, and one for all tokens."""
    settings = {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": WIDTH,
        "tie_word_embeddings": True,
    }
    return _with_granite_experts(granite_hybrid(path, **{**settings, **config}), count, WIDTH)


def lfm2_moe(path: Path, count: int = 4, used: int = 2, **config: Any) -> Folder:
    """Make a folder of LFM2: a dense layer, then one with experts, which a bias helps to choose."""
    settings = {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": WIDTH,
        "num_dense_layers": 1,
        "num_experts": count,
        "num_experts_per_tok": used,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    folder = lfm2(path, **{**settings, **config})
    for name in ("w1", "w2", "w3"):
        del folder.tensors[f"model.layers.1.feed_forward.{name}.weight"]
    _add_experts(folder, "model.layers.1.feed_forward", count, WIDTH, ("w1", "w3", "w2"))
    folder.tensors["model.layers.1.feed_forward.expert_bias"] = np.linspace(
        -0.5, 0.5, count, dtype=np.float32
    )
    return folder


RECORDED: dict[str, Callable[[Path], Folder]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, one of three": partial(qwen3_moe, count=3, used=1, norm_topk_prob=False),
    "olmoe": olmoe,
    "granite_moe": granite_moe,
    "granite_moe, shared": partial(granite_moe, shared=40),
    "granite_hybrid, experts": granite_hybrid_experts,
    "granite_hybrid, experts, attention with rotation": partial(
        granite_hybrid_experts, layer_types=["attention", "attention"], position_embedding_type="rope"
    ),
    "lfm2_moe": lfm2_moe,
}
