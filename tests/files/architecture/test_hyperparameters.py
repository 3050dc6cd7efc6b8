"""Hyperparameters that are read from a file, and errors that name what is missing or contradictory."""

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import small_models
from support.files.gguf_bytes import (
    F32,
    F64,
    FALSE,
    I32,
    TRUE,
    U32,
    U64,
    integer,
    number,
    numbers,
    scalar,
    string,
    strings,
)
from support.files.llama_file import DIM, HEADS, Open, plain_config

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.files._hyperparameters import read_config


def test_a_plain_file_has_its_numbers_and_defaults(open_model: Open) -> None:
    assert read_config(open_model()) == plain_config()


def test_a_configuration_is_a_value() -> None:
    config = plain_config()
    assert len({config, config.replace(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))}) == 1
    assert config.replace(dim=8) != config
    assert "dim=16" in repr(config)
    with pytest.raises(TypeError, match="rope_style='x' has the wrong type"):
        config.replace(rope_style="x")
    with pytest.raises(TypeError, match="dims=3 is not an attribute"):
        config.replace(dims=3)


def test_layers_of_a_configuration_must_exist() -> None:
    config = plain_config()
    for layer in (-1, 2, 10**9):
        for method in (config.kind, config.caches, config.of_layer, config.state_values):
            with pytest.raises(IndexError, match=f"layer {layer} of a model with 2 layers"):
                method(layer)
    with pytest.raises(IndexError, match="layer_kinds has 1 items for 2 layers"):
        config.replace(layer_kinds=("attention",)).kind(1)


def test_a_file_may_be_the_only_part_of_a_split_model(open_model: Open) -> None:
    assert read_config(open_model({"split.count": integer(1)})) == plain_config()


def test_the_vocabulary_size_may_be_stated_without_tokens(open_model: Open) -> None:
    without = {"tokenizer.ggml.tokens": None}
    assert read_config(open_model({**without, "llama.vocab_size": integer(7)})).vocab_size == 7
    with pytest.raises(GGUFError, match=r"metadata llama\.vocab_size is missing"):
        read_config(open_model(without))


REQUIRED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)


def test_missing_metadata_is_named(open_model: Open) -> None:
    for key in ["general.architecture", *(f"llama.{key}" for key in REQUIRED)]:
        with pytest.raises(GGUFError, match=f"metadata {key} is missing"):
            read_config(open_model({key: None}))


INTEGERS = (
    *(key for key in REQUIRED if "epsilon" not in key),
    "attention.key_length",
    "rope.dimension_count",
)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (integer(0), "is 0, must be between 1 and 2147483647"),
        ((I32, scalar(I32, -1)), "is -1, must be between 1 and"),
        (integer(2**31), "is 2147483648, must be between 1 and"),
        ((U64, scalar(U64, 2**64 - 1)), "is 18446744073709551615, must be between"),
        (number(2.0), "has type float32, expected an integer"),
        (string("2"), "has type string, expected an integer"),
        (TRUE, "has type bool, expected an integer"),
    ],
    ids=str,
)
def test_invalid_integers_are_named(open_model: Open, content: tuple[int, bytes], complaint: str) -> None:
    for key in INTEGERS:
        with pytest.raises(GGUFError, match=f"llama.{key} {complaint}"):
            read_config(open_model({f"llama.{key}": content}))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (number(0.0), "is 0.0, must be positive and finite"),
        ((F64, scalar(F64, 1e39)), r"is 1e\+39, must be positive and finite in 32 bits"),
        ((F64, scalar(F64, 1e-39)), "is 1e-39, must be positive and finite in 32 bits"),
        (number(-1.0), "is -1.0, must be positive"),
        (number(math.inf), "is inf"),
        (number(math.nan), "is nan"),
        (integer(1), "has type uint32, expected a float"),
        (numbers(F32, 1), r"has type array\[float32\], expected a float"),
    ],
    ids=str,
)
def test_invalid_floats_are_named(open_model: Open, content: tuple[int, bytes], complaint: str) -> None:
    for key in ["attention.layer_norm_rms_epsilon", "rope.freq_base", "attention.scale"]:
        with pytest.raises(GGUFError, match=f"llama.{key} {complaint}"):
            read_config(open_model({f"llama.{key}": content}))


