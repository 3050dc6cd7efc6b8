"""Read how the layers of a model use positions, and the dimensions in which they differ."""

import math
from collections.abc import Iterable

from metal_prefill._core import ModelConfig
from metal_prefill.files._architecture import Architecture
from metal_prefill.files._metadata_keys import Keys

_DEFAULT_WINDOW_ROPE_BASE = 10000.0  # for layers with a window, in every published gemma3 model

_LONG_ROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def with_positions(
    config: ModelConfig, keys: Keys, traits: Architecture, max_context: int | None
) -> ModelConfig:
    """Read the scaling of rotations, and which layers rotate or have a window.

    `max_context` is the largest position that the model is opened for; None selects that of the file.
    """
    config = _with_rope_scaling(config, keys, traits)
    if keys.number("attention.temperature_scale", default=0):
        # Scores of positions after the original context have another scale.
        original = keys.positive("rope.scaling.original_context_length")
        config = config.replace(context_length=min(config.context_length, original))
    if traits.long_rope != "absent":
        config = _with_long_rope(config, keys, max_context)
    return _with_layer_positions(config, keys, traits)


def _with_rope_scaling(config: ModelConfig, keys: Keys, traits: Architecture) -> ModelConfig:
    attn_factor = keys.positive_float("rope.scaling.attn_factor", default=1.0)
    # A factor without a type means linear scaling. Files from before the type existed use another key for the
    # factor.
    factor_key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    kind = keys.string("rope.scaling.type", default="linear" if keys.has(factor_key) else "none")
    config = config.replace(rope_attn_factor=attn_factor)
    if kind == "longrope" and traits.long_rope != "absent":
        if (factor := keys.positive_float(factor_key, default=1.0)) != 1:
            raise keys.unsupported(f"{factor_key} {factor} together with LongRoPE is not supported")
        return config
    if kind == "none":
        return config
    if kind not in ("linear", "yarn"):
        raise keys.unsupported(
            f"rope scaling of type {kind} is not supported; supported are none, linear, yarn"
        )
    factor = keys.positive_float(factor_key)
    if kind == "linear":
        return config.replace(rope_scaling="linear", rope_factor=factor)
    if config.rope_base <= 1:
        raise keys.error(
            f"{keys.architecture}.rope.freq_base is {config.rope_base}, must be greater than 1 for YaRN"
        )
    # llama.cpp ignores yarn_attn_factor, too: it computes this factor from `factor`.
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", default=0)
    return config.replace(
        rope_scaling="yarn",
        rope_attn_factor=attn_factor / (1 + 0.1 * max(multiplier, 0) * math.log(max(factor, 1.0))),
        rope_factor=factor,
        rope_original_context=keys.positive("rope.scaling.original_context_length"),
        rope_beta_fast=keys.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
        rope_beta_slow=keys.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
    )


def _with_long_rope(config: ModelConfig, keys: Keys, max_context: int | None) -> ModelConfig:
    """Choose the factors of LongRoPE by the positions that the model is opened for.

    All keys in a cache must have the same rotation, so the choice is made once per model and not, for
    instance, when a session exceeds the original context.
    """
    missing = [name for name in _LONG_ROPE_TENSORS if name not in keys.gguf.tensors]
    if len(missing) == 2 and keys.string("rope.scaling.type", default="none") != "longrope":
        return config
    if missing:
        raise keys.error(f"tensor {missing[0]} is missing, which LongRoPE requires")
    original = keys.positive("rope.scaling.original_context_length")
    long = min(config.context_length, max_context or config.context_length) > original
    return config.replace(
        rope_original_context=original,
        rope_long=long,
        context_length=config.context_length if long else min(original, config.context_length),
    )


def _with_layer_positions(config: ModelConfig, keys: Keys, traits: Architecture) -> ModelConfig:
    layers = range(config.n_layers)
    if not traits.rope or (traits.rope_switch and not keys.boolean("rope.scaling.finetuned", default=True)):
        return config.replace(layer_uses_rope=(False,) * config.n_layers)
    if traits.rope_free_every:
        uses_rope = tuple((layer + 1) % traits.rope_free_every != 0 for layer in layers)
        return config.replace(layer_uses_rope=uses_rope)
    stated = keys.number("attention.sliding_window", default=0)
    if traits.window == "absent" or (traits.window == "optional" and stated == 0):
        return config
    window = keys.positive("attention.sliding_window")
    _check_windows(config, keys, traits)
    windowed = (True,) * config.n_layers
    pattern = "attention.sliding_window_pattern"
    if traits.window_period or keys.has(pattern):
        windowed = keys.each_layer_but_every_nth(
            pattern, config.n_layers, default=traits.window_period, first=traits.window_free_first
        )
    config = config.replace(layer_window=tuple(window if w else 0 for w in windowed))
    if traits.window_rope == "same":
        return config
    if traits.window_rope == "only":
        return config.replace(layer_uses_rope=windowed)
    is_own = traits.window_rope == "own"
    default_base = _DEFAULT_WINDOW_ROPE_BASE if is_own else config.rope_base
    window_base = keys.positive_float("rope.freq_base_swa", default=default_base)
    if not is_own and config.rope_attn_factor != 1:
        raise keys.unsupported(
            f"{keys.architecture}.rope.scaling.attn_factor is {config.rope_attn_factor}, which is not "
            "supported with attention windows"
        )
    return config.replace(
        layer_rope_base=tuple(window_base if w else config.rope_base for w in windowed),
        layer_rope_factor=tuple(1.0 if w else config.rope_factor for w in windowed),
    )


