"""A tiny valid model file in which tests can replace or omit every entry."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from metal_prefill.files import GGUFFile, ModelConfig
from support.files.gguf_bytes import entry, gguf, integer, number, string, strings, tensor

LAYERS, DIM, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 2, 16, 4, 2, 24, 10, 64
HEAD = DIM // HEADS

Open = Callable[..., GGUFFile]  # writes a file with changes, and opens it

# A change of an entry: value type and bytes, or None to omit it.
Metadata = Mapping[str, tuple[int, bytes] | None]
# Shape in NumPy order and number of the tensor type, or None to omit it.
Tensors = Mapping[str, tuple[Sequence[int], int] | None]


def plain_config() -> ModelConfig:
    """Return the configuration of a file without changes."""
    return ModelConfig(
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


def base_tensors(layers: int = LAYERS) -> dict[str, tuple[Sequence[int], int] | None]:
    tensors: dict[str, tuple[Sequence[int], int] | None] = {
        "token_embd.weight": ((VOCAB, DIM), 0),
        "output_norm.weight": ((DIM,), 0),
    }
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ((DIM,), 0),
            f"blk.{layer}.attn_q.weight": ((DIM, DIM), 0),
            f"blk.{layer}.attn_k.weight": ((KV_HEADS * HEAD, DIM), 0),
            f"blk.{layer}.attn_v.weight": ((KV_HEADS * HEAD, DIM), 0),
            f"blk.{layer}.attn_output.weight": ((DIM, DIM), 0),
            f"blk.{layer}.ffn_norm.weight": ((DIM,), 0),
            f"blk.{layer}.ffn_gate.weight": ((FFN, DIM), 0),
            f"blk.{layer}.ffn_up.weight": ((FFN, DIM), 0),
            f"blk.{layer}.ffn_down.weight": ((DIM, FFN), 0),
        }
    return tensors


def model_file(
    metadata: Metadata | None = None,
    tensors: Tensors | None = None,
    architecture: str = "llama",
    layers: int = LAYERS,
) -> bytes:
    """Make the file with the given entries replaced or added."""
    entries = {
        "general.architecture": string(architecture),
        f"{architecture}.context_length": integer(CONTEXT),
        f"{architecture}.embedding_length": integer(DIM),
        f"{architecture}.block_count": integer(layers),
        f"{architecture}.feed_forward_length": integer(FFN),
        f"{architecture}.attention.head_count": integer(HEADS),
        f"{architecture}.attention.head_count_kv": integer(KV_HEADS),
        f"{architecture}.attention.layer_norm_rms_epsilon": number(1e-5),
        "tokenizer.ggml.tokens": strings(*(f"t{i}" for i in range(VOCAB))),
        **(metadata or {}),
    }
    listed, offset = [], 0
    for name, spec in {**base_tensors(layers), **(tensors or {})}.items():
        if spec is None:
            continue
        shape, kind = spec
        listed.append(tensor(name, list(reversed(shape)), kind, offset))
        offset += -(-math.prod(shape) * 8 // 32) * 32  # room for the largest type: eight bytes per value
    kept = [entry(key, *content) for key, content in entries.items() if content is not None]
    return gguf(kept, listed, bytes(offset))
