"""Metadata and weights of rotations: their kinds, bases and scaling, and the order of rotated rows."""

import math
from typing import Any

import numpy as np

from metal_prefill.conversion._folder import MAX_FLOAT, Fields, is_number
from metal_prefill.conversion._weights import FloatArray, Weight
from metal_prefill.files._metadata_keys import MAX_INT

PRIVACY_FILTER_BASE = 150000.0  # of the rotation, in folders that do not state one
MAX_HEAD = 1 << 16  # dimensions, for which frequencies are computed before the tensors are known


# The following functions return a tensor unchanged if its rows contradict the configuration; the check of the
# file's header then reports it.
def interleaved(config: Fields, name: str, weight: Weight) -> Weight:
    """Reorder the rows of q or k, so that the two values of a rotated pair are next to each other."""
    heads = config.integer("num_attention_heads")
    if "attn_k" in name:
        heads = config.integer("num_key_value_heads", default=heads)
    return _swapped(weight, (heads, 2), (1, 2))


def heads_last(config: Fields, name: str, weight: Weight) -> Weight:
    """Reorder the rows of q, k and v, which a folder groups by head."""
    return _swapped(weight, (config.integer("num_attention_heads"), 3), (0, 1))


def _swapped(weight: Weight, sizes: tuple[int, int], axes: tuple[int, int]) -> Weight:
    """Reorder rows in three nested groups, the first two of these sizes, by swapping two of the axes."""
    rows = weight.shape[0]
    if rows % math.prod(sizes):
        return weight
    return weight.reordered(np.arange(rows).reshape(*sizes, -1).swapaxes(*axes).ravel())


_KINDS = ("default", "dynamic", "linear", "yarn")


