"""Metadata and weights that depend on several fields of ``config.json``."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from metal_prefill.conversion._folder import MAX_FLOAT, Fields, is_number
from metal_prefill.conversion._weights import Weight
from metal_prefill.files._architecture import ARCHITECTURES
from metal_prefill.files._metadata_keys import MAX_INT

Values: TypeAlias = npt.NDArray[np.float32]


PRIVACY_FILTER_BASE = 150000.0  # of the rotation, in folders that do not state one
MAX_HEAD = 1 << 16  # dimensions, for which frequencies are computed before the tensors are known


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
    return {**activation(config), "attention.scale": (3 * _head_width(config)) ** -0.5}


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


# The following functions return a tensor as it is if its rows contradict the configuration, which the header
# of the file then shows.
def interleaved(config: Fields, name: str, weight: Weight) -> Weight:
    """Reorder the rows of q or k, so that the two values of a rotated pair are next to each other."""
    heads = config.integer("num_attention_heads")
    if "attn_k" in name:
        heads = config.integer("num_key_value_heads", default=heads)
    return _swapped(weight, (heads, 2), (1, 2))


def heads_last(config: Fields, name: str, weight: Weight) -> Weight:
    """Reorder the rows of q, k and v, of which a folder has those of each head together."""
    return _swapped(weight, (config.integer("num_attention_heads"), 3), (0, 1))


def _swapped(weight: Weight, sizes: tuple[int, int], axes: tuple[int, int]) -> Weight:
    """Reorder rows in three nested groups, the first two of these sizes, by swapping two of the axes."""
    rows = weight.shape[0]
    if rows % math.prod(sizes):
        return weight
    return weight.reordered(np.arange(rows).reshape(*sizes, -1).swapaxes(*axes).ravel())


def transposed(config: Fields, name: str, weight: Weight) -> Weight:
    """Return a matrix with the columns as rows."""
    return weight.transposed()


def plus_one(config: Fields, name: str, weight: Weight) -> Weight:
    """Return the factors of a norm that are stored as their differences from 1."""
    return weight.computed(lambda index: weight.rows(index) + 1)


_KINDS = ("default", "dynamic", "linear", "yarn")


def rope_scaling(config: Fields, kinds: tuple[str, ...] = _KINDS) -> dict[str, Any]:
    """Return the metadata of a rotation of one of the given kinds.

    The dynamic kind is the default one up to the context of the folder.
    """
    rope = _rope(config)
    found: dict[str, Any] = {}
    if rope.has("rope_theta"):
        found["rope.freq_base"] = rope.number("rope_theta")
    kind = rope.choice("rope_type", "type", known=kinds, default="default")
    if kind in ("linear", "yarn"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = rope.number("factor")
    return found | (_yarn(config, rope) if kind == "yarn" else {})


def rope_scaling_or_factors(config: Fields) -> dict[str, Any]:
    """Return the metadata of a rotation that may be that of Llama 3, whose factors are a tensor."""
    return rope_scaling(config, (*_KINDS, "llama3"))


def _rope(config: Fields) -> Fields:
    # Older folders have it in rope_scaling.
    return config.object("rope_parameters" if config.has("rope_parameters") else "rope_scaling")


def gte(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, which ``ntk`` extends by a larger base and a smaller factor."""
    rope = _rope(config)
    if rope.string("rope_type", "type", default="default") != "ntk":
        return rope_scaling(config)
    rope.require("mixed_b", (None,), None)
    factor = rope.number("factor")
    return {
        "rope.freq_base": config.number("rope_theta", default=10000.0) * factor,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": factor ** (2 / _head_width(config)),
    }


def _original_context(config: Fields, rope: Fields) -> int:
    """Return the context before a rotation was scaled: that of the folder where it names no other."""
    name = "original_max_position_embeddings"
    if config.has(name):
        return config.integer(name)
    return rope.integer(name) if rope.has(name) else config.integer("max_position_embeddings")


