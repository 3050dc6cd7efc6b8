"""Metadata and weights that depend on several fields of ``config.json``."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._rotation import (
    MAX_HEAD,
    head_width,
    original_context,
    phi3,
    rope_of,
    rope_scaling,
    rope_scaling_or_factors,
)
from metal_prefill.conversion._weights import FloatArray, Weight
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
    kinds = config.values.get("pos_att_type")
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or {"c2p", "p2c"} != {str(kind).strip() for kind in kinds}:
        raise config.unsupported(f"pos_att_type is {kinds!r}; supported is c2p|p2c")
    return {**activation(config), "attention.scale": (3 * head_width(config)) ** -0.5}


def t5(config: Fields) -> dict[str, Any]:
    stated = config.string("feed_forward_proj", default="relu")
    name = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    known = ARCHITECTURES["t5encoder"].activations
    if name not in known:
        raise config.unsupported(f"feed_forward_proj is {stated!r}; supported: {', '.join(known)}")
    return {"hidden_activation": name}


def without_padding_positions(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the positions of tokens, which follow the positions of padding."""
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
    return weight.transposed()


def plus_one(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the factors of a norm that are stored as their differences from 1."""
    return weight.computed(lambda index: weight.rows(index) + 1)


def gpt2(config: Fields) -> dict[str, Any]:
    return {
        "feed_forward_length": config.integer("n_inner", default=4 * config.integer("n_embd")),
        "hidden_activation": config.string("activation_function", default="gelu_new"),
    }


def modern_bert(config: Fields) -> dict[str, Any]:
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
    return {
        **bases,
        "attention.sliding_window": config.integer("local_attention"),
        "attention.sliding_window_pattern": period,
        "rope.scaling.type": "none",
        "vocab_size": config.integer("vocab_size"),
        "hidden_activation": config.string("hidden_activation", default="gelu"),
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
    known = ("full_attention", "sliding_attention")
    return [kind == known[1] for kind in layer_kinds(config, known, lambda layer: known[usual(layer)])]


def granite_moe(config: Fields) -> dict[str, Any]:
    """Return the metadata of a rotation, and the width of the expert for all tokens if there is one."""
    shared = config.integer("shared_intermediate_size", default=0, least=0)
    has_one = config.string("model_type", default="") != "granitemoe" and shared > 0
    return {**rope_scaling(config), **({"expert_shared_feed_forward_length": shared} if has_one else {})}


def layers_with_window(config: Fields, usual_period: int) -> dict[str, Any]:
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


def ministral3(config: Fields) -> dict[str, Any]:
    found = rope_scaling(config) | stated_window(config)
    rope = rope_of(config)
    if rope.has("llama_4_scaling_beta"):
        found["attention.temperature_scale"] = rope.number("llama_4_scaling_beta")
        found["rope.scaling.original_context_length"] = original_context(config, rope)
    return found


def minicpm(config: Fields) -> dict[str, Any]:
    width = config.integer("hidden_size")
    return {
        **phi3(config),
        "embedding_scale": config.number("scale_emb", default=1.0),
        "residual_scale": config.number("scale_depth", default=1.0) / math.sqrt(config.layers()),
        "logit_scale": width / config.number("dim_model_base", default=1.0),
    }


def qwen(config: Fields) -> dict[str, Any]:
    found = rope_scaling_or_factors(config)
    config.require("use_sliding_window", (False, True), False)
    if not config.values.get("use_sliding_window"):
        return found
    first = config.integer("max_window_layers", default=28, least=0)
    windowed = windowed_layers(config, lambda layer: layer >= first)
    if not any(windowed) or not (size := window(config)):
        return found
    return {**found, **size, "attention.sliding_window_pattern": windowed}


def window(config: Fields) -> dict[str, Any]:
    """Return the window of a folder, nothing if it has none or one that is as large as its context."""
    if config.values.get("sliding_window", _WINDOW) is None:
        return {}
    size = config.integer("sliding_window", default=_WINDOW)
    return {"attention.sliding_window": size} if size < config.integer("max_position_embeddings") else {}


def stated_window(config: Fields) -> dict[str, Any]:
    """Return the window of a folder that states one."""
    return window(config) if config.has("sliding_window") else {}


def exaone4(config: Fields) -> dict[str, Any]:
    found = rope_scaling_or_factors(config)
    if config.values.get("sliding_window", _WINDOW) is None:
        return found
    return {
        **found,
        "attention.sliding_window": config.integer("sliding_window", default=_WINDOW),
        **layers_with_window(config, 4),
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
    size = config.integer("sliding_window", default=_WINDOW)
    return found | {"attention.sliding_window": size} | layers_with_window(config, 4)


def gemma2(config: Fields) -> dict[str, Any]:
    found = rope_scaling(config) | {
        "attention.sliding_window": config.integer("sliding_window", default=_WINDOW),
        **layers_with_window(config, 2),
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
    rope = config.object("rope_parameters")
    full, local = rope.object("full_attention"), rope.object("sliding_attention")
    local.require("rope_type", ("default",), "default")
    scaling = full if full.has("rope_type") else config.object("rope_scaling")
    found: dict[str, Any] = {
        "rope.freq_base": full.number("rope_theta", default=config.number("rope_theta", default=1000000.0)),
        "rope.freq_base_swa": local.number(
            "rope_theta", default=config.number("rope_local_base_freq", default=10000.0)
        ),
        "attention.sliding_window": config.integer("sliding_window"),
        **layers_with_window(config, 6),
    }
    if scaling.choice("rope_type", "type", known=("default", "linear"), default="default") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.number("factor")}
    return found | _gemma_scale(config)


def jina_v3(config: Fields) -> dict[str, Any]:
    rope = config.object("rope_parameters")
    rope.require("rope_type", ("default",), "default")
    base = rope.number("rope_theta", default=config.number("rotary_emb_base", default=20000.0))
    return {**activation(config), "rope.freq_base": base}


_UNROTATED = 1e30  # divisor of the frequencies of pairs that are not rotated, as in files of llama.cpp
_OWN_KEYS = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.weight")


def gemma4(config: Fields) -> dict[str, Any]:
    layers, windowed = config.layers(), _gemma4_windows(config)
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


def gemma4_rope_factors(config: Fields) -> dict[str, FloatArray]:
    """Return divisors of the frequencies of layers without a window, of which only the first pairs rotate."""
    full = config.object("rope_parameters").object("full_attention")
    pairs = _full_head_dim(config) // 2
    part = full.number("partial_rotary_factor", default=0.25)
    if part > 1:
        raise full.error(f"{full.name('partial_rotary_factor')} is {part}, must be at most 1")
    rotated = np.arange(pairs) < int(part * 2 * pairs // 2)
    return {"rope_freqs.weight": np.where(rotated, 1.0, _UNROTATED).astype(np.float32)}


def without_unused_keys(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Omit the projections and norms of keys and values that are shared from other layers."""
    own = config.layers() - config.integer("num_kv_shared_layers", default=0, least=0)

    def is_used(name: str) -> bool:
        match = _OWN_KEYS.fullmatch(name)
        return match is None or int(match[1]) < own or ".vision_tower." in name

    return {name: weight for name, weight in weights.items() if is_used(name)}


def _gemma4_windows(config: Fields) -> list[bool]:
    """Return whether each layer has a window; the last one never has."""
    return [*windowed_layers(config, lambda layer: (layer + 1) % 6 != 0)[:-1], False]


def _full_head_dim(config: Fields) -> int:
    """Return the width of heads in layers without a window."""
    if not config.has("per_layer_config"):
        return config.integer("global_head_dim", default=512, most=MAX_HEAD)
    head_dim = config.integer("head_dim", default=256, most=MAX_HEAD)
    of_layers = config.object("per_layer_config")
    kv_heads = config.integer("num_key_value_heads", default=4)
    widths: dict[bool, set[int]] = {True: set(), False: set()}
    for layer, windowed in enumerate(_gemma4_windows(config)):
        own = of_layers.object(str(layer))
        own.require("num_key_value_heads", (kv_heads,), kv_heads)
        widths[windowed].add(own.integer("head_dim", default=head_dim, most=MAX_HEAD))
    if widths[True] - {head_dim} or len(widths[False]) > 1:
        raise config.unsupported(
            f"{of_layers.name('head_dim')} differs between layers with a window, or between those without one"
        )
    return next(iter(widths[False]))
