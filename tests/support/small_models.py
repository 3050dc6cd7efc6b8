"""Small synthetic models that between them have every tensor type, shape and feature of the format.

Weights are random, scaled so that attention looks back and activations keep their size. `MODELS` is the
catalogue; `write` makes the file of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from metal_prefill._synth_blocks import random_norm, random_tensor
from metal_prefill._synth_tokenizer import VOCABULARIES

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

# What stands in place of a type for tensors that are not random around 0. All are F32: norms, around 1; the
# last norm, around 1 and -1, so that a token with a tied embedding does not simply predict itself; and
# frequency factors.
NORM, OUTPUT_NORM, FACTORS = "norm", "output norm", "factors"


@dataclass(frozen=True)
class SmallModel:
    """What `write` needs to know of a model.

    Attributes
    ----------
    output
        Tensor type of a separate output projection; None ties it to the embedding.
    types
        Patterns of tensor names, and the type of what they match; the last match counts.
    value_dim
        None stands for `key_dim`.
    rope_scaling
        "none", "linear", "yarn", or "freqs" for a tensor that divides the frequencies, as Llama 3 has.
    qkv_bias
        Biases of q, k and v where the architecture leaves it open.
    """

    architecture: str = "llama"
    layers: int = 2
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int | None = None
    ffn: int = 96
    vocab: int = 320
    context: int = 1024
    embedding: str = "Q8_0"
    output: str | None = None
    types: Mapping[str, str] = field(default_factory=lambda: {"*": "Q4_0"})
    tokenizer: str = "gpt2"
    rope_dim: int | None = None
    rope_base: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 4.0
    original_context: int = 256
    window: int | None = None
    qkv_bias: bool = False
    norm_eps: float = 1e-5
    seed: int = 1

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.key_dim if self.value_dim is None else self.value_dim


def _of_type(kind: str) -> SmallModel:
    """Make every matrix of one type, the embedding and the output included; 256 fits all blocks."""
    return SmallModel(
        layers=1,
        dim=256,
        heads=4,
        kv_heads=2,
        key_dim=64,
        ffn=256,
        embedding=kind,
        output=kind,
        types={"*": kind},
    )


MODELS: dict[str, SmallModel] = {
    **{f"type {kind}": _of_type(kind) for kind in TYPES},
    **{f"tied {kind}": SmallModel(layers=1, dim=256, key_dim=64, ffn=256, embedding=kind) for kind in TYPES},
    "mixed types": SmallModel(
        dim=256,
        key_dim=64,
        ffn=512,
        embedding="Q6_K",
        types={
            "*": "Q4_K",
            "*.attn_v.*": "Q6_K",
            "*.attn_k.*": "Q5_0",
            "*.ffn_down.*": "Q8_0",
            "blk.1.*": "Q4_1",
        },
    ),
    "16-bit floats": SmallModel(types={"*": "F16", "*.ffn_down.*": "BF16"}),
    "dimensions that fit no block": SmallModel(
        dim=50, heads=6, kv_heads=2, key_dim=10, value_dim=14, ffn=70, embedding="F16", types={"*": "F32"}
    ),
    "gqa 1": SmallModel(heads=3, kv_heads=3, dim=96),
    "gqa 3": SmallModel(heads=9, kv_heads=3, dim=288),
    "gqa 8": SmallModel(heads=8, kv_heads=1, dim=256),
    **{f"head_dim {n}": SmallModel(heads=4, dim=4 * n, key_dim=n) for n in (32, 64, 80, 128)},
    "head_dim 16": SmallModel(heads=4, dim=64, key_dim=16),
    "narrower than its heads": SmallModel(heads=4, dim=96, key_dim=64),
    "values wider than keys": SmallModel(key_dim=32, value_dim=64),
    "values narrower than keys": SmallModel(key_dim=64, value_dim=32),
    "separate output": SmallModel(output="Q6_K", dim=256, key_dim=64),
    "vocabulary of 301": SmallModel(vocab=301),
    "vocabulary of 1021, separate": SmallModel(vocab=1021, output="Q8_0"),
    "sentencepiece": SmallModel(tokenizer="llama", vocab=400),
    "rope base": SmallModel(rope_base=500000.0),
    "rope of half the head": SmallModel(rope_dim=16),
    "linear rope scaling": SmallModel(rope_scaling="linear"),
    "yarn rope scaling": SmallModel(rope_scaling="yarn"),
    "rope frequency factors": SmallModel(rope_scaling="freqs", rope_base=500000.0),
    "large norm epsilon": SmallModel(norm_eps=0.1),
    "biases": SmallModel(qkv_bias=True),
    "long context": SmallModel(layers=1, context=4096),
    "smollm shape": SmallModel(dim=576, heads=9, kv_heads=3, key_dim=64, ffn=1536, vocab=512),
    "wide feed-forward": SmallModel(dim=64, ffn=2048),
    "qwen2": SmallModel(architecture="qwen2", dim=128, qkv_bias=True),
    "qwen3": SmallModel(architecture="qwen3", key_dim=64),
    "smollm3": SmallModel(architecture="smollm3", layers=5),
    "gemma3": SmallModel(architecture="gemma3", layers=7, rope_base=1e6, window=16, key_dim=64),
    "gemma3, scaled": SmallModel(architecture="gemma3", layers=7, window=16, rope_scaling="linear"),
}


def write(path: str | Path, model: SmallModel) -> Path:
    """Write the file of a model; the same model gives the same file."""
    writer = GGUFWriter(path, model.architecture)
    _add_metadata(writer, model)
    rng = np.random.default_rng(model.seed)
    for name, shape, kind, std in _tensors(model):
        raw_dtype = GGMLQuantizationType[kind if kind in TYPES else "F32"]
        writer.add_tensor(name, _data(rng, shape, kind, std), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_metadata(writer: GGUFWriter, model: SmallModel) -> None:
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.dim)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_vocab_size(model.vocab)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_rope_dimension_count(model.rope_dim or model.key_dim)
    if model.v_dim != model.key_dim or model.key_dim * model.heads != model.dim:
        writer.add_key_length(model.key_dim)
        writer.add_value_length(model.v_dim)
    if model.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(model.rope_scaling))
        writer.add_rope_scaling_factor(model.rope_factor)
    if model.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(model.original_context)
    if model.window is not None:
        writer.add_sliding_window(model.window)
    vocabulary = VOCABULARIES[model.tokenizer](model.vocab)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre("smollm" if vocabulary.merges else "default")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)


def _tensors(model: SmallModel) -> Iterator[tuple[str, tuple[int, ...], str, float]]:
    """Name, shape, type and standard deviation of every tensor.

    A projection turns an input of size 1 into an output of size 1. Scores of attention then have a deviation
    of 2, so that it looks at some positions more than at others, and what the layers add to the residual
    stream is as large as the embedding.
    """
    q_dim, k_dim, v_dim = (
        model.heads * model.key_dim,
        model.kv_heads * model.key_dim,
        model.kv_heads * model.v_dim,
    )
    yield "token_embd.weight", (model.vocab, model.dim), model.embedding, 3 * model.dim**-0.5
    yield "output_norm.weight", (model.dim,), OUTPUT_NORM, 0
    if model.output:
        yield "output.weight", (model.vocab, model.dim), model.output, 3 * model.dim**-0.5
    if model.rope_scaling == "freqs":
        yield "rope_freqs.weight", ((model.rope_dim or model.key_dim) // 2,), FACTORS, 0
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        residual = 2 * model.dim**-0.5 * model.layers**-0.5
        matrices = {
            "attn_q": ((q_dim, model.dim), 1.4 * model.dim**-0.5),
            "attn_k": ((k_dim, model.dim), 1.4 * model.dim**-0.5),
            "attn_v": ((v_dim, model.dim), model.dim**-0.5),
            "attn_output": (
                (model.dim, model.heads * model.v_dim),
                (model.heads * model.v_dim) ** -0.5 * residual,
            ),
            "ffn_gate": ((model.ffn, model.dim), model.dim**-0.5),
            "ffn_up": ((model.ffn, model.dim), model.dim**-0.5),
            "ffn_down": ((model.dim, model.ffn), model.ffn**-0.5 * residual),
        }
        for name, (shape, std) in matrices.items():
            kind = [
                t for pattern, t in model.types.items() if fnmatchcase(f"{prefix}{name}.weight", pattern)
            ][-1]
            yield f"{prefix}{name}.weight", shape, kind, std
        norms = {"attn_norm": model.dim, "ffn_norm": model.dim}
        if model.architecture in ("qwen3", "gemma3"):
            norms |= {"attn_q_norm": model.key_dim, "attn_k_norm": model.key_dim}
        if model.architecture == "gemma3":
            norms |= {"post_attention_norm": model.dim, "post_ffw_norm": model.dim}
        for name, width in norms.items():
            yield f"{prefix}{name}.weight", (width,), NORM, 0
        if model.qkv_bias:
            for name, width in (("attn_q", q_dim), ("attn_k", k_dim), ("attn_v", v_dim)):
                yield f"{prefix}{name}.bias", (width,), "F32", 0.5


def _data(rng: np.random.Generator, shape: tuple[int, ...], kind: str, std: float) -> npt.NDArray[np.uint8]:
    """Bytes of a tensor, ``[rows, bytes of a row]`` or ``[bytes]``."""
    if kind in (NORM, OUTPUT_NORM):
        return random_norm(rng, shape[0], signed=kind == OUTPUT_NORM)
    if kind == FACTORS:  # as Llama 3's: fast pairs keep their frequency, slow ones are divided
        return np.geomspace(1.0, 8.0, shape[0], dtype=np.float32).view(np.uint8)
    data = random_tensor(rng, kind, math.prod(shape), std)
    return data.reshape(shape[0], -1) if len(shape) == 2 else data
