"""Relative positions of DeBERTa (arXiv:2006.03654, arXiv:2111.09543): their keys and queries in each layer.

They follow from an embedding of relative positions and the projections of keys and queries, which the content
shares.
"""

import re
from collections.abc import Mapping
from functools import partial

import numpy as np

from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._weights import FloatArray, Index, Weight
from metal_prefill.errors import GGUFError

MADE = r"attn_rel_row\.weight|blk\.\d+\.attn_rel_[kq]\.weight"  # names of the tensors made here
_PROJECTION = re.compile(r"(?:.*\.)?encoder\.layer\.(\d{1,9})\.attention\.self\.(query|key)_proj\.weight")
_MOST_POSITIONS = 1 << 20


def with_relative_positions(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Add the keys and queries of relative positions, and which of them each distance has."""
    found = _without_unused(config, weights)
    name = next((name for name in weights if name.endswith("encoder.rel_embeddings.weight")), None)
    if name is None:
        raise config.error("relative_attention is true, but the weights lack encoder.rel_embeddings.weight")
    table, width = weights[name], config.integer("hidden_size")
    span = _buckets(config) or _furthest(config)
    if table.shape != (2 * span, width):
        raise GGUFError(
            f"{table.file}: tensor {name} has shape {table.shape}, expected ({2 * span}, {width})"
        )
    norms = [
        weights.get(name.replace("rel_embeddings.weight", f"LayerNorm.{end}")) for end in ("weight", "bias")
    ]
    normed = "layer_norm" in config.string("norm_rel_ebd", default="none")
    if normed and None in norms:
        raise GGUFError(f"{table.file}: norm_rel_ebd is layer_norm, but encoder.LayerNorm is missing")
    norm = [tensor for tensor in norms if tensor is not None] if normed else []
    eps = config.number("layer_norm_eps", default=1e-7)
    for own, weight in weights.items():
        match = _PROJECTION.fullmatch(own)
        if match is None or weight.shape != (width, width):  # which the shapes of tensors tell later
            continue
        bias = weights.get(own.removesuffix("weight") + "bias")
        if bias is not None and bias.shape != (width,):
            raise GGUFError(f"{bias.file}: tensor {bias.name} has shape {bias.shape}, expected ({width},)")
        role = f"blk.{int(match[1])}.attn_rel_{match[2][0]}.weight"
        values = partial(_projected, table, norm, eps, weight, bias)
        found[role] = table.computed(values, name=role)
    context = config.integer("max_position_embeddings", default=512, most=_MOST_POSITIONS)
    row_of = partial(_rows, context, _buckets(config), _furthest(config), span)
    row = "attn_rel_row.weight"
    found[row] = table.computed(row_of, name=row, shape=(2 * context,))
    return found


def _without_unused(config: Fields, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Leave out embeddings that the configuration excludes, and which transformers ignores."""
    end = "embeddings.position_embeddings.weight"
    biased = config.boolean("position_biased_input", default=True)
    if biased and not any(name.endswith(end) for name in weights):
        raise config.error(f"position_biased_input is true, but the weights lack {end}")
    typed = config.integer("type_vocab_size", default=0, least=0) > 0
    excluded = (*(() if biased else (end,)), *(() if typed else ("embeddings.token_type_embeddings.weight",)))
    return {name: weight for name, weight in weights.items() if not name.endswith(excluded)}


def _buckets(config: Fields) -> int:
    stated = config.values.get("position_buckets", -1)
    if stated == -1:
        return 0
    buckets, furthest = config.integer("position_buckets", least=2, most=_MOST_POSITIONS), _furthest(config)
    if furthest - 1 <= buckets // 2:
        raise config.error(f"position_buckets is {buckets}, must be less than {2 * (furthest - 1)}")
    return buckets


def _furthest(config: Fields) -> int:
    stated = config.values.get("max_relative_positions", -1)
    name = "max_position_embeddings" if stated == -1 else "max_relative_positions"
    return config.integer(name, default=512, most=_MOST_POSITIONS)


def _projected(
    table: Weight, norm: list[Weight], eps: float, weight: Weight, bias: Weight | None, index: Index
) -> FloatArray:
    rows = table.rows(index).astype(np.float64)
    if norm:
        rows -= rows.mean(axis=1, keepdims=True)
        rows /= np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + eps)
        rows = rows * norm[0].rows() + norm[1].rows()
    rows = rows @ weight.rows().T.astype(np.float64)
    projected: FloatArray = (rows if bias is None else rows + bias.rows()).astype(np.float32)
    return projected


def _rows(context: int, buckets: int, furthest: int, span: int, index: Index) -> FloatArray:
    """Return the row of each distance of a query from a key, from ``-context`` on."""
    distance = np.arange(-context, context)[index]
    if buckets:  # single distances up to half of the buckets, then steps of equal ratios
        middle = buckets // 2
        size = np.maximum(np.abs(distance), middle).astype(np.float32)
        # As transformers computes it, in float32.
        ratio = np.log(size / np.float32(middle)) / np.float32(np.log((furthest - 1) / middle))
        steps = np.ceil(ratio * np.float32(middle - 1)).astype(np.int64) + middle
        distance = np.where(np.abs(distance) <= middle, distance, steps * np.sign(distance))
    rows: FloatArray = np.clip(distance + span, 0, 2 * span - 1).astype(np.float32)
    return rows
