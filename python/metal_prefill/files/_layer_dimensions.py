"""Read the dimensions in which the layers of a model differ, and which of them share keys and values."""

from collections.abc import Iterable
from dataclasses import replace

from metal_prefill.files._metadata_keys import Keys
from metal_prefill.files._model_config import ModelConfig


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
    if rope_dim > head_dim or rope_dim % 2:
        raise keys.error(
            f"{name}.rope.dimension_count_swa is {rope_dim}, must be even and at most the head width "
            f"{head_dim}"
        )
    kv_heads = keys.list_each_layer("attention.head_count_kv", n, config.n_heads)
    for heads in kv_heads:
        if config.n_heads % heads:
            raise keys.error(
                f"{name}.attention.head_count {config.n_heads} is not a multiple of "
                f"{name}.attention.head_count_kv {heads}"
            )
    return replace(
        config,
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
    """Return the value of each layer; nothing if it is that of the model in all."""
    listed = tuple(values)
    return listed if set(listed) != {common} else ()


def _shared_caches(keys: Keys, windowed: list[bool], kv_heads: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer attends to; empty if each has its own.

    The last layers attend to those of the last layer before them with, or without, a window as they have.
    """
    key = f"{keys.architecture}.attention.shared_kv_layers"
    n, shared = len(windowed), int(keys.number(key, default=0))
    if shared == 0:
        return ()
    if not 0 < shared < n:
        raise keys.error(f"{key} is {shared}, must be below block_count {n}")
    last: dict[bool, int] = {windowed[layer]: layer for layer in range(n - shared)}
    for layer in range(n - shared, n):
        other = last.get(windowed[layer])
        if other is None or kv_heads[other] != kv_heads[layer]:
            raise keys.error(
                f"{key} is {shared}, but layer {layer} has no earlier layer of its kind with keys and values"
            )
    return (*range(n - shared), *(last[w] for w in windowed[n - shared :]))
