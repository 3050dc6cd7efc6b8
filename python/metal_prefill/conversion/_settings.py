"""Metadata and weights that depend on several fields of ``config.json``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np

from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._rotation import (
    head_width,
    original_context,
    phi3,
    rope_of,
    rope_scaling,
    rope_scaling_or_factors,
    rotated_part,
)
from metal_prefill.conversion._weights import Weight
from metal_prefill.files._architecture import ARCHITECTURES


def activation(config: Fields) -> dict[str, Any]:
    """Return the activation of the feed-forward, unless it is the exact GELU."""
    known = ARCHITECTURES["bert"].activations
    name = config.choice("hidden_act", "activation", known=known, default="gelu")
    return {} if name == "gelu" else {"hidden_activation": name}


def bert(config: Fields) -> dict[str, Any]:
    """Return the activation, which is also that of the head that predicts masked tokens."""
    found = activation(config)
    if found:
        found["vocabulary_activation"] = ARCHITECTURES["bert"].activations[found["hidden_activation"]]
    return found


def deberta(config: Fields) -> dict[str, Any]:
    """Return the activation, and the scale of the sum of three products."""
    kinds = config.values.get("pos_att_type")
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or {"c2p", "p2c"} != {str(kind).strip() for kind in kinds}:
        raise config.unsupported(f"pos_att_type is {kinds!r}; supported is c2p|p2c")
    return {**activation(config), "attention.scale": (3 * head_width(config)) ** -0.5}


def t5(config: Fields) -> dict[str, Any]:
    """Return the activation of the feed-forward, which is gated or not."""
    stated = config.string("feed_forward_proj", default="relu")
    name = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    known = ARCHITECTURES["t5encoder"].activations
    if name not in known:
        raise config.unsupported(f"feed_forward_proj is {stated!r}; supported: {', '.join(known)}")
    return {"hidden_activation": name}


def without_padding_positions(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the positions of tokens, which follow those of padding."""
    if weight.shape[0] <= (first := _first_position(config)):
        raise weight.error(f"has {weight.shape[0]} positions, of which the first {first} are not used")
    return weight.reordered(np.arange(first, weight.shape[0]))


def roberta(config: Fields) -> dict[str, Any]:
    """Return the activation, and the number of positions of tokens, which follow those of padding."""
    positions, first = config.integer("max_position_embeddings"), _first_position(config)
    if positions <= first:
        raise config.error(
            f"max_position_embeddings is {positions}, must be more than {first}, the first position"
        )
    return {**activation(config), "context_length": positions - first}


def _first_position(config: Fields) -> int:
    return config.integer("pad_token_id", default=1, least=0) + 1


def transposed(config: Fields, name: str, weight: Weight) -> Weight:
    """Return a matrix with the columns as rows."""
    return weight.transposed()


