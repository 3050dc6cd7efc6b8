"""Small folders of decoders with LayerNorm, with random weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.model_folders import (
    CONTEXT,
    DIM,
    FFN,
    GROUPED,
    HEADS,
    KV,
    LAYERS,
    SIZES,
    VOCAB,
    Folder,
    Shapes,
    linear,
    norm,
    tokenized,
    values,
)


def _columns(name: str, columns: int = DIM, rows: int = DIM) -> Shapes:
    """Return the shapes of a matrix whose rows are the inputs, and its bias."""
    return {f"{name}.weight": (columns, rows), f"{name}.bias": (rows,)}


def _folder(path: Path, architecture: str, config: dict[str, Any], shapes: Shapes) -> Folder:
    return tokenized(path, {"architectures": [architecture], "vocab_size": VOCAB, **config}, shapes)


def gpt2(path: Path, **config: Any) -> Folder:
    """Make a folder of GPT-2, whose tensors have the names that its class adds a prefix to."""
    settings = {
        "model_type": "gpt2",
        "n_embd": DIM,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": CONTEXT,
        "n_inner": FFN,
        **config,
    }
    shapes: Shapes = {"wte.weight": (VOCAB, DIM), "wpe.weight": (CONTEXT, DIM), **norm("ln_f")}
    width = settings["n_inner"] or 4 * DIM
    for layer in range(LAYERS):
        name = f"h.{layer}."
        shapes |= norm(f"{name}ln_1") | norm(f"{name}ln_2")
        shapes |= _columns(f"{name}attn.c_attn", rows=3 * DIM) | _columns(f"{name}attn.c_proj")
        shapes |= _columns(f"{name}mlp.c_fc", rows=width) | _columns(f"{name}mlp.c_proj", columns=width)
    return _folder(path, "GPT2LMHeadModel", settings, shapes)


def gpt_neox(path: Path, **config: Any) -> Folder:
    """Make a folder of GPT-NeoX, in which a quarter of a head rotates."""
    settings = {**SIZES, "model_type": "gpt_neox", "rotary_pct": 0.25, **config}
    shapes: Shapes = {"gpt_neox.embed_in.weight": (VOCAB, DIM), "embed_out.weight": (VOCAB, DIM)}
    shapes |= norm("gpt_neox.final_layer_norm")
    for layer in range(LAYERS):
        name = f"gpt_neox.layers.{layer}."
        shapes |= norm(f"{name}input_layernorm") | norm(f"{name}post_attention_layernorm")
        shapes |= linear(f"{name}attention.query_key_value", 3 * DIM) | linear(f"{name}attention.dense")
        shapes |= linear(f"{name}mlp.dense_h_to_4h", FFN) | linear(f"{name}mlp.dense_4h_to_h", DIM, FFN)
    return _folder(path, "GPTNeoXForCausalLM", settings, shapes)


def _llama_like(path: Path, architecture: str, config: dict[str, Any], layer: Shapes) -> Folder:
    """Make a folder whose modules are named as in Llama, from the shapes of one layer."""
    settings = {**GROUPED, "pad_token_id": 0, **config}
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM)}
    for i in range(settings["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return _folder(path, architecture, settings, shapes)


def _attention(output: str) -> Shapes:
    """Return the shapes of attention with two key-value heads for four heads."""
    attention = linear("self_attn.q_proj") | linear(f"self_attn.{output}")
    return attention | linear("self_attn.k_proj", KV) | linear("self_attn.v_proj", KV)


def _without_biases(shapes: Shapes, names: str = "") -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.endswith(f"{names}.bias")}


_GATED = _without_biases(
    linear("mlp.gate_proj", FFN) | linear("mlp.up_proj", FFN) | linear("mlp.down_proj", DIM, FFN)
)


def starcoder2(path: Path, **config: Any) -> Folder:
    layer = norm("input_layernorm") | norm("post_attention_layernorm") | _attention("o_proj")
    layer |= linear("mlp.c_fc", FFN) | linear("mlp.c_proj", DIM, FFN)
    settings = {"model_type": "starcoder2", "tie_word_embeddings": False, **config}
    folder = _llama_like(path, "Starcoder2ForCausalLM", settings, layer)
    folder.tensors |= {name: values(shape) for name, shape in norm("model.norm").items()}
    return folder


def phi(path: Path, **config: Any) -> Folder:
    """Make a folder of Phi-2, whose attention and feed-forward have the same input."""
    layer = norm("input_layernorm") | _attention("dense")
    layer |= linear("mlp.fc1", FFN) | linear("mlp.fc2", DIM, FFN)
    folder = _llama_like(path, "PhiForCausalLM", {"model_type": "phi", **config}, layer)
    folder.tensors |= {name: values(shape) for name, shape in norm("model.final_layernorm").items()}
    folder.tensors["lm_head.bias"] = values((VOCAB,))
    return folder


def stablelm(path: Path, **config: Any) -> Folder:
    settings = {"model_type": "stablelm", "use_qkv_bias": True, **config}
    attention = _without_biases(_attention("o_proj"), "" if not settings["use_qkv_bias"] else "o_proj")
    layer = norm("input_layernorm") | norm("post_attention_layernorm") | attention | _GATED
    folder = _llama_like(path, "StableLmForCausalLM", settings, layer)
    folder.tensors |= {name: values(shape) for name, shape in norm("model.norm").items()}
    return folder


def cohere2(path: Path, **config: Any) -> Folder:
    """Make a folder of Cohere 2: no layer has biases, and those without a window do not rotate."""
    layer = _without_biases(norm("input_layernorm") | _attention("o_proj")) | _GATED
    settings = {
        "model_type": "cohere2",
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "logit_scale": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **config,
    }
    folder = _llama_like(path, "Cohere2ForCausalLM", settings, layer)
    folder.tensors["model.norm.weight"] = values((DIM,))
    del folder.tensors["lm_head.weight"]
    return folder


RECORDED: dict[str, Callable[[Path], Folder]] = {
    "gpt2": gpt2,
    "gpt2, exact GELU, usual width": partial(gpt2, activation_function="gelu", n_inner=None),
    "gpt_neox": gpt_neox,
    "gpt_neox, blocks in sequence": partial(
        gpt_neox, use_parallel_residual=False, hidden_act="gelu_fast", rotary_pct=1.0, rotary_emb_base=500
    ),
    "starcoder2": starcoder2,
    "starcoder2, window": partial(starcoder2, sliding_window=9),
    "phi": phi,
    "stablelm": stablelm,
    "stablelm, no biases": partial(stablelm, use_qkv_bias=False, partial_rotary_factor=0.5),
    "cohere2": cohere2,
    "cohere2, other layers": partial(
        cohere2, layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"]
    ),
}
