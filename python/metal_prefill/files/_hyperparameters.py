"""Read and check the hyperparameters of a model from the metadata of its file.

Missing or contradictory metadata raises a `GGUFError` that names it. A file that needs an unimplemented
feature raises an `UnsupportedModelError`; the feature is never ignored, because the model would compute
different results.
"""

import math

from metal_prefill._core import ModelConfig, has_matrix_state
from metal_prefill.files._architecture import (
    ARCHITECTURES,
    MISSING_STEPS,
    Activation,
    Architecture,
    FeedForwardKind,
    LayerKind,
    NormKind,
    RouterScore,
)
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._metadata_keys import MAX_INT, Keys
from metal_prefill.files._positions import with_layer_dimensions, with_positions

# Keys that change the forward pass in ways that are not implemented, and the value that has no effect.
_UNSUPPORTED_KEYS: dict[str, float] = {
    "attention.clamp_kqv": 0,
    "rope.scaling.alpha": 0,
    "rope.scaling.yarn_ext_factor": 1,
}

NORM_EPS_KEYS: dict[NormKind, str] = {
    "rms": "attention.layer_norm_rms_epsilon",
    "layer": "attention.layer_norm_epsilon",
}

# Values of expert_gating_func.
SIGMOID = 2
_ROUTER_SCORES: dict[int, RouterScore] = {1: "softmax", SIGMOID: "sigmoid"}

# Keys of the trait `scales`.
SCALE_KEYS = ("embedding_scale", "residual_scale", "logit_scale")