def plus_one(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the factors of a norm that are stored as their differences from 1."""
    return weight.computed(lambda index: weight.rows(index) + 1)


def gpt2(config: Fields) -> dict[str, Any]:
    """Return the inner width of the feed-forward, and its activation."""
    return {
        "feed_forward_length": config.integer("n_inner", default=4 * config.integer("n_embd")),
        "hidden_activation": config.string("activation_function", default="gelu_new"),
    }


def gpt_neox(config: Fields) -> dict[str, Any]:
    """Return the rotation of a part of a head, the activation, and whether blocks of a layer are parallel."""
    return {
        **rotated_part(config, rope_of(config), "rotary_pct", 0.25),
        **rope_scaling(config),
        "hidden_activation": config.string("hidden_act", default="gelu"),
        "use_parallel_residual": config.boolean("use_parallel_residual", default=True),
    }


def starcoder2(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, the window of all layers if there is one, and the activation."""
    window = _window(config) if config.has("sliding_window") else {}
    activation = config.string("hidden_act", default="gelu_pytorch_tanh")
    return {**rope_scaling(config), **window, "hidden_activation": activation}


def cohere2(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, and the layers with a window, which are those that rotate."""
    return rope_scaling(config) | _layers_with_window(config, 4)


def modern_bert(config: Fields) -> dict[str, Any]:
    """Return the windows and the bases of the rotation in layers with and without one."""
    layers = config.layers()
    kinds = config.sequence("layer_types")
    period = config.integer("global_attn_every_n_layers", default=3)
    if kinds:
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        period = full[1] if len(full) > 1 else layers
        if len(kinds) != layers or full != list(range(0, layers, period)):
            raise config.unsupported(
                "layer_types must have full_attention in every n-th layer from the first"
            )
    rope = config.object("rope_parameters")
    bases = {}
    for suffix, kind, name, default in (
        ("rope.freq_base", "full_attention", "global_rope_theta", 160000.0),
        ("rope.freq_base_swa", "sliding_attention", "local_rope_theta", 10000.0),
    ):
        base = rope.object(kind)
        base.require("rope_type", ("default",), "default")
        bases[suffix] = base.number("rope_theta", default=config.number(name, default=default))
    activation = config.string("hidden_activation", default="gelu")
    return {
        **bases,
        "attention.sliding_window": config.integer("local_attention"),
        "attention.sliding_window_pattern": period,
        "rope.scaling.type": "none",
        "vocab_size": config.integer("vocab_size"),
        "hidden_activation": activation,
    }


def layer_kinds(config: Fields, known: Sequence[str], usual: Callable[[int], str]) -> list[str]:
    """Return the kind of each layer, the usual one unless all are listed; messages name the first two."""
    layers = config.layers()
    kinds = config.sequence("layer_types") or [usual(layer) for layer in range(layers)]
    if len(kinds) != layers or not all(isinstance(kind, str) and kind in known for kind in kinds):
        names = " or ".join(known[:2])
        raise config.unsupported(f"layer_types must have {names} for each of the {layers} layers")
    return kinds


def windowed_layers(config: Fields, usual: Callable[[int], bool]) -> list[bool]:
    """Return whether each layer has a window."""
    known = ("full_attention", "sliding_attention")
    return [kind == known[1] for kind in layer_kinds(config, known, lambda layer: known[usual(layer)])]


def lfm2(config: Fields) -> dict[str, Any]:
    """Return the layers with attention, the inner width of the feed-forward, and the rotation.

    Unless ``block_auto_adjust_ff_dim`` is false, the width is two thirds of the stated one, times a factor,
    rounded up.
    """
    known = ("full_attention", "conv")
    chosen = config.sequence("full_attn_idxs") if config.has("full_attn_idxs") else range(config.layers())
    attends = {layer for layer in chosen if isinstance(layer, int)}
    kinds = layer_kinds(config, known, lambda layer: known[layer not in attends])
    heads = config.integer("num_key_value_heads")
    width = config.integer("block_ff_dim", "intermediate_size")
    if config.boolean("block_auto_adjust_ff_dim", default=True):
        step = config.integer("block_multiple_of", default=256)
        width = int(config.number("block_ffn_dim_multiplier", default=1.0) * (2 * width // 3))
        width = -(-width // step) * step
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": width,
        **rope_scaling(config),
    }


def lfm2_moe(config: Fields) -> dict[str, Any]:
    """Return the metadata of `lfm2`, the first layers, which have no experts, and the rules of the router."""
    fields = {**config.values, "block_auto_adjust_ff_dim": False}
    return {
        **lfm2(Fields(config.path, fields)),
        "leading_dense_block_count": config.integer("num_dense_layers", default=2, least=0),
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_weights_scale": config.number("routed_scaling_factor", default=1.0),
        **normalized_routes(config, default=True),
    }


def normalized_routes(config: Fields, default: bool = False) -> dict[str, Any]:
    """Return whether the factors of a token's experts are divided by their sum."""
    return {"expert_weights_norm": config.boolean("norm_topk_prob", default=default)}


def with_experts(config: Fields) -> dict[str, Any]:
    """Return the metadata of a rotation, and the rules of the router."""
    return {**rope_scaling(config), **normalized_routes(config)}


def granite_moe(config: Fields) -> dict[str, Any]:
    """Return the metadata of a rotation, and the width of the expert for all tokens if there is one."""
    shared = config.integer("shared_intermediate_size", default=0, least=0)
    has_one = config.string("model_type", default="") != "granitemoe" and shared > 0
    return {**rope_scaling(config), **({"expert_shared_feed_forward_length": shared} if has_one else {})}


def qwen35(config: Fields) -> dict[str, Any]:
    """Return the layers with attention, the width of the delta rule, and the rotation of a part of a head."""
    known, layers = ("full_attention", "linear_attention"), config.layers()
    every = config.integer("full_attention_interval", default=4)
    kinds = layer_kinds(config, known, lambda layer: known[(layer + 1) % every != 0])
    recurrent = [kind == "linear_attention" for kind in kinds]
    every = recurrent.index(False) + 1 if False in recurrent else layers + 1
    found: dict[str, Any] = {"full_attention_interval": every}
    if recurrent != [(i + 1) % every != 0 for i in range(layers)]:
        found = {"attention.recurrent_layers": recurrent}
    rope = config.object("rope_parameters")
    part = rope.number("partial_rotary_factor", default=config.number("partial_rotary_factor", default=0.25))
    dims = int(config.integer("head_dim", default=256) * part)
    # Pairs that rotate by the time, the row and the column of an image; the same in a text.
    third = dims // 2 // 3
    sections = rope.sequence("mrope_section") or [dims // 2 - 2 * third, third, third]
    inner = config.integer("linear_num_value_heads", default=32)
    inner *= config.integer("linear_value_head_dim", default=128)
    return {
        **found,
        "ssm.inner_size": inner,
        "rope.dimension_count": dims,
        "rope.dimension_sections": [*sections, 0],
        **rope_scaling(config),
    }


def rates_of_decay(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the rates of decay, of which a folder has the logarithms."""
    return weight.computed(lambda index: -np.exp(weight.rows(index)))


def value_heads_by_turns(config: Fields, name: str, weight: Weight) -> Weight:
    """Reorder the value heads of a delta rule.

    In a folder those of one key head follow each other. In a file, value head h has key head
    ``h % groups``.
    """
    groups = config.integer("linear_num_key_heads", default=16)
    heads = config.integer("linear_num_value_heads", default=32)
    width = config.integer("linear_value_head_dim", default=128)
    keys = 2 * groups * config.integer("linear_key_head_dim", default=128)

    part = name.split(".")[2]
    if part == "ssm_norm" or heads % groups:
        return weight
    width = width if part in ("attn_qkv", "ssm_conv1d", "ssm_out", "attn_gate") else 1
    order = np.arange(heads * width).reshape(groups, heads // groups, width).swapaxes(0, 1).ravel()
    if part == "ssm_out":
        return weight.computed(lambda index: weight.rows(index)[:, order])
    if part in ("attn_qkv", "ssm_conv1d"):
        order = np.concatenate([np.arange(keys), keys + order])
    return weight.reordered(order) if len(order) == weight.shape[0] else weight


def _layers_with_window(config: Fields, usual_period: int) -> dict[str, Any]:
    """Return which layers have a window, unless that is all but the last of each usual period."""
    if not config.sequence("layer_types"):
        period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=usual_period)
        return {} if period == usual_period else {"attention.sliding_window_pattern": period}

    def usual(layer: int) -> bool:
        return (layer + 1) % usual_period != 0

    windowed = windowed_layers(config, usual)
    is_usual = windowed == list(map(usual, range(len(windowed))))
    return {} if is_usual else {"attention.sliding_window_pattern": windowed}


_WINDOW = 4096  # of classes in transformers whose configuration has no field for it; null means none


def mistral(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, and the window of all layers, if there is one."""
    return rope_scaling_or_factors(config) | _window(config)


def ministral3(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, the growth of scores with the position, and the window."""
    found = rope_scaling(config) | (_window(config) if config.has("sliding_window") else {})
    rope = rope_of(config)
    if rope.has("llama_4_scaling_beta"):
        found["attention.temperature_scale"] = rope.number("llama_4_scaling_beta")
        found["rope.scaling.original_context_length"] = original_context(config, rope)
    return found


def minicpm(config: Fields) -> dict[str, Any]:
    """Return factors of embeddings, additions to the residual stream and logits, and the rotation."""
    width = config.integer("hidden_size")
    return {
        **phi3(config),
        "embedding_scale": config.number("scale_emb", default=1.0),
        "residual_scale": config.number("scale_depth", default=1.0) / math.sqrt(config.layers()),
        "logit_scale": width / config.number("dim_model_base", default=1.0),
    }


def qwen(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, and the window of the upper layers, if there is one."""
    found = rope_scaling_or_factors(config)
    config.require("use_sliding_window", (False, True), False)
    if not config.values.get("use_sliding_window"):
        return found
    first = config.integer("max_window_layers", default=28, least=0)
    windowed = windowed_layers(config, lambda layer: layer >= first)
    if not any(windowed) or not (window := _window(config)):
        return found
    return {**found, **window, "attention.sliding_window_pattern": windowed}


def _window(config: Fields) -> dict[str, Any]:
    """Return the window of a folder, nothing if it has none or one that is as large as its context."""
    if config.values.get("sliding_window", _WINDOW) is None:
        return {}
    window = config.integer("sliding_window", default=_WINDOW)
    return {"attention.sliding_window": window} if window < config.integer("max_position_embeddings") else {}


def exaone4(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, and the layers with a window, if there is one."""
    found = rope_scaling_or_factors(config)
    if config.values.get("sliding_window", _WINDOW) is None:
        return found
    return {
        **found,
        "attention.sliding_window": config.integer("sliding_window", default=_WINDOW),
        **_layers_with_window(config, 4),
    }


def olmo3(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation of layers without a window, and the layers with one."""
    kinds = ("full_attention", "sliding_attention")
    rope, key = config.object("rope_parameters"), "rope_parameters"
    if any(map(rope.has, kinds)):
        full, windowed = map(rope.object, kinds)
        windowed.require("rope_type", ("default",), "default")
        base = full.number("rope_theta", default=500000.0)
        windowed.require("rope_theta", (base,), base)
        config = Fields(config.path, {**config.values, key: full.values})
    found = rope_scaling(config)
    if "rope.freq_base" not in found:
        found["rope.freq_base"] = config.number("rope_theta", default=500000.0)
    if "rope.scaling.attn_factor" in found:
        raise config.unsupported("attention_factor of layers without a window alone is not supported")
    # Layers with a window rotate differently, so one as large as the context also counts.
    window = {"attention.sliding_window": config.integer("sliding_window", default=_WINDOW)}
    return found | window | _layers_with_window(config, 4)


def gemma2(config: Fields) -> dict[str, Any]:
    """Return the rotation, the window and its layers, the soft limits, and the scale of q.k."""
    found = rope_scaling(config) | {
        "attention.sliding_window": config.integer("sliding_window", default=_WINDOW),
        **_layers_with_window(config, 2),
    }
    # Null means that there is no limit.
    for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        has_none = key in config.values and config.values[key] is None
        found[key] = 0.0 if has_none else config.number(key, default=default)
    return found | _gemma_scale(config)


def _gemma_scale(config: Fields) -> dict[str, Any]:
    """Return the factor of q.k, unless it follows from the width of a head."""
    scalar = config.number("query_pre_attn_scalar", default=256)
    return {} if scalar == config.integer("head_dim", default=256) else {"attention.scale": scalar**-0.5}


def gemma3(config: Fields) -> dict[str, Any]:
    """Return the window, its layers, the bases of the rotation with and without it, and the scale of q.k."""
    rope = config.object("rope_parameters")
    full, local = rope.object("full_attention"), rope.object("sliding_attention")
    local.require("rope_type", ("default",), "default")
    kind = full.choice("rope_type", known=("default", "linear"), default="default")
    scaling = config.object("rope_scaling")
    factor = full.number("factor", default=1.0) if kind == "linear" else scaling.number("factor", default=1.0)
    found: dict[str, Any] = {
        "rope.freq_base": full.number("rope_theta", default=config.number("rope_theta", default=1000000.0)),
        "rope.freq_base_swa": local.number(
            "rope_theta", default=config.number("rope_local_base_freq", default=10000.0)
        ),
        "attention.sliding_window": config.integer("sliding_window"),
        **_layers_with_window(config, 6),
    }
    if factor != 1:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    return found | _gemma_scale(config)


def jina_v3(config: Fields) -> dict[str, Any]:
    """Return the activation, and the base of the rotation."""
    rope = config.object("rope_parameters")
    rope.require("rope_type", ("default",), "default")
    base = rope.number("rope_theta", default=config.number("rotary_emb_base", default=20000.0))
    return {**activation(config), "rope.freq_base": base}