def rope_scaling(config: Fields, kinds: tuple[str, ...] = _KINDS) -> dict[str, Any]:
    """Return the metadata of a rotation of one of the given kinds.

    The dynamic kind is the default one up to the context of the folder.
    """
    rope = rope_of(config)
    found: dict[str, Any] = {}
    if rope.has("rope_theta"):
        found["rope.freq_base"] = rope.number("rope_theta")
    kind = rope.choice("rope_type", "type", known=kinds, default="default")
    if kind in ("linear", "yarn"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = rope.number("factor")
    return found | (_yarn(config, rope) if kind == "yarn" else {})


def rope_scaling_or_factors(config: Fields) -> dict[str, Any]:
    """Return the metadata of a rotation; the factors of Llama 3 are a tensor instead."""
    return rope_scaling(config, (*_KINDS, "llama3"))


def rope_of(config: Fields) -> Fields:
    # Older folders use rope_scaling.
    return config.object("rope_parameters" if config.has("rope_parameters") else "rope_scaling")


def gte(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, which ``ntk`` extends by a larger base and a smaller factor."""
    rope = rope_of(config)
    if rope.string("rope_type", "type", default="default") != "ntk":
        return rope_scaling(config)
    rope.require("mixed_b", (None,), None)
    factor = rope.number("factor")
    return {
        "rope.freq_base": config.number("rope_theta", default=10000.0) * factor,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": factor ** (2 / head_width(config)),
    }


def original_context(config: Fields, rope: Fields) -> int:
    """Return the context before a rotation was scaled, by default the folder's."""
    name = "original_max_position_embeddings"
    if config.has(name):
        return config.integer(name)
    return rope.integer(name) if rope.has(name) else config.integer("max_position_embeddings")


def _yarn(config: Fields, rope: Fields) -> dict[str, Any]:
    """Return the metadata of YaRN except its factor.

    Without ``attention_factor``, q.k grows with the logarithm of the factor, or as set by ``mscale`` and
    ``mscale_all_dim``. Files state the ratio to the usual growth.
    """
    rope.require("truncate", (True,), True)
    factor = rope.number("factor")
    found: dict[str, Any] = {"rope.scaling.original_context_length": original_context(config, rope)}
    for name in ("beta_fast", "beta_slow"):
        if rope.has(name):
            found[f"rope.scaling.yarn_{name}"] = rope.number(name)
    usual, scale = 1.0 + 0.1 * math.log(max(factor, 1.0)), _yarn_magnitude(rope)
    if scale != usual:
        found["rope.scaling.attn_factor"] = scale / usual
    return found


def _yarn_magnitude(rope: Fields) -> float:
    growth = 0.1 * math.log(max(rope.number("factor"), 1.0))
    scale = 1.0 + growth
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):  # 0 counts as absent
        scale = (1 + rope.number("mscale") * growth) / (1 + rope.number("mscale_all_dim") * growth)
    return rope.number("attention_factor", default=scale)


def privacy_filter(config: Fields) -> dict[str, Any]:
    """Return the rotation, and the window, which includes both sides and the token itself."""
    rope = _privacy_filter_rope(config)
    band = config.integer("sliding_window", default=128, most=(MAX_INT - 1) // 2)
    window = {"attention.sliding_window": 2 * band + 1}
    if not _has_exact_yarn(rope):
        own = Fields(config.path, {**config.values, "rope_parameters": rope.values})
        return rope_scaling(own, ("default", "yarn")) | window
    found = {"rope.freq_base": rope.number("rope_theta")} if rope.has("rope_theta") else {}
    return {**found, "rope.scaling.attn_factor": _yarn_magnitude(rope), **window}


def _privacy_filter_rope(config: Fields) -> Fields:
    """Return the rotation of a folder, by default the class's."""
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return rope_of(config)
    usual = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    return Fields(config.path, usual, "rope_parameters")


def _has_exact_yarn(rope: Fields) -> bool:
    """Return whether a rotation is YaRN with bounds of the blended pairs that are not rounded."""
    is_yarn = rope.string("rope_type", "type", default="default") == "yarn"
    return is_yarn and not rope.boolean("truncate", default=True)


def yarn_factors(config: Fields) -> dict[str, FloatArray]:
    """Return divisors of the frequencies for YaRN with unrounded bounds, which metadata cannot describe."""
    rope = _privacy_filter_rope(config)
    if not _has_exact_yarn(rope):
        return {}
    base = rope.number("rope_theta", default=config.number("rope_theta", default=PRIVACY_FILTER_BASE))
    if base <= 1:
        raise rope.error(f"{rope.name('rope_theta')} is {base}, must be greater than 1 for YaRN")
    dims, context = head_width(config), original_context(config, rope)

    def pair_of(turns: float) -> float:
        return dims * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(pair_of(rope.number("beta_fast", default=32.0)), 0.0)
    high = min(pair_of(rope.number("beta_slow", default=1.0)), dims - 1.0)
    slow = np.clip((np.arange(dims // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return {"rope_freqs.weight": (1 / (1 - slow + slow / rope.number("factor"))).astype(np.float32)}


def head_width(config: Fields, least: int = 1) -> int:
    width = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", default=width, least=least, most=MAX_HEAD)


def rope_factors(config: Fields) -> dict[str, FloatArray]:
    """Return the tensor of Llama 3, if a folder has its scaling."""
    rope = rope_of(config)
    if rope.string("rope_type", "type", default="default") != "llama3":
        return {}
    base = rope.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    dims = head_width(config)
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"{rope.name('low_freq_factor')} is {low}, must be less than {high}")
    context = original_context(config, rope)
    return {"rope_freqs.weight": llama3_factors(dims, base, factor, context, low, high)}


def llama3_factors(
    dims: int, base: float, factor: float, context: int, low: float = 1.0, high: float = 4.0
) -> FloatArray:
    """Return the divisors of the frequencies by which Llama 3 extends a context, float32 ``[dims / 2]``.

    Waves of at most `context` divided by `high` are kept, those of at least `context` divided by `low` are
    stretched by `factor`, and those between are interpolated. The defaults are those of Llama 3.1 and 3.2.
    """
    turns = context / (2 * np.pi * base ** (np.arange(0, dims, 2) / dims))
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / factor + kept)).astype(np.float32)


def smollm3(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, which every fourth layer lacks."""
    layers = config.layers()
    interval = config.integer("no_rope_layer_interval", default=4)
    rotates = config.sequence("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if list(map(bool, rotates)) != [(i + 1) % 4 != 0 for i in range(layers)]:
        raise config.unsupported("no_rope_layers must have 0 for every fourth layer and 1 for the others")
    return rope_scaling(config)


def phi3(config: Fields) -> dict[str, Any]:
    rope = rope_of(config)
    found = rotated_part(config, default=1.0)
    if not _has_long_rope(config):
        return found | rope_scaling(config, ("default",))
    if rope.has("rope_theta"):
        found["rope.freq_base"] = rope.number("rope_theta")
    name = "original_max_position_embeddings"
    original = (rope if rope.has(name) else config).integer(name, least=2)
    factor = config.integer("max_position_embeddings") / original
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        **found,
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": rope.number("attention_factor", default=growth),
    }


def _has_long_rope(config: Fields) -> bool:
    kind = rope_of(config).string("rope_type", "type", default="default")
    return kind in ("longrope", "su", "yarn")  # names in versions of phi3


def long_rope_factors(config: Fields) -> dict[str, FloatArray]:
    """Return the divisors of the frequencies for long and for short contexts."""
    if not _has_long_rope(config):
        return {}
    rope, found = rope_of(config), {}
    pairs = phi3(config)["rope.dimension_count"] // 2
    for kind in ("long", "short"):
        factors = rope.sequence(f"{kind}_factor")
        name = rope.name(f"{kind}_factor")
        if len(factors) != pairs:
            raise rope.error(f"{name} must have {pairs} numbers, has {len(factors)}")
        if not all(is_number(factor) and factor > 0 for factor in factors):
            raise rope.error(f"{name} must have positive finite numbers")
        found[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return found


def rotated_part(config: Fields, *, name: str = "partial_rotary_factor", default: float) -> dict[str, Any]:
    """Return the number of rotated dimensions of a head, from a part of its width."""
    part = rope_of(config).number("partial_rotary_factor", default=config.number(name, default=default))
    if part > 1:
        raise config.error(f"{name} is {part}, must be at most 1")
    return {"rope.dimension_count": int(head_width(config) * part)}


def eurobert(config: Fields) -> dict[str, Any]:
    found = rope_scaling(config)
    if "rope.scaling.type" in found:
        raise config.unsupported("the rotation of a eurobert model is scaled")
    return {**found, "rope.scaling.type": "none"}


def nomic_bert(config: Fields) -> dict[str, Any]:
    """Return the base of the rotation, and the context that the model was trained for."""
    rope = config.object("rope_parameters")
    base = rope.number("rope_theta", default=config.number("rotary_emb_base", "rope_theta", default=1000.0))
    # Longer texts would need a rotation that depends on their length.
    trained = config.integer("max_trained_positions", default=MAX_INT)
    context = min(config.integer("max_position_embeddings", "n_positions"), trained)
    return {"rope.freq_base": base, "context_length": context}


def hunyuan_dense(config: Fields) -> dict[str, Any]:
    """Return the base of the rotation, which is larger if the folder has ``alpha``."""
    rope = rope_of(config)
    if rope.string("rope_type", "type", default="default") != "dynamic" or not rope.has("alpha"):
        return rope_scaling(config, ("default",))
    base = rope.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    dims = head_width(config, least=3)
    base *= rope.number("alpha") ** (dims / (dims - 2))
    if base > MAX_FLOAT:
        raise rope.error(
            f"{rope.name('alpha')} is {rope.number('alpha')}, which makes the base of the rotation {base}"
        )
    return {"rope.freq_base": base}
