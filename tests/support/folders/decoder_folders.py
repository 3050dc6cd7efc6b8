"""Small folders of decoders with random weights, whose logits are recorded with transformers."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support.folders import recurrent_folders
from support.folders.model_folders import (
    CONTEXT,
    DIM,
    FFN,
    GATED,
    GROUPED,
    HEADS,
    KV,
    LAYERS,
    SIZES,
    VOCAB,
    Folder,
    Shapes,
    linear,
    llama,
    norm,
    repeated,
    tokenized,
    weights,
)
from support.folders.recurrent_folders import GRANITE
from support.places import DATA

RECORD = DATA / "transformers_folders.npz"
IDS = np.random.default_rng(7).integers(2, 300, 37).astype(np.int32)  # a prompt
ROWS = [0, 1, 7, 36]  # its tokens after which logits are recorded

HEAD = DIM // HEADS
_DENSE = tuple(f"{name}_proj" for name in GATED)


Make = Callable[..., Folder]  # of a path and settings
Change = Callable[[Folder], Any]


def _llama(name: str, *changes: Change, **usual: Any) -> Make:
    """Return a function that makes folders of a class with Llama's tensors and changes them."""

    def make(path: Path, **config: Any) -> Folder:
        stated = {"model_type": name.lower(), **deepcopy(usual), **config}
        folder = llama(path, f"{name}ForCausalLM", **stated)
        for change in changes:
            change(folder)
        return folder

    return make


