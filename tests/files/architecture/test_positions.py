"""Rotation, its scaling, and windows of attention, as files and architectures define them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import small_models
from support.gguf_bytes import BOOL, U8, U32, integer, number, numbers, string
from support.llama_file import LAYERS, PLAIN, Open

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.files import GGUFFile, ModelConfig
from metal_prefill.files._hyperparameters import read_config

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
        SCALING + "yarn_attn_factor": number(3.0),  # without an effect in llama.cpp
        SCALING + "yarn_beta_fast": number(16.0),
        SCALING + "yarn_beta_slow": number(2.0),
        SCALING + "yarn_ext_factor": number(1.0),
    }
    expected = replace(expected, rope_attn_factor=0.5, rope_beta_fast=16.0, rope_beta_slow=2.0)
    assert read_config(open_model({**yarn, **tuned})) == expected


def test_a_log_multiplier_lessens_the_growth_of_yarn(open_model: Open) -> None:
    yarn = {"type": string("yarn"), "factor": number(8.0), "original_context_length": integer(32)}
    metadata = {SCALING + key: value for key, value in yarn.items()}
    for multiplier in (1.0, 0.5):
        stated = {**metadata, SCALING + "yarn_log_multiplier": number(multiplier)}
        expected = 1 / (1 + 0.1 * multiplier * math.log(8.0))
        assert read_config(open_model(stated)).rope_attn_factor == pytest.approx(expected)


def test_a_growth_of_scores_limits_the_context(open_model: Open) -> None:
    metadata = {"llama.attention.temperature_scale": number(0.1)}
    original = {SCALING + "original_context_length": integer(32)}
    assert read_config(open_model(metadata | original)) == replace(PLAIN, context_length=32)


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


def test_the_attention_factor_needs_no_type_of_scaling(open_model: Open) -> None:
    config = read_config(open_model({SCALING + "attn_factor": number(1.25)}))
    assert config == replace(PLAIN, rope_attn_factor=1.25)


def test_gemma3_may_specify_its_pattern(open_model: Open) -> None:
    metadata = {
        "gemma3.attention.sliding_window": integer(8),
        "gemma3.attention.sliding_window_pattern": integer(2),
        "gemma3.rope.freq_base_swa": number(5e3),
    }
    config = read_config(open_model(metadata, architecture="gemma3", layers=4))
    assert config.layer_window == (8, 0, 8, 0)
    assert config.layer_rope_base == (5e3, 1e4, 5e3, 1e4)


def test_gemma3_may_list_its_windows(open_model: Open) -> None:
    def config(kind: int, *values: int) -> ModelConfig:
        metadata = {
            "gemma3.attention.sliding_window": integer(8),
            "gemma3.attention.sliding_window_pattern": numbers(kind, *values),
        }
        return read_config(open_model(metadata, architecture="gemma3", layers=3))

    assert config(BOOL, 0, 1, 1).layer_window == (0, 8, 8)
    with pytest.raises(GGUFError, match="sliding_window_pattern lists 2 values for 3 layers"):
        config(BOOL, 0, 1)
    with pytest.raises(GGUFError, match=r"has type array\[uint8\], expected array\[bool\]"):
        config(U8, 0, 1, 1)


@pytest.mark.parametrize("stated", [True, False])
def test_granite_rotates_unless_its_file_states_otherwise(open_model: Open, stated: bool) -> None:
    metadata = {"granite.rope.scaling.finetuned": (BOOL, bytes([stated]))}
    config = read_config(open_model(metadata, architecture="granite"))
    assert config.layer_uses_rope == (() if stated else (False,) * LAYERS)


def test_layers_with_a_window_may_state_the_heads_of_the_others(open_model: Open) -> None:
    same = {"rope.dimension_count_swa": 4, "attention.key_length_swa": 4, "attention.sliding_window": 8}
    metadata = {f"gemma3.{key}": integer(value) for key, value in same.items()}
    assert read_config(open_model(metadata, architecture="gemma3")).layer_window == (8, 8)


def test_layers_of_gemma4_differ_and_share(open_model: Open) -> None:
    metadata = {
        "gemma4.attention.sliding_window": integer(8),
        "gemma4.attention.sliding_window_pattern": numbers(BOOL, 1, 0, 1, 1, 0),
        "gemma4.attention.key_length": integer(8),
        "gemma4.attention.value_length": integer(8),
        "gemma4.attention.key_length_swa": integer(4),
        "gemma4.attention.value_length_swa": integer(4),
        "gemma4.attention.head_count_kv": numbers(U32, 2, 1, 2, 2, 1),
        "gemma4.attention.shared_kv_layers": integer(2),
        "gemma4.embedding_length_per_layer_input": integer(16),
        "gemma4.feed_forward_length": numbers(U32, 8, 8, 8, 16, 16),
        "gemma4.rope.dimension_count": integer(8),
        "gemma4.rope.dimension_count_swa": integer(4),
        "gemma4.rope.freq_base": number(1e6),
    }

    def read(**changes: Any) -> ModelConfig:
        stated = {f"gemma4.{key.replace('__', '.')}": value for key, value in changes.items()}
        return read_config(open_model({**metadata, **stated}, architecture="gemma4", layers=5))

    config = read()
    assert (config.key_dim, config.value_dim, config.n_kv_heads, config.ffn_dim) == (8, 8, 2, 16)
    assert config.layer_head_dim == (4, 8, 4, 4, 8)
    assert config.layer_rope_dim == (4, 8, 4, 4, 8)
    assert config.layer_rope_freqs == (False, True, False, False, True)
    assert config.layer_rope_base == (1e4, 1e6, 1e4, 1e4, 1e6)
    assert config.layer_kv_heads == (2, 1, 2, 2, 1)
    assert config.layer_ffn_dim == (8, 8, 8, 16, 16)
    assert config.layer_cache == (0, 1, 2, 2, 1)
    assert (config.per_layer_dim, config.value_norm, config.attention_scale) == (16, True, 1.0)
    assert read(embedding_length_per_layer_input=integer(0)).per_layer_dim == 0
    assert read(attention__shared_kv_layers=integer(0)).layer_cache == ()
    with pytest.raises(GGUFError, match="shared_kv_layers is 4, but layer 1 has no earlier layer"):
        read(attention__shared_kv_layers=integer(4))
    with pytest.raises(GGUFError, match="shared_kv_layers is 5, must be between 0 and 4"):
        read(attention__shared_kv_layers=integer(5))
    with pytest.raises(UnsupportedModelError, match="key_length_swa is 16; supported are up to 8"):
        read(attention__key_length_swa=integer(16))
    with pytest.raises(UnsupportedModelError, match="value_length_swa is 2; supported is 4"):
        read(attention__value_length_swa=integer(2))
    with pytest.raises(UnsupportedModelError, match=r"attention\.value_length is 4; supported is 8"):
        read(attention__value_length=integer(4))
    with pytest.raises(GGUFError, match=r"rope\.dimension_count_swa is 3, must be even"):
        read(rope__dimension_count_swa=integer(3))
    with pytest.raises(
        GGUFError, match=r"head_count 4 is not a multiple of gemma4\.attention\.head_count_kv 3"
    ):
        read(attention__head_count_kv=numbers(U32, 3, 1, 3, 3, 1))
    with pytest.raises(GGUFError, match="feed_forward_length lists 4 values for 5 layers"):
        read(feed_forward_length=numbers(U32, 8, 8, 8, 16))
    with pytest.raises(UnsupportedModelError, match=r"gemma4\.expert_count = 8 is not supported"):
        read(expert_count=integer(8))
    large = integer(2**30)
    with pytest.raises(GGUFError, match="embedding_length_per_layer_input is 1073741824, must be between"):
        read(embedding_length_per_layer_input=large)
