"""Metadata and weights of Gemma 4, whose layers differ in their heads and feed-forwards."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._rotation import MAX_HEAD
from metal_prefill.conversion._settings import windowed_layers
from metal_prefill.conversion._weights import FloatArray, Weight

_UNROTATED = 1e30  # divisor of the frequencies of pairs that are not rotated, as in files of llama.cpp
_OWN_KEYS = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.weight")


def metadata(config: Fields) -> dict[str, Any]:
    """Return the heads of layers, their rotations, the widths of feed-forwards, and what layers share."""
    layers, windowed = config.layers(), _windowed(config)
    head_dim, full_dim = config.integer("head_dim", default=256), _full_head_dim(config)
    rope = config.object("rope_parameters")
    full, local = rope.object("full_attention"), rope.object("sliding_attention")
    full.require("rope_type", ("proportional",), "proportional")
    full.require("factor", (1.0,), 1.0)
    local.require("rope_type", ("default",), "default")
    shared = config.integer("num_kv_shared_layers", default=0, least=0, most=layers - 1)
    width = config.integer("intermediate_size")
    found: dict[str, Any] = {
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window": config.integer("sliding_window", default=512),
        "attention.sliding_window_pattern": windowed,
        "embedding_length_per_layer_input": config.integer(
            "hidden_size_per_layer_input", default=256, least=0
        ),
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": head_dim,
        "rope.freq_base": full.number("rope_theta", default=1e6),
        "rope.freq_base_swa": local.number("rope_theta", default=1e4),
    }
    if config.boolean("use_double_wide_mlp", default=False):
        found["feed_forward_length"] = [width] * (layers - shared) + [2 * width] * shared
    if config.has("final_logit_softcapping"):
        found["final_logit_softcapping"] = config.number("final_logit_softcapping")
    return found


def rope_factors(config: Fields) -> dict[str, FloatArray]:
    """Return divisors of the frequencies of layers without a window, of which only the first pairs rotate."""
    full = config.object("rope_parameters").object("full_attention")
    pairs = _full_head_dim(config) // 2
    part = full.number("partial_rotary_factor", default=0.25)
    if part > 1:
        raise full.error(f"{full.name('partial_rotary_factor')} is {part}, must be at most 1")
    rotated = np.arange(pairs) < int(part * 2 * pairs // 2)
    return {"rope_freqs.weight": np.where(rotated, 1.0, _UNROTATED).astype(np.float32)}


def without_unused_keys(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Leave out the projections and norms of keys and values that those of other layers replace."""
    own = config.layers() - config.integer("num_kv_shared_layers", default=0, least=0)

    def is_used(name: str) -> bool:
        match = _OWN_KEYS.fullmatch(name)
        return match is None or int(match[1]) < own or ".vision_tower." in name

    return {name: weight for name, weight in weights.items() if is_used(name)}


def _windowed(config: Fields) -> list[bool]:
    """Return whether each layer has a window; the last one never has."""
    return [*windowed_layers(config, lambda layer: (layer + 1) % 6 != 0)[:-1], False]


def _full_head_dim(config: Fields) -> int:
    """Return the width of heads in layers without a window."""
    if not config.has("per_layer_config"):
        return config.integer("global_head_dim", default=512, most=MAX_HEAD)
    head_dim, of_layers = (
        config.integer("head_dim", default=256, most=MAX_HEAD),
        config.object("per_layer_config"),
    )
    kv_heads = config.integer("num_key_value_heads", default=4)
    widths: dict[bool, set[int]] = {True: set(), False: set()}
    for layer, windowed in enumerate(_windowed(config)):
        own = of_layers.object(str(layer))
        own.require("num_key_value_heads", (kv_heads,), kv_heads)
        widths[windowed].add(own.integer("head_dim", default=head_dim, most=MAX_HEAD))
    if widths[True] - {head_dim} or len(widths[False]) > 1:
        raise config.unsupported(
            f"{of_layers.name('head_dim')} differs between layers with a window, or between those without one"
        )
    return next(iter(widths[False]))
