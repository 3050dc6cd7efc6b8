"""Metadata and weights of state-space layers (Mamba-2) that depend on several fields of ``config.json``."""

import math
from typing import Any

import numpy as np

from metal_prefill.conversion._folder import Fields, is_number
from metal_prefill.conversion._rotation import rope_scaling
from metal_prefill.conversion._settings import layer_kinds
from metal_prefill.conversion._weights import FloatArray, Weight

_ATTENTION, _STATE_SPACE = {"attention", "full_attention"}, {"mamba", "linear_attention"}
# Limits of steps that limit nothing: as JSON has them, and as transformers writes numbers that JSON lacks.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def column(config: Fields, name: str, weight: Weight) -> Weight:
    """Return a vector as a matrix with one column."""
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
    """Return the width of the layers."""
    _check_steps(config)
    inner = config.integer("num_heads", default=128) * config.integer("head_dim", default=64)
    expanded = config.integer("expand", default=2) * config.integer("hidden_size")
    if inner != expanded:
        raise config.error(f"num_heads and head_dim make {inner} values, expand and hidden_size {expanded}")
    return {"ssm.inner_size": inner}


def only_rotated_attention(config: Fields) -> bool:
    """Return whether every layer of a Granite 4 model has attention, with rotated positions."""
    kinds = set(_granite_layers(config))
    return kinds <= _ATTENTION and config.string("position_embedding_type", default="nope") == "rope"


def _granite_layers(config: Fields) -> list[Any]:
    """Return the kind of each layer, under any of the names of versions."""
    stated = config.sequence("layer_types") or config.sequence("layers_block_type")
    config = Fields(config.path, {**config.values, "layer_types": stated})
    return layer_kinds(config, ("attention", "mamba", *_ATTENTION, *_STATE_SPACE), lambda layer: "mamba")


def granite_hybrid(config: Fields) -> dict[str, Any]:
    """Return the layers with attention, the width of the others, and whether positions rotate."""
    _check_steps(config)
    heads = config.integer("num_attention_heads")
    heads = config.integer("num_key_value_heads", default=heads)
    scaling = rope_scaling(config)
    rotates = config.string("position_embedding_type", default="nope") == "rope"
    if "rope.scaling.type" in scaling:
        raise config.unsupported("the rotation of a granitehybrid model is scaled")
    return {
        **scaling,
        "attention.head_count_kv": [heads if kind in _ATTENTION else 0 for kind in _granite_layers(config)],
        "rope.scaling.finetuned": rotates,
        "ssm.inner_size": config.integer("mamba_expand", default=2) * config.integer("hidden_size"),
    }


def falcon_h1(config: Fields) -> dict[str, Any]:
    """Return the width of the state-space part, and the rotation."""
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
