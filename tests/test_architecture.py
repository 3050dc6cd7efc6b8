"""Configuration and tensor roles: results for valid files, errors for missing or contradictory entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import small_models
from support.gguf_bytes import ARRAY, BOOL, F32, F64, I32, I64, STRING, U8, U16, U32, U64, array, scalar
from support.llama_file import (
    CONTEXT,
    DIM,
    FFN,
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    base_tensors,
    integer,
    model_file,
    number,
    string,
)

from metal_prefill import Model, _core
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import ModelConfig
from metal_prefill.files._model_tensors import collect_tensors

Open = Callable[..., GGUFFile]

PLAIN = ModelConfig(
    architecture="llama",
    n_layers=LAYERS,
    dim=DIM,
    n_heads=HEADS,
    n_kv_heads=KV_HEADS,
    key_dim=HEAD,
    value_dim=HEAD,
    ffn_dim=FFN,
    vocab_size=VOCAB,
    context_length=CONTEXT,
    norm_eps=float(np.float32(1e-5)),
    rope_dim=HEAD,
)


@pytest.fixture
def open_model(tmp_path: Path) -> Open:
    def open_model(*args: Any, **kwargs: Any) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(model_file(*args, **kwargs))
        return GGUFFile(path)

    return open_model


def test_a_plain_file_has_its_numbers_and_defaults(open_model: Open) -> None:
    assert read_config(open_model()) == PLAIN


def test_engines_receive_every_field() -> None:
    core = {name for name in dir(_core.Config) if not name.startswith("_")}
    assert {field.name for field in fields(ModelConfig)} <= core


def test_every_supported_key_is_read(open_model: Open) -> None:
    stated = {
        "llama.attention.key_length": integer(12),
        "llama.attention.value_length": integer(20),
        "llama.rope.dimension_count": integer(6),
        "llama.rope.freq_base": number(5e5),
        "llama.attention.scale": number(0.25),
        "llama.vocab_size": integer(VOCAB),
    }
    config = read_config(open_model(stated))
    expected = replace(PLAIN, key_dim=12, value_dim=20, rope_dim=6, rope_base=5e5, attention_scale=0.25)
    assert config == expected


def test_heads_of_keys_and_values_default_to_all_heads(open_model: Open) -> None:
    assert read_config(open_model({"llama.attention.head_count_kv": None})).n_kv_heads == HEADS


@pytest.mark.parametrize("kind", [U8, U16, U32, I32, U64, I64])
def test_any_integer_type_is_accepted(open_model: Open, kind: int) -> None:
    assert read_config(open_model({"llama.block_count": (kind, scalar(kind, LAYERS))})) == PLAIN


def test_double_precision_is_accepted(open_model: Open) -> None:
    assert read_config(open_model({"llama.rope.freq_base": (F64, scalar(F64, 123.5))})).rope_base == 123.5


def test_the_vocabulary_size_may_be_stated_without_tokens(open_model: Open) -> None:
    without = {"tokenizer.ggml.tokens": None}
    assert read_config(open_model({**without, "llama.vocab_size": integer(7)})).vocab_size == 7
    with pytest.raises(GGUFError, match=r"metadata llama\.vocab_size is missing"):
        read_config(open_model(without))


REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


@pytest.mark.parametrize("key", ["general.architecture", *(f"llama.{key}" for key in REQUIRED)])
def test_missing_metadata_is_named(open_model: Open, key: str) -> None:
    with pytest.raises(GGUFError, match=f"metadata {key} is missing"):
        read_config(open_model({key: None}))


INTEGERS = (
    *(key for key in REQUIRED if "epsilon" not in key),
    "attention.key_length",
    "rope.dimension_count",
)


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (integer(0), "is 0, must be between 1 and 2147483647"),
        ((I32, scalar(I32, -1)), "is -1, must be between 1 and"),
        (integer(2**31), "is 2147483648, must be between 1 and"),
        ((U64, scalar(U64, 2**64 - 1)), "is 18446744073709551615, must be between"),
        (number(2.0), "has type float32, expected an integer"),
        (string("2"), "has type string, expected an integer"),
        ((BOOL, b"\1"), "has type bool, expected an integer"),
    ],
    ids=str,
)
def test_invalid_integers_are_named(
    open_model: Open, key: str, content: tuple[int, bytes], complaint: str
) -> None:
    with pytest.raises(GGUFError, match=f"llama.{key} {complaint}"):
        read_config(open_model({f"llama.{key}": content}))


@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base", "attention.scale"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (number(0.0), "is 0.0, must be positive and finite"),
        (number(-1.0), "is -1.0, must be positive"),
        (number(math.inf), "is inf"),
        (number(math.nan), "is nan"),
        (integer(1), "has type uint32, expected a float"),
        ((ARRAY, array(F32, [scalar(F32, 1)])), r"has type array\[float32\], expected a float"),
    ],
    ids=str,
)
def test_invalid_floats_are_named(
    open_model: Open, key: str, content: tuple[int, bytes], complaint: str
) -> None:
    with pytest.raises(GGUFError, match=f"llama.{key} {complaint}"):
        read_config(open_model({f"llama.{key}": content}))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": integer(1)}, "general.architecture has type uint32, expected string"),
        ({"llama.block_count": integer(1000)}, "block_count is 1000, but the file has only 20 tensors"),
        (
            {"llama.attention.head_count": integer(3), "llama.attention.head_count_kv": integer(3)},
            "key_length is missing, and embedding_length 16 is not a multiple of attention.head_count 3",
        ),
        (
            {"llama.attention.head_count_kv": integer(3)},
            "head_count 4 is not a multiple of llama.attention.head_count_kv 3",
        ),
        (
            {"llama.attention.head_count_kv": integer(8)},
            "head_count 4 is not a multiple of llama.attention.head_count_kv 8",
        ),
        (
            {"llama.rope.dimension_count": integer(3)},
            "is 3, must be even and at most the head width 4",
        ),
        (
            {"llama.rope.dimension_count": integer(6)},
            "is 6, must be even and at most the head width 4",
        ),
        ({"llama.attention.key_length": integer(2**30)}, "4 heads of 1073741824 dimensions are more than"),
        (
            {"llama.vocab_size": integer(11)},
            "llama.vocab_size is 11, but tokenizer.ggml.tokens lists 10 tokens",
        ),
        ({"tokenizer.ggml.tokens": (ARRAY, array(STRING, []))}, "tokenizer.ggml.tokens lists 0 tokens"),
        ({"tokenizer.ggml.tokens": string("a")}, "tokenizer.ggml.tokens has type string, expected an array"),
    ],
)
def test_contradictions_are_named(open_model: Open, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        read_config(open_model(metadata))


def per_layer(kind: int, *values: int) -> tuple[int, bytes]:
    return ARRAY, array(kind, [scalar(kind, value) for value in values])


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_values_per_layer_must_be_equal(open_model: Open, key: str) -> None:
    name = f"llama.{key}"
    assert read_config(open_model({name: per_layer(I32, 4, 4)})) == read_config(
        open_model({name: integer(4)})
    )
    with pytest.raises(UnsupportedModelError, match=f"{name} differs between layers"):
        read_config(open_model({name: per_layer(U32, 4, 2)}))
    with pytest.raises(GGUFError, match=f"{name} lists 3 values for 2 layers"):
        read_config(open_model({name: per_layer(U32, 4, 4, 4)}))
    with pytest.raises(GGUFError, match=rf"{name} has type array\[float32\], expected an integer"):
        read_config(open_model({name: per_layer(F32, 4, 4)}))
    with pytest.raises(GGUFError, match=f"{name} is 0, must be between"):
        read_config(open_model({name: per_layer(U32, 0, 0)}))


SCALING = "llama.rope.scaling."


def test_linear_scaling(open_model: Open) -> None:
    linear = replace(PLAIN, rope_scaling="linear", rope_factor=4.0)
    factor = number(4.0)
    assert read_config(open_model({SCALING + "type": string("linear"), SCALING + "factor": factor})) == linear
    assert read_config(open_model({SCALING + "factor": factor})) == linear
    assert read_config(open_model({"llama.rope.scale_linear": factor})) == linear


def test_scaling_of_type_none_ignores_the_factor(open_model: Open) -> None:
    assert (
        read_config(open_model({SCALING + "type": string("none"), SCALING + "factor": number(4.0)})) == PLAIN
    )


def test_yarn_scaling(open_model: Open) -> None:
    yarn = {
        SCALING + "type": string("yarn"),
        SCALING + "factor": number(8.0),
        SCALING + "original_context_length": integer(32),
    }
    expected = replace(PLAIN, rope_scaling="yarn", rope_factor=8.0, rope_original_context=32)
    assert read_config(open_model(yarn)) == expected
    tuned = {
        SCALING + "attn_factor": number(0.5),
        SCALING + "yarn_attn_factor": number(3.0),
        SCALING + "yarn_beta_fast": number(16.0),
        SCALING + "yarn_beta_slow": number(2.0),
        SCALING + "yarn_ext_factor": number(1.0),
    }
    expected = replace(expected, rope_attn_factor=1.5, rope_beta_fast=16.0, rope_beta_slow=2.0)
    assert read_config(open_model({**yarn, **tuned})) == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"type": string("linear")}, "metadata llama.rope.scale_linear is missing"),
        ({"type": string("yarn"), "factor": number(2.0)}, "scaling.original_context_length is missing"),
        ({"factor": number(0.0)}, "scaling.factor is 0.0, must be positive"),
        ({"factor": number(math.nan)}, "scaling.factor is nan"),
        ({"type": integer(1)}, "scaling.type has type uint32, expected string"),
    ],
)
def test_incomplete_scaling_is_named(open_model: Open, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        read_config(open_model({SCALING + key: value for key, value in metadata.items()}))


def test_yarn_needs_a_base_above_one(open_model: Open) -> None:
    yarn = {"type": string("yarn"), "factor": number(2.0), "original_context_length": integer(32)}
    metadata = {SCALING + key: value for key, value in yarn.items()}
    with pytest.raises(GGUFError, match=r"rope\.freq_base is 1\.0, must be greater than 1 for YaRN"):
        read_config(open_model({**metadata, "llama.rope.freq_base": number(1.0)}))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": string("mamba")},
            "architecture mamba is not supported; .*supported are llama, qwen2",
        ),
        ({"llama.expert_count": integer(8)}, "llama.expert_count = 8 is not supported"),
        ({"llama.final_logit_softcapping": number(30.0)}, "final_logit_softcapping = 30.0"),
        ({"llama.logit_scale": number(0.5)}, "llama.logit_scale = 0.5"),
        ({SCALING + "yarn_ext_factor": number(0.0)}, "yarn_ext_factor = 0.0"),
        ({SCALING + "type": string("longrope")}, "rope scaling of type longrope is not supported"),
        ({"llama.attention.sliding_window": integer(64)}, "sliding_window is not supported for llama"),
        ({"split.count": (U16, scalar(U16, 3))}, "the model is split into 3 files"),
    ],
)
def test_unsupported_features_are_rejected(open_model: Open, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(open_model(metadata))


def test_neutral_values_of_unsupported_features_are_accepted(open_model: Open) -> None:
    neutral = {"llama.expert_count": integer(0), "llama.logit_scale": number(1.0), "split.count": integer(1)}
    assert read_config(open_model({**neutral, "llama.attention.causal": (BOOL, b"\1")})) == PLAIN
    both_ways = read_config(open_model({**neutral, "llama.attention.causal": (BOOL, b"\0")}))
    assert both_ways == replace(PLAIN, causal=False)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rotates_pairs_half_a_head_apart(open_model: Open, architecture: str) -> None:
    expected = replace(PLAIN, architecture=architecture, rope_style="neox")
    assert read_config(open_model(architecture=architecture)) == expected


def test_every_layer_of_phi3_has_the_window_of_the_file(open_model: Open) -> None:
    assert read_config(open_model(architecture="phi3")).layer_window == ()
    metadata = {"phi3.attention.sliding_window": integer(8)}
    config = read_config(open_model(metadata, architecture="phi3"))
    assert config.layer_window == (8,) * LAYERS
    assert config.rope_style == "neox"


def test_a_window_of_zero_means_none(open_model: Open) -> None:
    config = read_config(open_model({"phi3.attention.sliding_window": integer(0)}, architecture="phi3"))
    assert config.layer_window == ()


@pytest.fixture
def long_rope(tmp_path: Path) -> Iterator[GGUFFile]:
    """Model with factors for long and for short contexts: 64 positions, extended to 1,024."""
    with GGUFFile(small_models.write(tmp_path / "m.gguf", small_models.MODELS["phi3, long rope"])) as gguf:
        yield gguf


@pytest.mark.parametrize(
    ("max_context", "long", "context"),
    [(None, True, 1024), (65, True, 1024), (64, False, 64), (2048, True, 1024)],
)
def test_the_requested_context_selects_the_long_rope_factors(
    long_rope: GGUFFile, max_context: int | None, long: bool, context: int
) -> None:
    config = read_config(long_rope, max_context)
    assert (config.rope_long, config.context_length, config.rope_original_context) == (long, context, 64)
    assert config.rope_attn_factor == pytest.approx(math.sqrt(1 + math.log(16) / math.log(64)))


def test_long_rope_requires_both_tensors(long_rope: GGUFFile) -> None:
    long_rope.tensors.pop("rope_factors_short.weight")
    with pytest.raises(GGUFError, match=r"tensor rope_factors_short\.weight is missing, which LongRoPE"):
        read_config(long_rope)


def test_the_type_of_long_rope_requires_its_tensors(open_model: Open) -> None:
    metadata = {"phi3.rope.scaling.type": string("longrope")}
    with pytest.raises(GGUFError, match=r"tensor rope_factors_long\.weight is missing, which LongRoPE"):
        read_config(open_model(metadata, architecture="phi3"))
    metadata["phi3.rope.scaling.factor"] = number(4.0)
    with pytest.raises(UnsupportedModelError, match=r"scaling\.factor 4\.0 together with LongRoPE"):
        read_config(open_model(metadata, architecture="phi3"))


def test_the_attention_factor_needs_no_type_of_scaling(open_model: Open) -> None:
    config = read_config(open_model({SCALING + "attn_factor": number(1.25)}))
    assert config == replace(PLAIN, rope_attn_factor=1.25)


@pytest.fixture(scope="module")
def phi3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_models.write(tmp_path_factory.mktemp("phi3") / "m.gguf", small_models.MODELS["phi3"])


def test_matrices_that_phi3_stacks_are_rows_of_one_tensor(phi3_path: Path) -> None:
    with GGUFFile(phi3_path) as gguf:
        config = read_config(gguf)
        parts = {role: tensor for role, layer, tensor in collect_tensors(gguf, config) if layer == 1}
        for name, roles in (("attn_qkv", ("wq", "wk", "wv")), ("ffn_up", ("w_gate", "w_up"))):
            whole = gguf.tensors[f"blk.1.{name}.weight"]
            ends = [whole.offset, *(parts[role].offset + parts[role].nbytes for role in roles)]
            assert [parts[role].offset for role in roles] == ends[:-1]
            assert ends[-1] == whole.offset + whole.nbytes
            assert sum(parts[role].shape[0] for role in roles) == whole.shape[0]


def test_a_stacked_tensor_that_is_missing_or_too_short_is_named(phi3_path: Path) -> None:
    with GGUFFile(phi3_path) as gguf:
        config = read_config(gguf)
        name = "blk.1.attn_qkv.weight"
        whole = gguf.tensors[name]
        gguf.tensors[name] = replace(whole, shape=(whole.shape[0] - 1, whole.shape[1]))
        with pytest.raises(GGUFError, match=r"qkv.weight has shape \(383, 128\), .* requires \(384, 128\)"):
            collect_tensors(gguf, config)
        del gguf.tensors[name]
        with pytest.raises(
            GGUFError, match=r"tensor blk\.1\.attn_q\.weight is missing, as is blk\.1\.attn_qkv\.weight"
        ):
            collect_tensors(gguf, config)


def test_every_fourth_layer_of_smollm3_does_not_rotate(open_model: Open) -> None:
    config = read_config(open_model(architecture="smollm3", layers=9))
    assert config.layer_uses_rope == (True, True, True, False, True, True, True, False, True)
    assert config.rope_style == "interleaved"


def test_gemma3_alternates_windows_and_full_attention(open_model: Open) -> None:
    metadata = {
        "gemma3.attention.sliding_window": integer(8),
        "gemma3.rope.freq_base": number(1e6),
        "gemma3.rope.scaling.type": string("linear"),
        "gemma3.rope.scaling.factor": number(8.0),
    }
    config = read_config(open_model(metadata, architecture="gemma3", layers=7))
    assert config.layer_window == (8, 8, 8, 8, 8, 0, 8)
    assert config.layer_rope_base == (1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4)
    assert config.layer_rope_factor == (1, 1, 1, 1, 1, 8, 1)
    assert (config.rope_style, config.activation) == ("neox", "gelu")
    assert config.embedding_scale == math.sqrt(DIM)
    assert config.attention_scale == 0.0


def test_gemma3_may_specify_its_pattern(open_model: Open) -> None:
    metadata = {
        "gemma3.attention.sliding_window": integer(8),
        "gemma3.attention.sliding_window_pattern": integer(2),
        "gemma3.rope.freq_base_swa": number(5e3),
    }
    config = read_config(open_model(metadata, architecture="gemma3", layers=4))
    assert config.layer_window == (8, 0, 8, 0)
    assert config.layer_rope_base == (5e3, 1e4, 5e3, 1e4)


def test_gemma3_requires_its_window(open_model: Open) -> None:
    with pytest.raises(GGUFError, match=r"metadata gemma3\.attention\.sliding_window is missing"):
        read_config(open_model(architecture="gemma3"))


def test_gemma3_may_list_its_windows(open_model: Open) -> None:
    def config(kind: int, *values: bytes) -> ModelConfig:
        metadata = {
            "gemma3.attention.sliding_window": integer(8),
            "gemma3.attention.sliding_window_pattern": (ARRAY, array(kind, values)),
        }
        return read_config(open_model(metadata, architecture="gemma3", layers=3))

    assert config(BOOL, b"\0", b"\1", b"\1").layer_window == (0, 8, 8)
    with pytest.raises(GGUFError, match="sliding_window_pattern lists 2 values for 3 layers"):
        config(BOOL, b"\0", b"\1")
    with pytest.raises(GGUFError, match=r"has type array\[uint8\], expected an integer or array\[bool\]"):
        config(U8, b"\0", b"\1", b"\1")


def test_only_layers_with_a_window_rotate_in_exaone4(open_model: Open) -> None:
    plain = read_config(open_model(architecture="exaone4", layers=5))
    assert (plain.layer_window, plain.layer_uses_rope) == ((), ())
    metadata = {"exaone4.attention.sliding_window": integer(8)}
    config = read_config(open_model(metadata, architecture="exaone4", layers=5))
    assert config.layer_window == (8, 8, 8, 0, 8)
    assert config.layer_uses_rope == (True, True, True, False, True)
    assert config.layer_rope_base == ()


def test_only_granite_scales(open_model: Open) -> None:
    plain = read_config(open_model(architecture="granite"))
    assert (plain.embedding_scale, plain.residual_scale, plain.logit_scale) == (1.0, 1.0, 1.0)
    stated = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0, "attention.scale": 0.125}
    metadata = {f"granite.{key}": number(value) for key, value in stated.items()}
    config = read_config(open_model(metadata, architecture="granite"))
    assert (config.embedding_scale, config.residual_scale) == (12.0, 0.25)
    assert config.logit_scale == 1 / 8  # which the file has as a divisor
    assert config.attention_scale == 0.125


def test_a_scale_whose_square_overflows_float32_is_rejected(tmp_path: Path) -> None:
    model = replace(small_models.MODELS["granite"], scales=(("residual_scale", 1e-30),))
    with pytest.raises(GGUFError, match="scales of the embedding, of the residual stream"):
        Model(small_models.write(tmp_path / "m.gguf", model), device="cpu")


def test_largest_gemma3_scales_attention_by_the_nominal_head(open_model: Open) -> None:
    metadata = {"gemma3.attention.sliding_window": integer(8), "gemma3.attention.key_length": integer(32)}
    config = read_config(open_model(metadata, architecture="gemma3", layers=62))
    assert config.attention_scale == pytest.approx((DIM / HEADS) ** -0.5)


def collect(open_model: Open, *args: Any, **kwargs: Any) -> dict[tuple[str, int], str]:
    gguf = open_model(*args, **kwargs)
    return {(role, layer): tensor.name for role, layer, tensor in collect_tensors(gguf, read_config(gguf))}


def test_every_role_finds_its_tensor(open_model: Open) -> None:
    roles = collect(open_model)
    assert roles["token_embedding", -1] == "token_embd.weight"
    assert roles["wq", 0] == "blk.0.attn_q.weight"
    assert roles["w_down", 1] == "blk.1.ffn_down.weight"
    assert len(roles) == 3 + LAYERS * 9


def test_the_embedding_is_the_default_output_projection(open_model: Open) -> None:
    assert collect(open_model)["output", -1] == "token_embd.weight"
    separate = collect(open_model, tensors={"output.weight": ((VOCAB, DIM), 0)})
    assert separate["output", -1] == "output.weight"


def test_optional_tensors_are_found(open_model: Open) -> None:
    optional = {"rope_freqs.weight": ((HEAD // 2,), 0), "blk.1.attn_q.bias": ((DIM,), 0)}
    optional |= {"blk.0.attn_output.bias": ((DIM,), 0), "blk.0.ffn_gate.bias": ((FFN,), 0)}
    roles = collect(open_model, tensors=optional)
    assert roles["bo", 0] == "blk.0.attn_output.bias"
    assert roles["b_gate", 0] == "blk.0.ffn_gate.bias"
    assert roles["rope_freqs", -1] == "rope_freqs.weight"
    assert roles["bq", 1] == "blk.1.attn_q.bias"
    assert ("bq", 0) not in roles


@pytest.mark.parametrize("name", [name for name in base_tensors() if not name.startswith("blk.0.")])
def test_missing_tensor_is_named(open_model: Open, name: str) -> None:
    with pytest.raises(GGUFError, match=f"tensor {name} is missing"):
        collect(open_model, tensors={name: None})


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("qwen2", "blk.0.attn_q.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
        ("gemma3", "blk.0.attn_q_norm.weight"),
        ("hunyuan-dense", "blk.0.attn_q_norm.weight"),
        ("exaone4", "blk.0.attn_q_norm.weight"),
    ],
)
def test_architectures_require_their_own_tensors(open_model: Open, architecture: str, name: str) -> None:
    metadata = {"gemma3.attention.sliding_window": integer(8)} if architecture == "gemma3" else {}
    with pytest.raises(GGUFError, match=f"tensor {name} is missing"):
        collect(open_model, metadata, architecture=architecture)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embd.weight", (VOCAB + 1, DIM)),
        ("output_norm.weight", (DIM + 1,)),
        ("output_norm.weight", (1, DIM)),
        ("output.weight", (DIM, VOCAB)),
        ("rope_freqs.weight", (HEAD,)),
        ("blk.0.attn_q.weight", (DIM, DIM, 1)),
        ("blk.1.attn_k.weight", (DIM, DIM)),
        ("blk.1.attn_output.weight", (DIM * DIM,)),
        ("blk.0.ffn_down.weight", (FFN, DIM)),
        ("blk.0.attn_v.bias", (DIM,)),
        ("blk.0.ffn_down.bias", (FFN,)),
    ],
)
def test_contradicting_shape_is_named(open_model: Open, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        GGUFError, match=rf"tensor {name} has shape \({shape[0]}.*\), the metadata requires \("
    ):
        collect(open_model, tensors={name: (shape, 0)})


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        (
            "output.weight",
            (VOCAB, DIM),
            26,
            "tensor output.weight has type I32; supported types are F32, F16",
        ),
        ("output.weight", (VOCAB, DIM), 28, "tensor output.weight has type F64"),
        (
            "output_norm.weight",
            (DIM,),
            1,
            "tensor output_norm.weight has type F16; supported types are F32",
        ),
        ("blk.0.attn_q.bias", (DIM,), 30, "tensor blk.0.attn_q.bias has type BF16"),
    ],
)
def test_an_unsupported_type_is_named(
    open_model: Open, name: str, shape: tuple[int, ...], kind: int, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        collect(open_model, tensors={name: (shape, kind)})


@pytest.mark.parametrize(
    "name",
    [
        "blk.2.attn_norm.weight",
        "blk.0.attn_norm.bias",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_q_norm.weight",
        "x",
    ],
)
def test_an_unknown_tensor_is_rejected(open_model: Open, name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"tensor {name} is not part of a llama model with 2 layers"
    ):
        collect(open_model, tensors={name: ((DIM,), 0)})