def test_values_per_layer_must_be_equal(open_model: Open) -> None:
    for key in ["attention.head_count", "attention.head_count_kv", "feed_forward_length"]:
        name = f"llama.{key}"
        assert read_config(open_model({name: numbers(I32, 4, 4)})) == read_config(
            open_model({name: integer(4)})
        )
        with pytest.raises(UnsupportedModelError, match=f"{name} differs between layers"):
            read_config(open_model({name: numbers(U32, 4, 2)}))
        with pytest.raises(GGUFError, match=f"{name} lists 3 values for 2 layers"):
            read_config(open_model({name: numbers(U32, 4, 4, 4)}))
        with pytest.raises(GGUFError, match=rf"{name} has type array\[float32\], expected an array of int"):
            read_config(open_model({name: numbers(F32, 4, 4)}))
        with pytest.raises(GGUFError, match=f"{name} is 0, must be between"):
            read_config(open_model({name: numbers(U32, 0, 0)}))


BAD, NOT = GGUFError, UnsupportedModelError
SCALING = "rope.scaling."
YARN = {SCALING + "type": string("yarn"), SCALING + "factor": number(2.0)}
ROUNDED = {"rope.freq_base": (F64, scalar(F64, 1 + 1e-12))}  # to 1 in 32 bits
WINDOW = {"attention.sliding_window": integer(8)}
LONG_ROPE = {SCALING + "type": string("longrope")}
# Architectures, keys that are changed or left out, without the architecture unless they have a prefix of
# their own, and the errors.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("llama", {"general.architecture": integer(1)}, BAD, "general.architecture has type uint32, expected st"),
    ("llama", {"block_count": integer(1000)}, BAD, "block_count is 1000, but the file has only 20 tensors"),
    (
        "llama", {"attention.head_count": integer(3), "attention.head_count_kv": integer(3)},
        BAD, "key_length is missing, and embedding_length 16 is not a multiple of attention.head_count 3",
    ),
    ("llama", {"attention.head_count_kv": integer(3)}, BAD, "4 is not a multiple of .*head_count_kv 3"),
    ("llama", {"attention.head_count_kv": integer(8)}, BAD, "4 is not a multiple of .*head_count_kv 8"),
    ("llama", {"rope.dimension_count": integer(3)}, BAD, "is 3, must be even and at most the head width 4"),
    ("llama", {"rope.dimension_count": integer(6)}, BAD, "is 6, must be even and at most the head width 4"),
    ("llama", {"attention.key_length": integer(2**30)}, BAD, "4 heads of 1073741824 dimensions are more"),
    ("llama", {"vocab_size": integer(11)}, BAD, "vocab_size is 11, but .*tokens lists 10 tokens"),
    ("llama", {"tokenizer.ggml.tokens": strings()}, BAD, "ggml.tokens lists 0 tokens"),
    ("llama", {"tokenizer.ggml.tokens": string("a")}, BAD, "tokens has type string, expected an array"),
    ("llama", {"general.architecture": string("mamba")}, NOT, "mamba is not .* are llama, llama-embed, qwen"),
    (
        "llama", {"general.architecture": string("gemma3n")},
        NOT, r"architecture gemma3n is not supported; it needs .*\(AltUp\).*\(LAuReL\), sparse activations",
    ),
    ("llama", {"general.type": string("adapter"), "block_count": None}, NOT, "is an adapter"),
    ("llama", {"expert_count": integer(8)}, NOT, "llama.expert_count = 8 is not supported"),
    ("llama", {"final_logit_softcapping": number(30.0)}, NOT, "final_logit_softcapping = 30.0"),
    ("llama", {"attn_logit_softcapping": number(50.0)}, NOT, "attn_logit_softcapping = 50.0"),
    ("llama", {"logit_scale": number(0.5)}, NOT, "llama.logit_scale = 0.5"),
    ("llama", {SCALING + "yarn_ext_factor": number(0.0)}, NOT, "yarn_ext_factor = 0.0"),
    ("llama", {SCALING + "alpha": number(1000.0)}, NOT, "rope.scaling.alpha = 1000.0"),
    ("llama", LONG_ROPE, NOT, "rope scaling of type longrope is not supported"),
    ("llama", {SCALING + "type": string("linear")}, BAD, "metadata llama.rope.scale_linear is missing"),
    ("llama", YARN, BAD, "scaling.original_context_length is missing"),
    (
        "llama", {**YARN, SCALING + "original_context_length": integer(32), **ROUNDED},
        BAD, r"freq_base is 1\.0, must be greater than 1 for YaRN",
    ),
    ("llama", {SCALING + "factor": number(0.0)}, BAD, "scaling.factor is 0.0, must be positive"),
    ("llama", {SCALING + "factor": number(math.nan)}, BAD, "scaling.factor is nan"),
    ("llama", {SCALING + "type": integer(1)}, BAD, "scaling.type has type uint32, expected string"),
    ("llama", {"attention.temperature_scale": number(0.1)}, BAD, "original_context_length is missing"),
    ("minicpm", {}, BAD, r"minicpm\.embedding_scale is missing"),
    ("granite", WINDOW, NOT, "granite.attention.sliding_window = 8 is not supported"),
    ("phi3", LONG_ROPE, BAD, r"tensor rope_factors_long\.weight is missing, which LongRoPE"),
    ("phi3", {**LONG_ROPE, SCALING + "factor": number(4.0)}, NOT, r"factor 4\.0 together with LongRoPE"),
    ("gemma3", {}, BAD, r"metadata gemma3\.attention\.sliding_window is missing"),
    ("gemma3", {**WINDOW, "rope.dimension_count_swa": integer(2)}, NOT, "_swa is 2; supported is 4"),
    ("gemma3", {**WINDOW, "attention.key_length_swa": integer(8)}, NOT, "key_length_swa is 8; .* is 4"),
    ("gemma3", {**WINDOW, "attention.value_length_swa": integer(8)}, NOT, "value_.*_swa is 8; .* is 4"),
    ("gemma3", {**WINDOW, "attention.causal": FALSE}, NOT, "attention.causal is false, which is not"),
    (
        "olmo2", {**WINDOW, SCALING + "attn_factor": number(0.5)},
        NOT, r"attn_factor is 0.5, which is not supported with",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "metadata", "error", "message"), REFUSED)