def _check_windows(config: ModelConfig, keys: Keys, traits: Architecture) -> None:
    """Reject heads of other shapes in layers with a window, and bidirectional windows in a decoder."""
    same = (
        {}
        if traits.layers_differ
        else {
            "rope.dimension_count_swa": config.rope_dim,
            "attention.key_length_swa": config.key_dim,
            "attention.value_length_swa": config.value_dim,
        }
    )
    for suffix, value in same.items():
        stated = keys.positive(suffix, default=value)
        if stated != value:
            raise keys.unsupported(f"{keys.architecture}.{suffix} is {stated}; supported is {value}")
    if traits.causal and not config.causal:
        raise keys.unsupported(
            f"{keys.architecture}.attention.causal is false, which is not supported with attention windows"
        )


def with_layer_dimensions(config: ModelConfig, keys: Keys) -> ModelConfig:
    """Read the heads of layers with and without a window, the widths of feed-forwards, and the sharing."""
    n, name = config.n_layers, keys.architecture
    windowed = [window > 0 for window in config.layer_window or (0,) * n]
    if config.key_dim != config.value_dim:
        raise keys.unsupported(
            f"{name}.attention.value_length is {config.value_dim}; supported is {config.key_dim}, the "
            "attention.key_length"
        )
    head_dim = _of_windows(keys, "attention.key_length_swa", config.key_dim)
    rope_dim = _of_windows(keys, "rope.dimension_count_swa", min(config.rope_dim, head_dim))
    value_dim = keys.positive("attention.value_length_swa", default=head_dim)
    if value_dim != head_dim:
        raise keys.unsupported(
            f"{name}.attention.value_length_swa is {value_dim}; supported is {head_dim}, the "
            "attention.key_length_swa"
        )
    if rope_dim % 2:
        raise keys.error(f"{name}.rope.dimension_count_swa is {rope_dim}, must be even")
    kv_heads = keys.list_each_layer("attention.head_count_kv", n, config.n_heads)
    return config.replace(
        layer_rope_freqs=tuple(not w for w in windowed) if any(windowed) else (),
        layer_head_dim=_where_they_differ(
            config.key_dim, (head_dim if w else config.key_dim for w in windowed)
        ),
        layer_rope_dim=_where_they_differ(
            config.rope_dim, (rope_dim if w else config.rope_dim for w in windowed)
        ),
        layer_kv_heads=_where_they_differ(config.n_kv_heads, kv_heads),
        layer_ffn_dim=_where_they_differ(config.ffn_dim, keys.list_each_layer("feed_forward_length", n)),
        layer_cache=_shared_caches(keys, windowed, kv_heads),
    )


def _of_windows(keys: Keys, suffix: str, most: int) -> int:
    stated = keys.positive(suffix, default=most)
    if stated > most:
        raise keys.unsupported(f"{keys.architecture}.{suffix} is {stated}; supported are up to {most}")
    return stated


def _where_they_differ(common: int, values: Iterable[int]) -> tuple[int, ...]:
    """Return the value of each layer; empty if all layers have the model's."""
    listed = tuple(values)
    return listed if set(listed) != {common} else ()


def _shared_caches(keys: Keys, windowed: list[bool], kv_heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer attends to; empty if each has its own.

    The last layers use those of the last earlier layer with, or without, a window like themselves.
    """
    key = f"{keys.architecture}.attention.shared_kv_layers"
    n = len(windowed)
    shared = keys.integer("attention.shared_kv_layers", 0, n - 1, default=0)
    if shared == 0:
        return ()
    last: dict[bool, int] = {windowed[layer]: layer for layer in range(n - shared)}
    for layer in range(n - shared, n):
        other = last.get(windowed[layer])
        if other is None or kv_heads[other] != kv_heads[layer]:
            raise keys.error(
                f"{key} is {shared}, but layer {layer} has no earlier layer of its kind with keys and values"
            )
    return (*range(n - shared), *(last[w] for w in windowed[n - shared :]))
