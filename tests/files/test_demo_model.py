"""The demo model's file: its metadata, and the consistency of its parts."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from support.gguf_reader import GGUFReader
from support.places import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DATA = ROOT / "python" / "metal_prefill" / "data"
MODEL = DATA / "shakespeare-5m.Q4_0.gguf"
LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 5, 288, 9, 3, 32, 768, 1024


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(MODEL)


def value(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def tokenizer_of(reader: GGUFReader) -> Tokenizer:
    tokens = value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, byte_level = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_model_card_describes_this_file() -> None:
    card = (DATA / "MODEL_CARD.md").read_text()
    content = MODEL.read_bytes()
    assert hashlib.sha256(content).hexdigest() in card
    assert f"{len(content):,} bytes" in card


def test_file_is_about_three_megabytes() -> None:
    assert 2_500_000 < MODEL.stat().st_size < 3_500_000


def test_metadata_contains_the_whole_architecture(reader: GGUFReader) -> None:
    expected = {
        "general.architecture": "llama",
        "general.alignment": None,
        "llama.block_count": LAYERS,
        "llama.embedding_length": DIM,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 1024,
        "llama.vocab_size": VOCAB,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
    }
    stated = {key: value(reader, key) if key in reader.fields else None for key in expected}
    assert stated == expected


def test_every_tensor_has_the_shape_and_type_of_its_role(reader: GGUFReader) -> None:
    kv_dim = KV_HEADS * HEAD_DIM
    layer = {
        "attn_q": (DIM, DIM),
        "attn_k": (kv_dim, DIM),
        "attn_v": (kv_dim, DIM),
        "attn_output": (DIM, DIM),
        "ffn_gate": (FFN, DIM),
        "ffn_up": (FFN, DIM),
        "ffn_down": (DIM, FFN),
        "attn_norm": (DIM,),
        "ffn_norm": (DIM,),
    }
    shapes = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
    expected = {
        name: (shape, "F32" if len(shape) == 1 else "Q8_0" if name == "token_embd.weight" else "Q4_0")
        for name, shape in shapes.items()
    }
    found = {t.name: (tuple(int(n) for n in reversed(t.shape)), t.tensor_type.name) for t in reader.tensors}
    assert found == expected


def test_weights_are_trained(reader: GGUFReader) -> None:
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name
        assert values.std() > 0, tensor.name
        if tensor.tensor_type == GGMLQuantizationType.F32:  # a norm is initialized with ones
            assert np.abs(values - 1).max() > 0.01, tensor.name


def test_token_ids_are_unique_and_only_the_first_is_control(reader: GGUFReader) -> None:
    tokens, types = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(set(tokens)) == len(types) == VOCAB
    assert tokens[0] == "<|endoftext|>"
    assert types == [3] + [1] * (VOCAB - 1)  # 3 is CONTROL, 1 is NORMAL
    assert value(reader, "tokenizer.ggml.bos_token_id") == 0
    assert value(reader, "tokenizer.ggml.eos_token_id") == 0
    assert value(reader, "tokenizer.ggml.add_bos_token") is True


def test_every_merge_joins_two_tokens_to_a_token(reader: GGUFReader) -> None:
    tokens = value(reader, "tokenizer.ggml.tokens")
    merges = [merge.split(" ") for merge in value(reader, "tokenizer.ggml.merges")]
    known = set(pre_tokenizers.ByteLevel.alphabet())
    for left, right in merges:
        assert left in known
        assert right in known
        known.add(left + right)
    assert known == set(tokens[1:])


@pytest.mark.parametrize(
    "text",
    [
        "ROMEO:\nBut soft, what light through yonder window breaks?",
        "  two  spaces,\n\n\ttabs and 1599 digits\r\n",
        "ünïcödé, 漢字 and 🎭",
        "".join(map(chr, range(256))),
    ],
)
def test_text_round_trips(reader: GGUFReader, text: str) -> None:
    tokenizer = tokenizer_of(reader)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_shakespeare_takes_few_tokens(reader: GGUFReader) -> None:
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n"
    assert len(tokenizer_of(reader).encode(text).ids) < len(text) / 2