def _of_layers(folder: Folder, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    return repeated("model.layers.{}.", shapes, folder.config["num_hidden_layers"])


def sized(folder: Folder) -> Folder:
    """Scale norms and matrices, so that attention has an effect."""
    for name, tensor in folder.tensors.items():
        folder.tensors[name] = tensor + 1 if name.endswith("norm.weight") else tensor * 3
    return folder


def _norms_of_heads(q: int, k: int, names: tuple[str, str] = ("q_norm", "k_norm")) -> Change:
    """Add norms of q and of k with these widths."""
    norms = weights("self_attn.", dict(zip(names, ((q,), (k,)), strict=True)))
    return lambda folder: folder.add(_of_layers(folder, norms), 100)


def _norms_of_outputs(folder: Folder) -> None:
    """Norm the outputs of blocks instead of their inputs."""
    for layer in range(folder.config["num_hidden_layers"]):
        norm = folder.tensors.pop(f"model.layers.{layer}.input_layernorm.weight")
        folder.tensors[f"model.layers.{layer}.post_feedforward_layernorm.weight"] = norm


def _without_head(folder: Folder) -> None:
    del folder.tensors["lm_head.weight"]


smollm3 = _llama("SmolLM3", pad_token_id=0, num_hidden_layers=5)  # the fourth of five layers does not rotate
granite = _llama("Granite", **GRANITE)
minicpm = _llama("MiniCPM", scale_emb=12.0, scale_depth=0.5, dim_model_base=8)
ernie = _llama("Ernie4_5", head_dim=HEAD, use_bias=False)  # rotated pairs are next to each other
mistral = _llama("Mistral", head_dim=HEAD)  # all layers have a window
# Outputs of blocks have norms, and q and k of all heads together.
olmo2 = _llama("Olmo2", _norms_of_outputs, _norms_of_heads(DIM, KV), pad_token_id=0)
_PLAIN = {"rope_type": "default", "rope_theta": 5e5}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
olmo3 = _llama(  # layers with a window are not scaled
    "Olmo3",
    _norms_of_outputs,
    _norms_of_heads(DIM, KV),
    pad_token_id=0,
    num_hidden_layers=5,
    sliding_window=9,
    rope_parameters={"full_attention": {**_PLAIN, **_YARN}, "sliding_attention": _PLAIN},
)


def exaone4(path: Path, **config: Any) -> Folder:
    """Make a folder of EXAONE 4, which norms outputs of blocks, and each head of q and k."""
    kinds = None if config.get("sliding_window") else ["full_attention"] * LAYERS
    usual = {"pad_token_id": 0, "sliding_window": None, "layer_types": kinds}
    return _llama("Exaone4", _norms_of_outputs, _norms_of_heads(HEAD, HEAD), **usual)(path, **config)


def _with_biases(folder: Folder, shapes: Mapping[str, int]) -> None:
    """Add biases of projections with these widths."""
    biases = {f"{name}_proj.bias": (width,) for name, width in shapes.items()}
    folder.add(_of_layers(folder, biases), 100)


_QKV = {f"self_attn.{part}": width for part, width in zip("qkv", (DIM, KV, KV), strict=True)}
_ALL = _QKV | {"self_attn.o": DIM, "mlp.gate": FFN, "mlp.up": FFN, "mlp.down": DIM}
llama_like = _llama("Llama", head_dim=HEAD)
llama_with_biases = _llama(
    "Llama", lambda folder: _with_biases(folder, _ALL), attention_bias=True, mlp_bias=True, rms_norm_eps=0.01
)


def _norms_of_gemma2(folder: Folder) -> None:
    """Norm inputs and outputs of blocks."""
    norms = dict.fromkeys(("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), (DIM,))
    shapes = recurrent_folders.attention(folder.config["head_dim"]) | norms
    folder.add(_of_layers(folder, shapes), 100)


gemma2 = _llama(  # scores and logits have limits
    "Gemma2",
    _without_head,
    _norms_of_gemma2,
    num_hidden_layers=3,
    sliding_window=9,
    head_dim=16,
    query_pre_attn_scalar=9,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=1.5,
    hidden_activation="gelu_pytorch_tanh",
    pad_token_id=0,
)
gemma3 = _llama(  # the sixth layer has no window, but another base, and is scaled
    "Gemma3",
    _without_head,
    _norms_of_gemma2,
    _norms_of_heads(16, 16),
    model_type="gemma3_text",
    num_hidden_layers=7,
    sliding_window=9,
    head_dim=16,
    query_pre_attn_scalar=9,
    hidden_activation="gelu_pytorch_tanh",
    pad_token_id=0,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
hunyuan = _llama(  # each head of q and k has a norm after its rotation
    "HunYuanDenseV1",
    _norms_of_heads(HEAD, HEAD, ("query_layernorm", "key_layernorm")),
    model_type="hunyuan_v1_dense",
    pad_token_id=0,
    head_dim=HEAD,
    rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
)


def _stacked(folder: Folder) -> None:
    """Make q, k and v rows of one matrix, and gate and up those of another."""
    for layer in range(LAYERS):
        for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            name = f"model.layers.{layer}.{whole.partition('.')[0]}."
            rows = [folder.tensors.pop(f"{name}{part}_proj.weight") for part in parts]
            folder.tensors[f"model.layers.{layer}.{whole}_proj.weight"] = np.concatenate(rows)


phi3 = _llama("Phi3", _stacked, pad_token_id=0)


def long_rope(dims: int) -> dict[str, Any]:
    """Return settings of LongRoPE for heads of which `dims` dimensions rotate."""
    pairs = range(1, dims // 2 + 1)
    return {
        "original_max_position_embeddings": CONTEXT // 2,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in pairs],
            "long_factor": [1.0 + 0.7 * i for i in pairs],
        },
    }


_UPPER: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
qwen2 = _llama("Qwen2", lambda folder: _with_biases(folder, _QKV), head_dim=HEAD, **_UPPER)
qwen3 = _llama("Qwen3", _norms_of_heads(HEAD, HEAD), head_dim=HEAD, **_UPPER)


def with_text_part(folder: Folder, **config: Any) -> Folder:
    """Make the text model a part of one that also has a part for images."""
    text = {key: folder.config[key] for key in folder.config if key != "architectures"}
    folder.config = {"architectures": folder.config["architectures"], "text_config": text, **config}
    folder.tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in folder.tensors.items()
    }
    return folder


def qwen3_vl(path: Path, **config: Any) -> Folder:
    """Make a folder of Qwen3-VL, whose rotated pairs have sections for positions in an image."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    settings = {"model_type": "qwen3_vl_text", "head_dim": HEAD, "pad_token_id": 0, "rope_parameters": rope}
    folder = llama(path, "Qwen3VLForConditionalGeneration", **{**settings, **config})
    _norms_of_heads(HEAD, HEAD)(folder)
    folder.add({"lm_head.weight": (VOCAB, DIM)}, 99)
    vision: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": DIM}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 4}
    return with_text_part(folder, model_type="qwen3_vl", vision_config=vision, tie_word_embeddings=False)


ministral3 = _llama(  # scores grow after the original context
    "Ministral3",
    head_dim=HEAD,
    pad_token_id=0,
    max_position_embeddings=4 * CONTEXT,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)


# Decoders with LayerNorm.
_NORMS = norm("input_layernorm") | norm("post_attention_layernorm")


def _columns(name: str, columns: int = DIM, rows: int = DIM) -> Shapes:
    """Return the shapes of a matrix whose rows are the inputs, and its bias."""
    return {f"{name}.weight": (columns, rows), f"{name}.bias": (rows,)}


def gpt2(path: Path, **config: Any) -> Folder:
    """Make a folder of GPT-2, whose tensors have the names that its class adds a prefix to."""
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": DIM,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": CONTEXT,
        "n_inner": FFN,
        **config,
    }
    shapes: Shapes = {"wte.weight": (VOCAB, DIM), "wpe.weight": (CONTEXT, DIM), **norm("ln_f")}
    width = settings["n_inner"] or 4 * DIM
    layer = norm("ln_1") | norm("ln_2") | _columns("attn.c_attn", rows=3 * DIM) | _columns("attn.c_proj")
    layer |= _columns("mlp.c_fc", rows=width) | _columns("mlp.c_proj", columns=width)
    return tokenized(path, settings, shapes | repeated("h.{}.", layer))


def gpt_neox(path: Path, **config: Any) -> Folder:
    """Make a folder of GPT-NeoX, in which a quarter of a head rotates."""
    settings = {**SIZES, "architectures": ["GPTNeoXForCausalLM"], "vocab_size": VOCAB, "rotary_pct": 0.25}
    shapes: Shapes = {"gpt_neox.embed_in.weight": (VOCAB, DIM), "embed_out.weight": (VOCAB, DIM)}
    shapes |= norm("gpt_neox.final_layer_norm")
    layer = _NORMS | linear("attention.query_key_value", 3 * DIM) | linear("attention.dense")
    layer |= linear("mlp.dense_h_to_4h", FFN) | linear("mlp.dense_4h_to_h", DIM, FFN)
    shapes |= repeated("gpt_neox.layers.{}.", layer)
    return tokenized(path, {**settings, "model_type": "gpt_neox", **config}, shapes)


def _with_layer_norm(
    path: Path, name: str, config: dict[str, Any], layer: Shapes, last: Shapes, **usual: Any
) -> Folder:
    """Make a folder whose modules are named as in Llama, from the shapes of a layer and of the last norm."""
    settings = {**GROUPED, "architectures": [f"{name}ForCausalLM"], "pad_token_id": 0, **usual, **config}
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM)}
    shapes |= repeated("model.layers.{}.", layer, settings["num_hidden_layers"])
    folder = tokenized(path, settings, shapes)
    for tensor, shape in last.items():
        folder.add({tensor: shape})
    return folder


def _attention(output: str) -> Shapes:
    """Return the shapes of attention with two key-value heads for four heads."""
    attention = linear("self_attn.q_proj") | linear(f"self_attn.{output}")
    return attention | linear("self_attn.k_proj", KV) | linear("self_attn.v_proj", KV)


def _without_biases(shapes: Shapes, names: str = "") -> Shapes:
    return {name: shape for name, shape in shapes.items() if not name.endswith(f"{names}.bias")}


_GATED = weights("mlp.", {f"{name}_proj": GATED[name] for name in ("gate", "up", "down")})


def starcoder2(path: Path, **config: Any) -> Folder:
    """Make a folder of StarCoder2, whose feed-forward has no gate."""
    layer = _NORMS | _attention("o_proj") | linear("mlp.c_fc", FFN) | linear("mlp.c_proj", DIM, FFN)
    settings = {"model_type": "starcoder2", "tie_word_embeddings": False}
    return _with_layer_norm(path, "Starcoder2", config, layer, norm("model.norm"), **settings)


def phi(path: Path, **config: Any) -> Folder:
    """Make a folder of Phi-2, whose attention and feed-forward have the same input."""
    layer = norm("input_layernorm") | _attention("dense")
    layer |= linear("mlp.fc1", FFN) | linear("mlp.fc2", DIM, FFN)
    last: Shapes = {**norm("model.final_layernorm"), "lm_head.bias": (VOCAB,)}
    return _with_layer_norm(path, "Phi", config, layer, last, model_type="phi")


def stablelm(path: Path, use_qkv_bias: bool = True, **config: Any) -> Folder:
    """Make a folder of StableLM, in which biases of q, k and v are optional."""
    layer = _NORMS | _without_biases(_attention("o_proj"), "o_proj" if use_qkv_bias else "") | _GATED
    settings = {"model_type": "stablelm", "use_qkv_bias": use_qkv_bias}
    return _with_layer_norm(path, "StableLm", config, layer, norm("model.norm"), **settings)


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
    }
    folder = _with_layer_norm(path, "Cohere2", config, layer, {"model.norm.weight": (DIM,)}, **settings)
    del folder.tensors["lm_head.weight"]
    return folder


# Decoders with experts.
WIDTH = 24  # of an expert
_SIZE = 4  # of weights of experts, relative to others: so that they matter


def _add_experts(folder: Folder, layer: str, count: int, names: tuple[str, ...] = _DENSE) -> None:
    """Add a router whose products differ between tokens, and matrices of each expert."""
    folder.add({f"{layer}.gate.weight": (count, DIM)}, 500, size=10)
    matrices = dict(zip(names, ((WIDTH, DIM), (WIDTH, DIM), (DIM, WIDTH)), strict=True))
    shapes: Shapes = {}
    for expert in range(count):
        shapes |= weights(f"{layer}.experts.{expert}.", matrices)
    folder.add(shapes, 600, size=_SIZE)


def _without_dense(folder: Folder) -> Folder:
    for name in _of_layers(folder, _GATED):
        del folder.tensors[name]
    return folder


def _with_experts(folder: Folder, count: int) -> Folder:
    """Give all layers experts in place of their dense feed-forward."""
    _without_dense(folder)
    for layer in range(folder.config["num_hidden_layers"]):
        _add_experts(folder, f"model.layers.{layer}.mlp", count)
    return folder


def qwen3_moe(path: Path, count: int = 8, used: int = 3, **config: Any) -> Folder:
    """Make a folder of Qwen3 with experts."""
    settings = {
        "model_type": "qwen3_moe",
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True,
        "head_dim": HEAD,
        "pad_token_id": 0,
    }
    return _with_experts(_llama("Qwen3Moe", _norms_of_heads(HEAD, HEAD), **settings)(path, **config), count)


def olmoe(path: Path, count: int = 64, used: int = 8, **config: Any) -> Folder:
    """Make a folder of OLMoE, whose factors are not divided by their sum."""
    settings = {"num_experts": count, "num_experts_per_tok": used, "intermediate_size": WIDTH}
    make = _llama("Olmoe", _norms_of_heads(DIM, KV), pad_token_id=0, **settings)
    return _with_experts(make(path, **config), count)


def _with_granite_experts(folder: Folder, count: int) -> Folder:
    """Add experts of which gate and up are one matrix."""
    shapes = {"input_linear": (count, 2 * WIDTH, DIM), "output_linear": (count, DIM, WIDTH)}
    for first, (name, shape) in zip((700, 800), shapes.items(), strict=True):
        folder.add(_of_layers(folder, weights("block_sparse_moe.", {name: shape})), first, size=_SIZE)
    router = weights("block_sparse_moe.router.", {"layer": (count, DIM)})
    return folder.add(_of_layers(folder, router), 900, size=10)


def granite_moe(path: Path, count: int = 5, used: int = 2, shared: int = 0, **config: Any) -> Folder:
    """Make a folder of Granite 3 with experts; `shared` is the width of one for all tokens."""
    family = "Shared" if shared else ""
    settings = {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": WIDTH,
        **GRANITE,
        **({"shared_intermediate_size": shared} if shared else {}),
    }
    folder = _without_dense(_llama(f"GraniteMoe{family}", **settings)(path, **config))
    for name, shape in {"input": (2 * shared, DIM), "output": (DIM, shared)}.items() if shared else ():
        folder.add(_of_layers(folder, weights("shared_mlp.", {f"{name}_linear": shape})), size=_SIZE)
    return _with_granite_experts(folder, count)


def granite_hybrid_experts(path: Path, count: int = 6, used: int = 2, **config: Any) -> Folder:
    """Make a folder of Granite 4 with experts, and one for all tokens."""
    settings = {"num_local_experts": count, "num_experts_per_tok": used, "intermediate_size": WIDTH}
    folder = recurrent_folders.granite_hybrid(path, tie_word_embeddings=True, **settings, **config)
    return _with_granite_experts(folder, count)


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
    folder, at = recurrent_folders.lfm2(path, **{**settings, **config}), "model.layers.1.feed_forward"
    for name in ("w1", "w2", "w3"):
        del folder.tensors[f"{at}.{name}.weight"]
    _add_experts(folder, at, count, ("w1", "w3", "w2"))
    folder.tensors[f"{at}.expert_bias"] = np.linspace(-0.5, 0.5, count, dtype=np.float32)
    return folder


# Gemma 4, whose layers have different heads and feed-forwards.
WINDOW_HEAD, FULL_HEAD, INPUT = 12, 24, 20
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def gemma4(path: Path, **config: Any) -> Folder:
    """Make a folder of Gemma 4, whose last layers attend to keys and values of earlier ones."""
    usual = {
        "model_type": "gemma4_text",
        "num_hidden_layers": len(KINDS),
        "layer_types": KINDS,
        "sliding_window": 9,
        "head_dim": WINDOW_HEAD,
        "global_head_dim": FULL_HEAD,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": INPUT,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 1.5,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
    }
    settings: dict[str, Any] = {**usual, **config}
    folder = _llama("Gemma4", _without_head)(path, **settings)
    layers, inputs = len(settings["layer_types"]), settings["hidden_size_per_layer_input"]
    shapes: Shapes = {}
    if inputs:
        shapes = {
            "model.embed_tokens_per_layer.weight": (VOCAB, layers * inputs),
            "model.per_layer_model_projection.weight": (layers * inputs, DIM),
            "model.per_layer_projection_norm.weight": (inputs,),
        }
    for layer, kind in enumerate(settings["layer_types"]):
        head = settings["head_dim"] if kind == "sliding_attention" else settings["global_head_dim"]
        kv = HEADS // 2 * head
        shared = layer >= layers - settings["num_kv_shared_layers"]
        width = FFN * (2 if shared and settings["use_double_wide_mlp"] else 1)
        of_layer: Shapes = {
            "self_attn.q_proj": (HEADS * head, DIM),
            "self_attn.q_norm": (head,),
            "self_attn.o_proj": (DIM, HEADS * head),
            "mlp.gate_proj": (width, DIM),
            "mlp.up_proj": (width, DIM),
            "mlp.down_proj": (DIM, width),
            "pre_feedforward_layernorm": (DIM,),
            "post_feedforward_layernorm": (DIM,),
        }
        # Published folders have keys and values in all layers.
        of_keys: Shapes = {
            "self_attn.k_proj": (kv, DIM),
            "self_attn.k_norm": (head,),
            "self_attn.v_proj": (kv, DIM),
        }
        of_inputs: Shapes = {
            "per_layer_input_gate": (inputs, DIM),
            "per_layer_projection": (DIM, inputs),
            "post_per_layer_input_norm": (DIM,),
        }
        at = f"model.layers.{layer}."
        shapes |= {**weights(at, of_layer), f"{at}layer_scalar": (1,), **weights(at, of_keys)}
        shapes |= weights(at, of_inputs) if inputs else {}
    folder.add(shapes, 100)
    for name in shapes:
        if name.endswith(("norm.weight", "layer_scalar")):
            folder.tensors[name] += 1
    return folder


def gemma4_with_images(path: Path) -> Folder:
    """Make a folder of Gemma 4 with parts for images and sounds, which are left out."""
    folder = with_text_part(gemma4(path), model_type="gemma4", tie_word_embeddings=True)
    folder.config["architectures"] = ["Gemma4ForConditionalGeneration"]
    others: Shapes = {"vision_tower.std_bias": (4,), "embed_audio.embedding_projection.weight": (DIM, 4)}
    return folder.add({f"model.{name}": shape for name, shape in others.items()}, 1)


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 2,
}
_ROTATED: dict[str, Any] = {"layer_types": ["attention", "attention"], "position_embedding_type": "rope"}
RECORDED: dict[str, Callable[[Path], Folder]] = {
    "lfm2": partial(recurrent_folders.lfm2, tie_word_embeddings=True, bos_token_id=0, pad_token_id=0),
    "qwen35": partial(recurrent_folders.qwen35, tie_word_embeddings=True),
    "granite_hybrid": partial(recurrent_folders.granite_hybrid, tie_word_embeddings=True),
    "granite_hybrid, attention with rotation": partial(
        recurrent_folders.granite_hybrid, tie_word_embeddings=True, **_ROTATED
    ),
    "mamba2": partial(recurrent_folders.mamba2, tie_word_embeddings=True),
    "falcon_h1": recurrent_folders.falcon_h1,
    "llama, linear": partial(
        llama_like, rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=500.0
    ),
    "llama, frequency factors": partial(llama_like, rope_scaling=_LLAMA3),
    "llama, biases": llama_with_biases,
    "gemma3": gemma3,
    "qwen2": partial(qwen2, use_sliding_window=False),
    "qwen3": partial(qwen3, use_sliding_window=False),
    "smollm3": smollm3,
    "granite": granite,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "qwen3_vl": qwen3_vl,
    "ministral3": ministral3,
    "phi3": phi3,
    "phi3, part of heads rotates, window": partial(phi3, partial_rotary_factor=0.5, sliding_window=9),
    "phi3, LongRoPE": partial(phi3, **long_rope(HEAD)),
    "phi3, LongRoPE of short texts": partial(
        phi3, **{**long_rope(HEAD), "original_max_position_embeddings": CONTEXT}
    ),
    "ernie4_5": ernie,
    "exaone4": exaone4,
    "exaone4, window": partial(exaone4, num_hidden_layers=5, sliding_window=9, sliding_window_pattern=4),
    "gemma2": gemma2,
    "gemma2, no limits": partial(
        gemma2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "hunyuan": hunyuan,
    "mistral, window": partial(mistral, sliding_window=9),
    "qwen2, window": qwen2,
    "qwen3, window": qwen3,
    "granite, dynamic": partial(granite, rope_scaling={"type": "dynamic", "factor": 4.0}),
    "olmo2, YaRN of its context": partial(olmo2, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "mistral, YaRN": partial(
        mistral,
        sliding_window=None,
        original_max_position_embeddings=CONTEXT // 4,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    ),
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
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, one of three": partial(qwen3_moe, count=3, used=1, norm_topk_prob=False),
    "olmoe": olmoe,
    "granite_moe": granite_moe,
    "granite_moe, shared": partial(granite_moe, shared=40),
    "granite_hybrid, experts": granite_hybrid_experts,
    "granite_hybrid, experts, attention with rotation": partial(granite_hybrid_experts, **_ROTATED),
    "lfm2_moe": lfm2_moe,
    "gemma4": gemma4,
    "gemma4, equal feed-forwards, no limit": partial(
        gemma4, use_double_wide_mlp=False, final_logit_softcapping=None, num_kv_shared_layers=1
    ),
    "gemma4, nothing shared, no inputs": partial(
        gemma4, num_kv_shared_layers=0, hidden_size_per_layer_input=0, global_head_dim=WINDOW_HEAD
    ),
}