def _yarn(config: Fields, rope: Fields) -> dict[str, Any]:
    """Return the metadata of YaRN besides its factor.

    Without ``attention_factor``, q.k grows with the logarithm of the factor, or as ``mscale`` and
    ``mscale_all_dim`` say. Files state its ratio to the usual growth.
    """
    rope.require("truncate", (True,), True)
    factor = rope.number("factor")
    found: dict[str, Any] = {"rope.scaling.original_context_length": _original_context(config, rope)}
    for name in ("beta_fast", "beta_slow"):
        if rope.has(name):
            found[f"rope.scaling.yarn_{name}"] = rope.number(name)
    usual, scale = 1.0 + 0.1 * math.log(max(factor, 1.0)), _yarn_magnitude(rope)
    if scale != usual:
        found["rope.scaling.attn_factor"] = scale / usual
    return found


def _yarn_magnitude(rope: Fields) -> float:
    """Return the factor of rotated values."""
    growth = 0.1 * math.log(max(rope.number("factor"), 1.0))
    scale = 1.0 + growth
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):  # 0 counts as absent
        scale = (1 + rope.number("mscale") * growth) / (1 + rope.number("mscale_all_dim") * growth)
    return rope.number("attention_factor", default=scale)


def privacy_filter(config: Fields) -> dict[str, Any]:
    """Return the rotation, and the window, which counts both sides and the token itself."""
    rope = _privacy_filter_rope(config)
    band = config.integer("sliding_window", default=128, most=(MAX_INT - 1) // 2)
    window = {"attention.sliding_window": 2 * band + 1}
    if not _has_exact_yarn(rope):
        own = Fields(config.path, {**config.values, "rope_parameters": rope.values})
        return rope_scaling(own, ("default", "yarn")) | window
    found = {"rope.freq_base": rope.number("rope_theta")} if rope.has("rope_theta") else {}
    return {**found, "rope.scaling.attn_factor": _yarn_magnitude(rope), **window}


def _privacy_filter_rope(config: Fields) -> Fields:
    """Return the rotation of a folder, by default that of the class."""
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return _rope(config)
    usual = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    return Fields(config.path, usual, "rope_parameters")


def _has_exact_yarn(rope: Fields) -> bool:
    """Return whether a rotation is YaRN with bounds of the blended pairs that are not rounded."""
    is_yarn = rope.string("rope_type", "type", default="default") == "yarn"
    return is_yarn and not rope.boolean("truncate", default=True)


def yarn_factors(config: Fields) -> dict[str, Values]:
    """Return divisors of the frequencies for YaRN whose bounds are not rounded, which files cannot state."""
    rope = _privacy_filter_rope(config)
    if not _has_exact_yarn(rope):
        return {}
    base = rope.number("rope_theta", default=config.number("rope_theta", default=PRIVACY_FILTER_BASE))
    if base <= 1:
        raise rope.error(f"{rope.name('rope_theta')} is {base}, must be greater than 1 for YaRN")
    dims, context = _head_width(config), _original_context(config, rope)

    def pair_of(turns: float) -> float:
        return dims * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(pair_of(rope.number("beta_fast", default=32.0)), 0.0)
    high = min(pair_of(rope.number("beta_slow", default=1.0)), dims - 1.0)
    slow = np.clip((np.arange(dims // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return {"rope_freqs.weight": (1 / (1 - slow + slow / rope.number("factor"))).astype(np.float32)}


def _head_width(config: Fields, least: int = 1) -> int:
    width = config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.integer("head_dim", default=width, least=least, most=MAX_HEAD)


def rope_factors(config: Fields) -> dict[str, Values]:
    """Return the tensor of Llama 3, divisors of the frequencies by the length of their waves.

    Waves of at most the original context divided by ``high_freq_factor`` are kept, those of at least the
    context divided by ``low_freq_factor`` are stretched by ``factor``, and those between are interpolated.
    """
    rope = _rope(config)
    if rope.string("rope_type", "type", default="default") != "llama3":
        return {}
    base = rope.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    dims = _head_width(config)
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"{rope.name('low_freq_factor')} is {low}, must be less than {high}")
    turns = _original_context(config, rope) / (2 * np.pi * base ** (np.arange(0, dims, 2) / dims))
    kept = np.clip((turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - kept) / factor + kept)
    return {"rope_freqs.weight": factors.astype(np.float32)}


def smollm3(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, which every fourth layer lacks."""
    layers = config.layers()
    interval = config.integer("no_rope_layer_interval", default=4)
    rotates = config.sequence("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if list(map(bool, rotates)) != [(i + 1) % 4 != 0 for i in range(layers)]:
        raise config.unsupported("no_rope_layers must have 0 for every fourth layer and 1 for the others")
    return rope_scaling(config)


def phi3(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation of a part of a head, and of LongRoPE if there is any."""
    rope = _rope(config)
    found = _rotated_part(config, rope, "partial_rotary_factor", 1.0)
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
    kind = _rope(config).string("rope_type", "type", default="default")
    return kind in ("longrope", "su", "yarn")  # the names of versions of phi3


def long_rope_factors(config: Fields) -> dict[str, Values]:
    """Return the divisors of the frequencies for long and for short contexts."""
    if not _has_long_rope(config):
        return {}
    rope, found = _rope(config), {}
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


def _rotated_part(config: Fields, rope: Fields, name: str, default: float) -> dict[str, Any]:
    """Return the number of rotated dimensions of a head, from a part of its width."""
    part = rope.number("partial_rotary_factor", default=config.number(name, default=default))
    if part > 1:
        raise config.error(f"{name} is {part}, must be at most 1")
    return {"rope.dimension_count": int(_head_width(config) * part)}


def gpt2(config: Fields) -> dict[str, Any]:
    """Return the inner width of the feed-forward, and its activation."""
    return {
        "feed_forward_length": config.integer("n_inner", default=4 * config.integer("n_embd")),
        "hidden_activation": config.string("activation_function", default="gelu_new"),
    }


def gpt_neox(config: Fields) -> dict[str, Any]:
    """Return the rotation of a part of a head, the activation, and whether blocks of a layer are parallel."""
    return {
        **_rotated_part(config, _rope(config), "rotary_pct", 0.25),
        **rope_scaling(config),
        "hidden_activation": config.string("hidden_act", default="gelu"),
        "use_parallel_residual": config.boolean("use_parallel_residual", default=True),
    }


def starcoder2(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, the window of all layers if there is one, and the activation."""
    window = _window(config) if config.has("sliding_window") else {}
    activation = config.string("hidden_act", default="gelu_pytorch_tanh")
    return {**rope_scaling(config), **window, "hidden_activation": activation}


def phi2(config: Fields) -> dict[str, Any]:
    """Return the rotation of a part of a head, and the activation."""
    return {
        **_rotated_part(config, _rope(config), "partial_rotary_factor", 0.5),
        **rope_scaling(config),
        "hidden_activation": config.string("hidden_act", default="gelu_new"),
    }


def stablelm(config: Fields) -> dict[str, Any]:
    """Return the rotation of a part of a head."""
    return _rotated_part(config, _rope(config), "partial_rotary_factor", 0.25) | rope_scaling(config)


def cohere2(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, and the layers with a window, which are those that rotate."""
    return rope_scaling(config) | _layers_with_window(config, 4)


def eurobert(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, which eurobert does not scale."""
    found = rope_scaling(config)
    if "rope.scaling.type" in found:
        raise config.unsupported("the rotation of a eurobert model is scaled")
    return {**found, "rope.scaling.type": "none"}


def nomic_bert(config: Fields) -> dict[str, Any]:
    """Return the base of the rotation, and the context that the model was trained for."""
    rope = config.object("rope_parameters")
    base = rope.number("rope_theta", default=config.number("rotary_emb_base", "rope_theta", default=1000.0))
    # Longer texts would need another rotation, which depends on their length.
    trained = config.integer("max_trained_positions", default=MAX_INT)
    context = min(config.integer("max_position_embeddings", "n_positions"), trained)
    return {"rope.freq_base": base, "context_length": context}


def jina_v3(config: Fields) -> dict[str, Any]:
    """Return the activation, and the base of the rotation."""
    rope = config.object("rope_parameters")
    rope.require("rope_type", ("default",), "default")
    base = rope.number("rope_theta", default=config.number("rotary_emb_base", default=20000.0))
    return {**activation(config), "rope.freq_base": base}


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


def check_kinds(config: Fields, kinds: Sequence[Any], known: Sequence[str]) -> None:
    """Check that each layer has a kind that is `known`; messages name the first two."""
    layers = config.layers()
    if len(kinds) != layers or not all(isinstance(kind, str) and kind in known for kind in kinds):
        names = " or ".join(known[:2])
        raise config.unsupported(f"layer_types must have {names} for each of the {layers} layers")


def lfm2(config: Fields) -> dict[str, Any]:
    """Return the layers with attention, the inner width of the feed-forward, and the rotation.

    Unless ``block_auto_adjust_ff_dim`` is false, the width is two thirds of the stated one, times a factor,
    rounded up.
    """
    layers = config.layers()
    kinds = config.sequence("layer_types")
    chosen = config.sequence("full_attn_idxs") if config.has("full_attn_idxs") else range(layers)
    if not kinds:
        indices = {i for i in chosen if isinstance(i, int)}
        kinds = ["full_attention" if i in indices else "conv" for i in range(layers)]
    check_kinds(config, kinds, ("full_attention", "conv"))
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
    layers = config.layers()
    every = config.integer("full_attention_interval", default=4)
    kinds = config.sequence("layer_types")
    if not kinds:
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    check_kinds(config, kinds, ("full_attention", "linear_attention"))
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
    layers = config.layers()
    kinds = config.sequence("layer_types")
    if not kinds:
        period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=usual_period)
        return {} if period == usual_period else {"attention.sliding_window_pattern": period}
    check_kinds(config, kinds, ("full_attention", "sliding_attention"))
    windowed = [kind == "sliding_attention" for kind in kinds]
    usual = [(i + 1) % usual_period != 0 for i in range(layers)]
    return {} if windowed == usual else {"attention.sliding_window_pattern": windowed}


_WINDOW = 4096  # of classes in transformers whose configuration has no field for it; null means none


def mistral(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, and the window of all layers, if there is one."""
    return rope_scaling_or_factors(config) | _window(config)


def ministral3(config: Fields) -> dict[str, Any]:
    """Return the metadata of the rotation, the growth of scores with the position, and the window."""
    found = rope_scaling(config) | (_window(config) if config.has("sliding_window") else {})
    rope = _rope(config)
    if rope.has("llama_4_scaling_beta"):
        found["attention.temperature_scale"] = rope.number("llama_4_scaling_beta")
        found["rope.scaling.original_context_length"] = _original_context(config, rope)
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
    found, layers = rope_scaling_or_factors(config), config.layers()
    config.require("use_sliding_window", (False, True), False)
    if not config.values.get("use_sliding_window"):
        return found
    if kinds := config.sequence("layer_types"):
        check_kinds(config, kinds, ("full_attention", "sliding_attention"))
        windowed = [kind == "sliding_attention" for kind in kinds]
    else:
        windowed = [i >= config.integer("max_window_layers", default=28, least=0) for i in range(layers)]
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


def hunyuan_dense(config: Fields) -> dict[str, Any]:
    """Return the base of the rotation, which is larger where the folder has ``alpha``."""
    rope = _rope(config)
    if rope.string("rope_type", "type", default="default") != "dynamic" or not rope.has("alpha"):
        return rope_scaling(config, ("default",))
    base = rope.number("rope_theta", default=config.number("rope_theta", default=10000.0))
    dims = _head_width(config, least=3)
    base *= rope.number("alpha") ** (dims / (dims - 2))
    if base > MAX_FLOAT:
        raise rope.error(
            f"{rope.name('alpha')} is {rope.number('alpha')}, which makes the base of the rotation {base}"
        )
    return {"rope.freq_base": base}


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
