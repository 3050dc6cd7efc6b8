"""Heads, rotation and windows of attention, as files and architectures define them."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files.gguf_bytes import (
    BOOL,
    F64,
    FALSE,
    I32,
    I64,
    TRUE,
    U8,
    U16,
    U32,
    U64,
    integer,
    number,
    numbers,
    scalar,
    string,
)
from support.files.llama_file import HEADS, LAYERS, VOCAB, Open

from metal_prefill import GGUFError, UnsupportedModelError
from metal_prefill.files import GGUFFile, ModelConfig
from metal_prefill.files._hyperparameters import read_config

BAD, NOT = GGUFError, UnsupportedModelError
SCALING = "rope.scaling."
YARN = {
    SCALING + "type": string("yarn"),
    SCALING + "factor": number(8.0),
    SCALING + "original_context_length": integer(32),
}
YARN_CONFIG = {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_context": 32}
LINEAR = {"rope_scaling": "linear", "rope_factor": 4.0}
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
EIGHT = {WINDOW: integer(8)}
HEAD: dict[str, Any] = {
    "attention.key_length": integer(12),
    "attention.value_length": integer(20),
    "attention.scale": number(0.25),
    "rope.dimension_count": integer(6),
    "rope.freq_base": number(5e5),
}
WIDE = {"key_dim": 12, "value_dim": 20, "attention_scale": 0.25, "rope_dim": 6, "rope_base": 5e5}
# Architectures, keys of a file, which are left out or replaced, and fields that differ from those of a file
# without changes.
READ: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {**HEAD, "vocab_size": integer(VOCAB)}, WIDE),
    ("llama", {"attention.head_count_kv": None}, {"n_kv_heads": HEADS}),
    *(("llama", {"block_count": (n, scalar(n, LAYERS))}, {}) for n in (U8, U16, U32, I32, U64, I64)),
    # Neutral values of unsupported features.
    ("llama", {"expert_count": integer(0), "logit_scale": number(1.0), "attention.causal": TRUE}, {}),
    ("llama", {"attention.causal": FALSE}, {"causal": False}),
    ("llama", {SCALING + "type": string("linear"), SCALING + "factor": number(4.0)}, LINEAR),
    ("llama", {SCALING + "factor": number(4.0)}, LINEAR),
    ("llama", {"rope.scale_linear": number(4.0)}, LINEAR),
    ("llama", {SCALING + "type": string("none"), SCALING + "factor": number(4.0)}, {}),
    ("llama", YARN, YARN_CONFIG),
    (
        "llama",
        {
            **YARN,
            SCALING + "attn_factor": number(0.5),
            SCALING + "yarn_attn_factor": number(3.0),  # without an effect in llama.cpp
            SCALING + "yarn_beta_fast": number(16.0),
            SCALING + "yarn_beta_slow": number(2.0),
            SCALING + "yarn_ext_factor": number(1.0),
        },
        {**YARN_CONFIG, "rope_attn_factor": 0.5, "rope_beta_fast": 16.0, "rope_beta_slow": 2.0},
    ),
    *(
        (
            "llama",
            {**YARN, SCALING + "yarn_log_multiplier": number(n)},
            {**YARN_CONFIG, "rope_attn_factor": pytest.approx(1 / (1 + 0.1 * n * math.log(8.0)))},
        )
        for n in (1.0, 0.5)
    ),
    # Scores grow after the original context, which therefore limits the context.
    (
        "llama",
        {"attention.temperature_scale": number(0.1), SCALING + "original_context_length": integer(32)},
        {"context_length": 32},
    ),
    ("llama", {SCALING + "attn_factor": number(1.25)}, {"rope_attn_factor": 1.25}),
    # The engines use numbers of 32 bits.
    ("llama", {"rope.freq_base": (F64, scalar(F64, 123.4))}, {"rope_base": float(np.float32(123.4))}),
    ("llama", {WINDOW: integer(64)}, {"layer_window": (64,) * LAYERS}),
    ("llama", {WINDOW: integer(64), PATTERN: numbers(BOOL, 1, 0)}, {"layer_window": (64, 0)}),
    ("phi3", EIGHT, {"layer_window": (8,) * LAYERS}),
    ("phi3", {WINDOW: integer(0)}, {}),
    ("granite", {SCALING + "finetuned": TRUE}, {}),
    ("granite", {SCALING + "finetuned": FALSE}, {"layer_uses_rope": (False,) * LAYERS}),
]


@pytest.mark.parametrize(("architecture", "metadata", "fields"), READ)
def test_keys_change_only_their_fields(
    open_model: Open, architecture: str, metadata: dict[str, Any], fields: dict[str, Any]
) -> None:
    plain = read_config(open_model(architecture=architecture))
    stated = {f"{architecture}.{key}": value for key, value in metadata.items()}
    found = read_config(open_model(stated, architecture=architecture))
    assert found.as_dict() == {**plain.as_dict(), **fields}


@pytest.fixture
def long_rope(model_path: Callable[[str], Path]) -> Iterator[GGUFFile]:
    """Model with factors for long and for short contexts: 64 positions, extended to 1,024."""
    with GGUFFile(model_path("phi3, long rope")) as gguf:
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


def gemma3(open_model: Open, changes: dict[str, Any], layers: int = 3) -> ModelConfig:
    stated = {f"gemma3.{key}": value for key, value in {**EIGHT, **changes}.items()}
    return read_config(open_model(stated, architecture="gemma3", layers=layers))


def test_gemma3_states_its_windows_in_several_ways(open_model: Open) -> None:
    config = gemma3(open_model, {PATTERN: integer(2), "rope.freq_base_swa": number(5e3)}, 4)
    assert config.layer_window == (8, 0, 8, 0)
    assert config.layer_rope_base == (5e3, 1e4, 5e3, 1e4)
    assert gemma3(open_model, {PATTERN: numbers(BOOL, 0, 1, 1)}).layer_window == (0, 8, 8)
    # Layers with a window may state the heads of the others.
    same = {"rope.dimension_count_swa": integer(4), "attention.key_length_swa": integer(4)}
    assert gemma3(open_model, same, 2).layer_window == (8, 8)
    with pytest.raises(GGUFError, match="sliding_window_pattern lists 2 values for 3 layers"):
        gemma3(open_model, {PATTERN: numbers(BOOL, 0, 1)})
    with pytest.raises(GGUFError, match=r"has type array\[uint8\], expected array\[bool\]"):
        gemma3(open_model, {PATTERN: numbers(U8, 0, 1, 1)})


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
    for key, value, error, message in (
        ("attention__shared_kv_layers", integer(4), BAD, "is 4, but layer 1 has no earlier layer"),
        ("attention__shared_kv_layers", integer(5), BAD, "is 5, must be between 0 and 4"),
        ("attention__key_length_swa", integer(16), NOT, "key_length_swa is 16; supported are up to 8"),
        ("attention__value_length_swa", integer(2), NOT, "value_length_swa is 2; supported is 4"),
        ("attention__value_length", integer(4), NOT, r"attention\.value_length is 4; supported is 8"),
        ("rope__dimension_count_swa", integer(3), BAD, r"rope\.dimension_count_swa is 3, must be even"),
        ("attention__head_count_kv", numbers(U32, 3, 1, 3, 3, 1), BAD, "4 is not a multiple of .*kv 3"),
        ("feed_forward_length", numbers(U32, 8, 8, 8, 16), BAD, "lists 4 values for 5 layers"),
        ("expert_count", integer(8), NOT, r"gemma4\.expert_count = 8 is not supported"),
        ("embedding_length_per_layer_input", integer(2**30), BAD, "is 1073741824, must be between"),
    ):
        with pytest.raises(error, match=message):
            read(**{key: value})