def read_config(gguf: GGUFFile, max_context: int | None = None) -> ModelConfig:
    """Read and check the hyperparameters of a file.

    `max_context` is the largest position that the model is opened for; None selects that of the file. It
    decides which factors of LongRoPE a model uses. With those of short contexts, its context length is the
    original one. Raises GGUFError if required metadata is missing, of the wrong type, out of range or
    contradictory, UnsupportedModelError if the architecture or a feature of the file is not implemented.
    """
    if gguf.metadata.get("general.type") == "adapter":
        raise gguf.unsupported("is an adapter (LoRA), not a model: merge it into its base model first")
    keys = Keys(gguf)
    name = keys.architecture
    traits = ARCHITECTURES.get(name)
    if traits is None:
        import difflib

        if name in MISSING_STEPS:
            raise keys.unsupported(f"architecture {name} is not supported; it needs {MISSING_STEPS[name]}")
        near = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.5)
        raise keys.unsupported(
            f"architecture {name} is not supported; "
            + (f"the nearest that is supported is {near[0]}; " if near else "")
            + f"supported are {', '.join(ARCHITECTURES)}. To ask for it, use the project's issue form "
            "'A model that does not open'"
        )
    _refuse_unsupported(keys, traits)

    n_blocks = 0 if traits.layers == "absent" else keys.positive("block_count")
    if n_blocks > len(gguf.tensors):
        raise keys.error(
            f"{name}.block_count is {n_blocks}, but the file has only {len(gguf.tensors)} tensors"
        )
    n_layers = n_blocks
    if traits.ignored:  # blocks after the layers, which predict several tokens
        n_layers -= keys.integer("nextn_predict_layers", 0, n_blocks - 1, default=0)
    dim = keys.positive("embedding_length")
    n_heads, n_kv_heads, kinds = _heads(keys, traits, n_layers, n_blocks)
    key_dim = _head_dim(keys, "attention.key_length", dim, n_heads)
    value_dim = _head_dim(keys, "attention.value_length", dim, n_heads)
    if n_heads * max(key_dim, value_dim) > MAX_INT:
        raise keys.error(f"{n_heads} heads of {max(key_dim, value_dim)} dimensions are more than {MAX_INT}")
    rope_dim = keys.positive("rope.dimension_count", default=key_dim) if n_heads else 0
    if rope_dim > key_dim or rope_dim % 2:
        raise keys.error(
            f"{name}.rope.dimension_count is {rope_dim}, must be even and at most the head width {key_dim}"
        )
    if "short_conv" in kinds and dim > MAX_INT // 3:
        raise keys.error(f"{name}.embedding_length {dim} is more than {MAX_INT // 3}")
    feed_forwards, ffn_dim = _feed_forwards(keys, traits, n_layers), 0
    if "dense" in feed_forwards:
        read = keys.list_each_layer if traits.layers_differ else keys.count_each_layer
        ffn_dim = max(read("feed_forward_length", n_layers, least=1))
    distinct = keys.integer("distinct_block_count", 1, n_layers, default=n_layers) if n_layers else 0
    default = None if traits.scales == "required" else 1.0
    scales = {suffix: keys.positive_float(suffix, default=default) for suffix in SCALE_KEYS}
    nominal = n_layers and n_layers == traits.nominal_scale_layers
    attention_scale = (dim / n_heads) ** -0.5 if nominal else traits.attention_scale
    config = ModelConfig(
        architecture=name,
        n_layers=n_layers,
        distinct_layers=distinct if distinct < n_layers else 0,
        dim=dim,
        embedding_dim=_size_of(keys, traits.embedding_projection, "token_embd_proj.weight", -1),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        ffn_dim=ffn_dim,
        vocab_size=_vocab_size(keys),
        context_length=keys.positive("context_length"),
        norm_kind=traits.norm_kind,
        norm_eps=keys.positive_float(NORM_EPS_KEYS[traits.norm_kind]),
        rope_dim=rope_dim,
        rope_base=keys.positive_float("rope.freq_base", default=10000.0),
        rope_style=traits.rope_style,
        activation=_activation(keys, traits),
        parallel=keys.boolean("use_parallel_residual", default=True)
        if traits.parallel == "optional"
        else traits.parallel == "required",
        causal=keys.boolean("attention.causal", default=traits.causal),
        has_head=traits.head != "absent",
        token_types=_token_types(keys, traits),
        max_alibi_bias=keys.number("attention.max_alibi_bias", default=traits.max_alibi_bias),
        # The format's spelling.
        separator_id=gguf.metadata.integer("tokenizer.ggml.seperator_token_id", -1, MAX_INT, default=-1)
        if traits.token_types != "absent"
        else -1,
        embedding_scale=math.sqrt(dim) if traits.scale_embedding else scales["embedding_scale"],
        residual_scale=scales["residual_scale"],
        logit_scale=scales["logit_scale"] if traits.multiplies_logits else 1 / scales["logit_scale"],
        qk_norm_place=traits.qk_norm_place,
        score_cap=_positive_or_0(keys, "attn_logit_softcapping", traits.score_cap),
        logit_cap=_positive_or_0(keys, "final_logit_softcapping", traits.logit_cap),
        attention_scale=keys.positive_float("attention.scale", default=attention_scale),
        relative_rows=_size_of(keys, traits.relative_positions, "blk.0.attn_rel_k.weight", 0),
        layer_kinds=kinds,
        layer_feed_forwards=feed_forwards if "experts" in feed_forwards else (),
        conv_taps=keys.integer("shortconv.l_cache", 2) if "short_conv" in kinds else 0,
        query_gate=traits.query_gate,
        value_norm=traits.value_norm,
    )
    if any(has_matrix_state(kind) for kind in kinds):
        config = _with_scan(config, keys)
    if "experts" in feed_forwards:
        config = _with_experts(config, keys, traits)
    if config.query_gate and key_dim != value_dim:
        raise keys.unsupported(
            f"{name}.attention.value_length {value_dim} differs from attention.key_length {key_dim}, the "
            "width of the gates"
        )
    config = with_positions(config, keys, traits, max_context)
    if traits.layers_differ:
        config = with_layer_dimensions(config, keys)
    if traits.per_layer_inputs != "absent":
        width = keys.integer("embedding_length_per_layer_input", 0, MAX_INT // n_layers, default=0)
        config = config.replace(per_layer_dim=width)
    return config


def _refuse_unsupported(keys: Keys, traits: Architecture) -> None:
    absent = {
        "attention.sliding_window": traits.window == "absent",
        "expert_count": traits.experts == "absent",
        "attention.max_alibi_bias": not traits.max_alibi_bias,
        "attn_logit_softcapping": traits.score_cap is None,
        "final_logit_softcapping": traits.logit_cap is None,
    }
    unscaled = dict.fromkeys(SCALE_KEYS, 1.0) if traits.scales == "absent" else {}
    refused = _UNSUPPORTED_KEYS | unscaled | {suffix: 0 for suffix, is_absent in absent.items() if is_absent}
    for suffix, neutral in refused.items():
        value = keys.number(suffix, default=neutral)
        if value != neutral:
            raise keys.unsupported(f"{keys.architecture}.{suffix} = {value} is not supported")


def _positive_or_0(keys: Keys, suffix: str, default: float | None) -> float:
    """Return a positive number; 0 in the metadata means that there is none."""
    stated = keys.number(suffix, default=default or 0.0)
    return keys.positive_float(suffix, default=stated) if stated else 0.0


def _size_of(keys: Keys, presence: str, name: str, axis: int) -> int:
    """Return a size of an optional tensor; 0 without it."""
    tensor = keys.gguf.tensors.get(name)
    return 0 if presence == "absent" or tensor is None else tensor.shape[axis]


def _activation(keys: Keys, traits: Architecture) -> Activation:
    name = keys.string("hidden_activation", default="") if traits.activations else ""
    if not name:
        ungated = traits.ungated_activation
        gated = traits.names.get("w_gate", "").format(layer=0) in keys.gguf.tensors
        return ungated if ungated and not gated else traits.activation
    if name not in traits.activations:
        raise keys.unsupported(
            f"{keys.architecture}.hidden_activation is {name}; supported: {', '.join(traits.activations)}"
        )
    return traits.activations[name]


def _head_dim(keys: Keys, suffix: str, dim: int, n_heads: int) -> int:
    if n_heads == 0:
        return 0
    if not keys.has(suffix) and dim % n_heads:
        raise keys.error(
            f"{keys.architecture}.{suffix} is missing, and embedding_length {dim} "
            f"is not a multiple of attention.head_count {n_heads}"
        )
    return keys.positive(suffix, default=dim // n_heads)


def _heads(
    keys: Keys, traits: Architecture, n_layers: int, n_blocks: int
) -> tuple[int, int, tuple[LayerKind, ...]]:
    """Return the numbers of query and of key-value heads, and the kinds of layers."""
    name = keys.architecture
    if n_layers == 0:
        return 0, 0, ()
    if traits.recurrent and keys.number("attention.head_count", default=-1) == 0:
        return 0, 0, (traits.recurrent,) * n_layers
    n_heads = keys.count_each_layer("attention.head_count", n_layers, least=1)[0]
    kinds: tuple[LayerKind, ...] = () if traits.mixer == "attention" else (traits.mixer,) * n_layers
    if traits.recurrent:
        counts = keys.count_each_layer("attention.head_count_kv", n_blocks)[:n_layers]
        if not any(counts):
            raise keys.unsupported(f"{name}.attention.head_count_kv is 0 in every layer: none has attention")
        attends = _layers_with_attention(keys, traits, counts, n_blocks)
        kinds = tuple(traits.mixer if has else traits.recurrent for has in attends)
    else:
        read = keys.list_each_layer if traits.layers_differ else keys.count_each_layer
        counts = read("attention.head_count_kv", n_layers, n_heads, least=1)
    for n_kv_heads in counts:
        if n_kv_heads and n_heads % n_kv_heads:
            raise keys.error(
                f"{name}.attention.head_count {n_heads} is not a multiple of "
                f"{name}.attention.head_count_kv {n_kv_heads}"
            )
    return n_heads, max(counts), kinds


def _layers_with_attention(
    keys: Keys, traits: Architecture, kv_heads: tuple[int, ...], n_blocks: int
) -> tuple[bool, ...]:
    if not traits.attention_every or 0 in kv_heads:
        return tuple(heads > 0 for heads in kv_heads)
    key = "attention.recurrent_layers"
    if keys.has(key):
        attends = tuple(
            not value for value in keys.each_layer(key, n_blocks, "array[bool]", "array[integer]")
        )
    else:
        n = keys.positive("full_attention_interval", default=traits.attention_every)
        attends = tuple((layer + 1) % n == 0 for layer in range(n_blocks))
    if not any(attends[: len(kv_heads)]):
        raise keys.unsupported("no layer has attention")
    return attends[: len(kv_heads)]


def _with_scan(config: ModelConfig, keys: Keys) -> ModelConfig:
    """Read the shape of the layers whose state has matrices."""
    name = keys.architecture
    inner, state = keys.positive("ssm.inner_size"), keys.positive("ssm.state_size")
    heads, groups = keys.positive("ssm.time_step_rank"), keys.positive("ssm.group_count", default=1)
    if inner % heads:
        raise keys.error(
            f"{name}.ssm.inner_size {inner} is not a multiple of {name}.ssm.time_step_rank {heads}"
        )
    if heads % groups:
        raise keys.error(
            f"{name}.ssm.time_step_rank {heads} is not a multiple of {name}.ssm.group_count {groups}"
        )
    if 2 * inner + 2 * groups * state + 2 * heads > MAX_INT:
        raise keys.error(
            f"{name}.ssm.inner_size {inner}, ssm.state_size {state} and ssm.group_count {groups}: their "
            f"projections have more than {MAX_INT} rows"
        )
    return config.replace(
        conv_taps=keys.integer("ssm.conv_kernel", 2),
        scan_heads=heads,
        scan_groups=groups,
        scan_key_dim=state,
        scan_value_dim=inner // heads,
    )


def leading_dense(n_layers: int, dense_layers: int) -> tuple[FeedForwardKind, ...]:
    """Return the kinds of feed-forwards if all layers except the first ones have experts."""
    dense: FeedForwardKind = "dense"
    experts: FeedForwardKind = "experts"
    return tuple(dense if layer < dense_layers else experts for layer in range(n_layers))


def _feed_forwards(keys: Keys, traits: Architecture, n_layers: int) -> tuple[FeedForwardKind, ...]:
    none: FeedForwardKind = "none"
    if traits.ffn == "absent":
        return (none,) * n_layers
    has_none = traits.experts == "optional" and keys.number("expert_count", default=0) == 0
    if traits.experts == "absent" or has_none:
        return leading_dense(n_layers, n_layers)
    kinds = leading_dense(n_layers, keys.integer("leading_dense_block_count", 0, n_layers, default=0))
    if keys.has("moe_every_n_layers"):
        every = keys.positive("moe_every_n_layers")
        return tuple(kind if layer % every == 1 else "dense" for layer, kind in enumerate(kinds))
    return kinds


def _with_experts(config: ModelConfig, keys: Keys, traits: Architecture) -> ModelConfig:
    name = keys.architecture
    count, used = keys.positive("expert_count"), keys.positive("expert_used_count")
    if used > count:
        raise keys.error(f"{name}.expert_used_count is {used}, must be at most {name}.expert_count {count}")
    # Files of some architectures state an expert's width as the feed-forward's.
    width_key = "expert_feed_forward_length"
    width = keys.positive(width_key if keys.has(width_key) else "feed_forward_length")
    if count * max(width, config.dim) > MAX_INT:
        raise keys.error(f"{count} experts of {max(width, config.dim)} rows have more than {MAX_INT}")
    if keys.number("expert_group_count", default=1) > 1:
        raise keys.unsupported(f"{name}.expert_group_count: groups of experts are not supported")
    score = keys.number("expert_gating_func", default=0)
    if score not in (0, *_ROUTER_SCORES):
        known = ", ".join(f"{number} ({kind})" for number, kind in _ROUTER_SCORES.items())
        raise keys.unsupported(f"{name}.expert_gating_func is {score}; supported: {known}")
    return config.replace(
        n_experts=count,
        experts_used=used,
        expert_dim=width,
        shared_dim=keys.integer("expert_shared_feed_forward_length", 0, default=0),
        router_score=_ROUTER_SCORES.get(int(score), traits.router_score),
        normalize_routes=keys.boolean("expert_weights_norm", default=traits.normalize_routes),
        route_scale=_positive_or_0(keys, "expert_weights_scale", 0.0) or 1.0,
    )


def _vocab_size(keys: Keys) -> int:
    tokens = "tokenizer.ggml.tokens"
    listed = keys.gguf.metadata.length(tokens) if tokens in keys.gguf.metadata else None
    stated = keys.positive("vocab_size") if listed is None or keys.has("vocab_size") else listed
    if listed is not None and stated != listed:
        raise keys.error(f"{keys.architecture}.vocab_size is {stated}, but {tokens} lists {listed} tokens")
    if not 0 < stated <= MAX_INT:
        raise keys.error(f"{tokens} lists {stated} tokens")
    return stated


def _token_types(keys: Keys, traits: Architecture) -> int:
    tensor = keys.gguf.tensors.get("token_types.weight")
    if traits.token_types == "absent" or tensor is None:
        return 0
    key = "tokenizer.ggml.token_type_count"
    # Some converters store a single row as a vector.
    rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
    stated = keys.gguf.metadata.typed(key, "integer", default=rows)
    if stated != rows:
        raise keys.error(f"{key} is {stated}, but token_types.weight has {rows} rows")
    return rows