def test_contradictions_and_unsupported_features_are_named(
    open_model: Open, architecture: str, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    own = ("general.", "tokenizer.")
    stated = {key if key.startswith(own) else f"{architecture}.{key}": metadata[key] for key in metadata}
    with pytest.raises(error, match=message):
        read_config(open_model(stated, architecture=architecture))


def test_granite_without_scales_has_none(open_model: Open) -> None:
    plain = read_config(open_model(architecture="granite"))
    assert (plain.embedding_scale, plain.residual_scale, plain.logit_scale) == (1.0, 1.0, 1.0)


def test_a_scale_whose_square_overflows_float32_is_rejected(tmp_path: Path) -> None:
    model = replace(small_models.MODELS["granite"], scales=(("residual_scale", 1e-30),))
    with pytest.raises(GGUFError, match="scales of the embedding, of the residual stream"):
        Model(small_models.write(tmp_path / "m.gguf", model), device="cpu")


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemma_scales_attention_by_the_nominal_head(open_model: Open, name: str, layers: int) -> None:
    metadata = {f"{name}.attention.sliding_window": integer(8), f"{name}.attention.key_length": integer(32)}
    config = read_config(open_model(metadata, architecture=name, layers=layers))
    assert config.attention_scale == pytest.approx((DIM / HEADS) ** -0.5)


def test_blocks_of_gptneox_are_parallel_unless_the_file_states_otherwise(open_model: Open) -> None:
    metadata = {"gptneox.attention.layer_norm_epsilon": number(1e-5)}
    assert read_config(open_model(metadata, architecture="gptneox")).parallel
