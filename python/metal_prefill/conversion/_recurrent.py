"""Metadata and weights of layers with a state: short convolutions, gated delta rules and Mamba-2."""

import math
from typing import Any

import gguf
import numpy as np

from metal_prefill.conversion._folder import Fields, is_number
from metal_prefill.conversion._rotation import rope_scaling
from metal_prefill.conversion._settings import layer_kinds
from metal_prefill.conversion._weights import FloatArray, Weight

_ATTENTION, _STATE_SPACE = {"attention", "full_attention"}, {"mamba", "linear_attention"}
# Limits of steps without effect: in JSON, and as transformers writes numbers that JSON does not support.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def column(config: Fields, name: str, weight: Weight) -> Weight:
    return weight.computed(lambda index: weight.rows(index)[:, None], shape=(*weight.shape, 1))


def groups(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the factors of a norm as a matrix with a row for each group of heads."""
    count = config.integer("mamba_n_groups", "n_groups", default=8 if config.has("state_size") else 1)
    if len(weight.shape) != 1 or weight.shape[0] % count:
        raise config.error(f"{name} has shape {weight.shape}, which {count} groups do not divide")
    shape = (count, weight.shape[0] // count)
    return weight.computed(lambda index: weight.rows().reshape(shape)[index], shape=shape)


def _check_steps(config: Fields) -> None:
    limits = config.sequence("time_step_limit")
    if limits and limits not in _NO_LIMITS:
        raise config.unsupported(f"time_step_limit is {limits}; supported: no limits")


def mamba2(config: Fields) -> dict[str, Any]:
    _check_steps(config)
    inner = config.integer("num_heads", default=128) * config.integer("head_dim", default=64)
    expanded = config.integer("expand", default=2) * config.integer("hidden_size")
    if inner != expanded:
        raise config.error(f"num_heads and head_dim make {inner} values, expand and hidden_size {expanded}")
    return {"ssm.inner_size": inner}


def granite_attends(config: Fields) -> list[bool]:
    """Return whether each layer of a Granite 4 model has attention, from the fields of any version."""
    stated = config.sequence("layer_types") or config.sequence("layers_block_type")
    config = Fields(config.path, {**config.values, "layer_types": stated})
    known = ("attention", "mamba", *_ATTENTION, *_STATE_SPACE)
    return [kind in _ATTENTION for kind in layer_kinds(config, known, lambda layer: "mamba")]


def granite_rotates(config: Fields) -> bool:
    return config.string("position_embedding_type", default="nope") == "rope"


def granite_hybrid(config: Fields) -> dict[str, Any]:
    _check_steps(config)
    heads = config.integer("num_attention_heads")
    heads = config.integer("num_key_value_heads", default=heads)
    scaling = rope_scaling(config)
    if "rope.scaling.type" in scaling:
        raise config.unsupported("the rotation of a granitehybrid model is scaled")
    return {
        **scaling,
        "attention.head_count_kv": [heads if attends else 0 for attends in granite_attends(config)],
        "rope.scaling.finetuned": granite_rotates(config),
        "ssm.inner_size": config.integer("mamba_expand", default=2) * config.integer("hidden_size"),
    }


def falcon_h1(config: Fields) -> dict[str, Any]:
    _check_steps(config)
    if config.boolean("mamba_rms_norm", default=False):
        config.require("mamba_norm_before_gate", (False,), True)
    if config.boolean("tie_word_embeddings", default=False):
        one, other = (config.number(f"{name}_multiplier", default=1.0) for name in ("embedding", "lm_head"))
        if one != other:
            raise config.unsupported(
                f"tie_word_embeddings is True, and embedding_multiplier {one} differs from "
                f"lm_head_multiplier {other}"
            )
    return {"ssm.inner_size": _falcon_inner(config), **rope_scaling(config)}


def _falcon_inner(config: Fields) -> int:
    expanded = config.integer("mamba_expand", default=2) * config.integer("hidden_size")
    return config.integer("mamba_d_ssm", default=expanded)


def multiplied(config: Fields, name: str, weight: Weight) -> Weight:
    """Return a matrix of falcon-h1 times the factors of its input and of its output."""

    def factor(key: str) -> float:
        return config.number(f"{key}_multiplier", default=1.0)

    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "ssm_in":
        factors = factor("ssm_in") * _rows_of_scan(config, weight.shape[0])
        return weight.computed(lambda index: weight.rows(index) * factors[index, None])
    gate, down = _factors(config, "mlp_multipliers", 2)
    attention_in = factor("attention_in")
    found = {
        "token_embd": factor("embedding"),
        "output": factor("lm_head"),
        "ffn_gate": gate,
        "ffn_down": down,
        "attn_q": attention_in,
        "attn_k": attention_in * factor("key"),
        "attn_v": attention_in,
        "attn_output": factor("attention_out"),
        "ssm_out": factor("ssm_out"),
    }.get(part)
    if found is None:
        return weight
    return weight.computed(lambda index: weight.rows(index) * np.float32(found))


def _factors(config: Fields, key: str, count: int) -> list[float]:
    """Return a list of factors; a missing one has no effect."""
    found = config.sequence(key) or [1.0] * count
    if len(found) != count or not all(map(is_number, found)):
        raise config.error(f"{key} is {found}, must be {count} numbers")
    return found


def _rows_of_scan(config: Fields, rows: int) -> FloatArray:
    """Return the factors of the rows: of gates, values, keys, queries and steps."""
    inner = _falcon_inner(config)
    states = config.integer("mamba_n_groups", default=1) * config.integer("mamba_d_state", default=256)
    counts = [inner, inner, states, states, config.integer("mamba_n_heads", default=128)]
    if sum(counts) != rows:
        raise config.error(f"ssm_in has {rows} rows, the configuration requires {sum(counts)}")
    return np.repeat(np.array(_factors(config, "ssm_multipliers", len(counts)), np.float32), counts)


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
    fields = {**config.values, "block_auto_adjust_ff_dim": False}
    return {
        **lfm2(Fields(config.path, fields)),
        "leading_dense_block_count": config.integer("num_dense_layers", default=2, least=0),
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "expert_weights_scale": config.number("routed_scaling_factor", default=1.0),
        "expert_weights_norm": config.boolean("norm_topk_prob", default=True),
    }


def qwen35(config: Fields) -> dict[str, Any]:
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
    # Pairs that rotate by the time, row and column of an image, which are equal in a text.
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
    """Return the rates of decay from their logarithms in a folder."""
    return weight.computed(lambda index: -np.exp(weight.rows(index)))


def value_heads_by_turns(config: Fields, name: str, weight: Weight) -> Weight:
    """Reorder the value heads of a gated delta rule.

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
