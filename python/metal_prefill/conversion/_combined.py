"""Tensors of a file that are computed from several tensors of a folder, or are parts of one.

See `Source.combined`; adapters are merged first.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from metal_prefill.conversion._folder import ADAPTER, Fields, adapters_of
from metal_prefill.conversion._weights import FloatArray, Index, Stack, Weight, listed_tensors
from metal_prefill.errors import GGUFError


def with_shared_embedding(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Name the shared embedding of an encoder and a decoder; a folder may have only the encoder's."""
    own = weights.get("encoder.embed_tokens.weight")
    return weights if own is None or "shared.weight" in weights else {**weights, "shared.weight": own}


# Relative positions of DeBERTa (arXiv:2006.03654, arXiv:2111.09543): each layer computes their keys and
# queries from an embedding of relative positions, by the same projections as for the content.
RELATIVE = r"attn_rel_row\.weight|blk\.\d+\.attn_rel_[kq]\.weight"  # names of the tensors made here
_PROJECTION = re.compile(r"(?:.*\.)?encoder\.layer\.(\d{1,9})\.attention\.self\.(query|key)_proj\.weight")
_MOST_POSITIONS = 1 << 20


def with_relative_positions(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Add the keys and queries of relative positions, and their index for each distance."""
    found = _without_unused(config, weights)
    name = next((name for name in weights if name.endswith("encoder.rel_embeddings.weight")), None)
    if name is None:
        raise config.error("relative_attention is true, but the weights lack encoder.rel_embeddings.weight")
    table, width = weights[name], config.integer("hidden_size")
    span = _buckets(config) or _furthest(config)
    table.check_shape((2 * span, width))
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
        if match is None or weight.shape != (width, width):  # the check of tensors' shapes reports this later
            continue
        bias = weights.get(own.removesuffix("weight") + "bias")
        if bias is not None:
            bias.check_shape((width,))
        role = f"blk.{int(match[1])}.attn_rel_{match[2][0]}.weight"
        values = partial(_projected, table, norm, eps, weight, bias)
        found[role] = table.computed(values, name=role)
    context = config.integer("max_position_embeddings", default=512, most=_MOST_POSITIONS)
    row_of = partial(_rows, context, _buckets(config), _furthest(config), span)
    row = "attn_rel_row.weight"
    found[row] = table.computed(row_of, name=row, shape=(2 * context,))
    return found


def _without_unused(config: Fields, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Omit embeddings that the configuration excludes; transformers ignores them."""
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
    return (rows if bias is None else rows + bias.rows()).astype(np.float32)


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
    return np.clip(distance + span, 0, 2 * span - 1).astype(np.float32)


# Tensors with the matrices of all experts. gpt-oss and related models store ``[experts, inputs, outputs]``,
# with gates before ups. nomic-embed-text-v2-moe concatenates the rows of all experts, and transposes the
# second matrix of each.
_TENSOR = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
_SINKS = ".self_attn.sinks"
_ROWS = re.compile(r"(.+\.mlp\.experts)\.mlp\.(w1|w2)")
_BIAS_OF_SUM = re.compile(r".*\.layers\.(\d+)\.mlp\.experts\.bias")
EXPERTS_BIAS = r"blk\.\d+\.ffn_exps\.bias"  # of the sum of the experts, in a file


def with_matrices(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Divide the tensors of experts into matrices with inputs as columns, and name sinks as weights."""
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        match = _TENSOR.fullmatch(name)
        if match is not None:
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            divided, dimensions = (_biases, 2) if match[3] else (_matrices, 3)
            _check_columns(weight, dimensions, len(parts))
            found |= {made.name: made for made in divided(weight, match[1], parts)}
        elif name.endswith(_SINKS):
            found[f"{name}.weight"] = weight.named(f"{name}.weight")
        else:
            found[name] = weight
    return found


def _check_columns(weight: Weight, dimensions: int, parts: int) -> None:
    if len(weight.shape) != dimensions or weight.shape[-1] % parts or 0 in weight.shape:
        raise weight.error(
            f"has shape {weight.shape}, expected {dimensions} dimensions, none of them 0 and the last a "
            f"multiple of {parts}"
        )


def _matrices(weight: Weight, stem: str, parts: tuple[str, ...]) -> Iterator[Weight]:
    for expert, matrix in enumerate(Stack.divided(weight).matrices):
        names = tuple(f"{stem}.{expert}.{part}_proj.weight" for part in parts)
        yield from matrix.transposed().parts(names)


def _biases(weight: Weight, stem: str, parts: tuple[str, ...]) -> Iterator[Weight]:
    names = tuple(f"{stem}.{part}_proj.bias" for part in parts)
    yield from (rows.transposed() for rows in weight.transposed().parts(names))


def with_divided(config: Fields, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Divide the rows of the tensors of experts into matrices, and name the biases of their sums."""
    found: dict[str, Weight] = {}
    count = config.integer("num_experts")
    for name, weight in weights.items():
        rows, bias = _ROWS.fullmatch(name), _BIAS_OF_SUM.fullmatch(name)
        if rows is not None:
            if len(weight.shape) != 2:
                raise weight.error(f"has shape {weight.shape}, expected a matrix")
            for expert, matrix in enumerate(weight.parts((name,) * count)):
                made = matrix.transposed() if rows[2] == "w2" else matrix
                own = f"{rows[1]}.{expert}.mlp.{rows[2]}.weight"
                found[own] = made.named(own)
        elif bias is not None:
            own = f"blk.{bias[1]}.ffn_exps.bias"
            found[own] = weight.named(own)
        else:
            found[name] = weight
    return found


STATIC_TABLE = "embedding.weight"


def static_table(config: Fields, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the table of a folder, a row for each token.

    Tokens of model2vec may share rows (``mapping``), which a factor of each token multiplies (``weights``).
    """
    if "embeddings" not in weights:
        return dict(weights)
    rows, mapping, factors = weights["embeddings"], weights.get("mapping"), weights.get("weights")
    of_tokens = [weight for weight in (mapping, factors) if weight is not None]
    tokens = of_tokens[0].shape[0] if of_tokens else rows.shape[0]
    for weight in of_tokens:
        weight.check_shape((tokens,))
    shape = (tokens, *rows.shape[1:])
    values = partial(_values, rows, mapping, factors)
    return {STATIC_TABLE: rows.computed(values, name=STATIC_TABLE, shape=shape)}


def _values(rows: Weight, mapping: Weight | None, factors: Weight | None, index: Index) -> FloatArray:
    chosen = index
    if mapping is not None:
        all_rows = mapping.integers()
        if all_rows.min() < 0 or all_rows.max() >= rows.shape[0]:
            raise mapping.error(f"has rows {all_rows.min()} to {all_rows.max()}, of {rows.shape[0]}")
        chosen = all_rows[index]
    values = rows.rows(chosen)
    return values if factors is None else values * factors.rows(index)[:, None]


# LoRA adapters (arXiv:2106.09685), merged into the weights of a folder. An adapter is a folder written by
# peft, possibly inside the model's folder, as in jina-embeddings-v5 (arXiv:2602.15547); or one of several
# within the weights, as in jina-embeddings-v3 (arXiv:2409.10173): next to a matrix, ``lora_A`` and ``lora_B``
# have one matrix for each adapter.
ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER_PREFIX = "base_model.model."
_OF_ADAPTER = re.compile(
    rf"{re.escape(_ADAPTER_PREFIX)}(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B)(\.weight)?"
)

_ORIGINAL = ".parametrizations.weight.original"
_OWN = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<part>[AB])")


def adapted(
    config: Fields,  # configuration of the folder, which names the adapters within its weights
    weights: Mapping[str, Weight],
    adapter: Path | None,  # folder of the adapter, or the name of one within the weights
    prefixes: tuple[str, ...],  # prefixes of names that the folder or the adapter may lack
) -> Mapping[str, Weight]:
    """Return the weights of a folder, with an adapter merged if there is one."""
    own = [str(name) for name in config.sequence("lora_adaptations")]
    index = own.index(str(adapter)) if str(adapter) in own else None
    if index is None and adapter is not None and not adapter.is_dir():
        known = ", ".join(own or adapters_of(config.path.parent))
        problem = f"is neither a folder nor one of {known}" if known else "is not a folder"
        raise config.error(f"adapter {adapter} {problem}")
    if own:
        weights = _with_own(config, weights, len(own), index)
        adapter = adapter if index is None else None
    return weights if adapter is None else merged(weights, adapter, prefixes)


def _with_own(
    config: Fields, weights: Mapping[str, Weight], count: int, index: int | None
) -> dict[str, Weight]:
    """Return the weights, with the product of one of the pairs within them added if requested."""
    found: dict[str, Weight] = {}
    pairs: dict[str, dict[str, Weight]] = {}
    for name, weight in weights.items():
        match = _OWN.fullmatch(name)
        if match is not None:
            if len(weight.shape) != 3 or weight.shape[0] != count:
                raise weight.error(
                    f"has shape {weight.shape}, expected {count} matrices, one for each adapter"
                )
            pairs.setdefault(match["module"], {})[match["part"]] = weight
        else:
            bare = f"{name.removesuffix(_ORIGINAL)}.weight" if name.endswith(_ORIGINAL) else name
            found[bare] = replace(weight, name=bare)
    if index is None:
        return found
    for module, pair in pairs.items():
        base = found.get(f"{module}.weight")
        if base is None or set(pair) != {"A", "B"}:
            raise config.error(f"{module} lacks one of its weight and the two matrices of adapters")
        down, up = (Stack.divided(pair[part]).matrices[index] for part in "AB")
        if module.endswith("_embeddings"):  # A has its rows, and B its columns
            down, up = up, down
        scale = config.number("lora_alpha", default=1.0) / down.shape[0]
        found[f"{module}.weight"] = _sum(base, module, down, up, scale)
    return found


def merged(
    weights: Mapping[str, Weight],
    adapter: Path,  # folder of the adapter
    prefixes: tuple[str, ...],  # prefixes of names that the folder or the adapter may lack
) -> dict[str, Weight]:
    config = Fields.read(adapter / ADAPTER)
    config.require("peft_type", ("LORA",), None)
    config.require("bias", ("none",), "none")
    for option in (
        *("use_dora", "fan_in_fan_out", "alora_invocation_tokens", "layer_replication"),
        "modules_to_save",
    ):
        config.require(option, (False, None, []), False)
    if not (adapter / ADAPTER_FILE).is_file():
        raise GGUFError(f"{adapter}: has no {ADAPTER_FILE}")
    patterns = config.object("alpha_pattern")
    names = {_bare(name, prefixes): name for name in weights}
    found = dict(weights)
    for module, down, up in _pairs(config, adapter):
        name = names.get(f"{_bare(module, prefixes)}.weight")
        if name is None:
            raise GGUFError(f"{down.file}: changes {module}, which the model does not have")
        key = next((key for key in patterns.values if module == key or module.endswith(f".{key}")), None)
        rank = down.shape[0]
        scale = config.number("lora_alpha") if key is None else patterns.number(key)
        scale /= math.sqrt(rank) if config.boolean("use_rslora", default=False) else rank
        found[name] = _sum(found[name], module, down, up, scale, transposed="embedding" in down.name)
    return found


def _pairs(config: Fields, adapter: Path) -> Iterator[tuple[str, Weight, Weight]]:
    """Yield the name of each module, and its two matrices: ``[rank, in]`` and ``[out, rank]``."""
    parts: dict[str, dict[str, Weight]] = {}
    for weight in listed_tensors(adapter / ADAPTER_FILE):
        match = _OF_ADAPTER.fullmatch(weight.name)
        if match is None or len(weight.shape) != 2:
            raise config.unsupported(
                f"{ADAPTER_FILE} has the tensor {weight.name}, which is not a matrix of LoRA"
            )
        parts.setdefault(match["module"], {})[match["part"][-1]] = weight
    for module, pair in parts.items():
        if set(pair) != {"A", "B"}:
            raise GGUFError(f"{adapter / ADAPTER_FILE}: {module} has one of two matrices")
        yield module, pair["A"], pair["B"]


def _bare(name: str, prefixes: tuple[str, ...]) -> str:
    return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)


def _sum(
    weight: Weight, module: str, down: Weight, up: Weight, scale: float, *, transposed: bool = False
) -> Weight:
    """Return a weight plus the product of two matrices, or plus its transpose."""
    shape = (up.shape[0], down.shape[1])
    if down.shape[0] != up.shape[1] or weight.shape != (shape[::-1] if transposed else shape):
        raise GGUFError(
            f"{down.file}: the matrices {down.shape} and {up.shape} of {module} do not fit its shape "
            f"{weight.shape}"
        )

    def compute(index: Index) -> FloatArray:
        product = down.columns(index) @ up.rows().T if transposed else up.rows(index) @ down.rows()
        return weight.rows(index) + scale * product

    return weight.computed(compute)
