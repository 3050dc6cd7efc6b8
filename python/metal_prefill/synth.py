"""Write Llama models of any shape and tensor type, with random weights, as GGUF files.

They are for benchmarks, whose speed depends on the shape and not on the words, and for tests. A file is valid
throughout: it has a working tokenizer, and its weights are scaled so that activations keep their size through
all layers, attention looks back, and the logits tell tokens apart.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType
from numpy.typing import NDArray

from metal_prefill._replacing import check_target, replacing
from metal_prefill._synth_blocks import TENSOR_TYPES, block_weights, random_norm, random_tensor, tensor_bytes
from metal_prefill._synth_tokenizer import VOCABULARIES, Vocabulary

Progress = Callable[[int, int], None]  # called with the bytes of weights written so far, and their total

TIED = "tied"  # the output type that means: no output tensor, the embedding serves as the head


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model but its weights' values and types.

    Attributes
    ----------
    layers, dim, heads, kv_heads, head_dim, ffn, vocab, context
        Dimensions. `dim` is the width of the residual stream; heads * head_dim may differ from it.
    output_type
        Tensor type of a separate output head, or "tied".
    tokenizer
        "gpt2" (byte-level BPE) or "llama" (SentencePiece).
    rope_base
        Base of RoPE's frequencies.
    rope_dims
        Leading dimensions of a head that RoPE rotates; None for all, and llama.cpp takes nothing else.
    rope_scaling
        "none", "linear", or "llama3": the frequency factors of Llama 3 as a tensor `rope_freqs`.
    rope_factor
        How many times the context was extended by that scaling.
    norm_eps
        Added to the mean square in RMSNorm.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    output_type: str = TIED
    tokenizer: str = "gpt2"
    rope_base: float = 10000.0
    rope_dims: int | None = None
    rope_scaling: str = "none"
    rope_factor: float = 8.0
    norm_eps: float = 1e-5


PRESETS: Mapping[str, ModelShape] = {
    "smollm-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152, 2048),
    "smollm-360m": ModelShape(32, 960, 15, 5, 64, 2560, 49152, 2048),
    "tinyllama-1.1b": ModelShape(
        22, 2048, 32, 4, 64, 5632, 32000, 2048, output_type="Q6_K", tokenizer="llama"
    ),
    "tiny": ModelShape(2, 64, 4, 2, 32, 128, 512, 256),
}

_FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S"}  # the rest: MOSTLY_<type>


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # rows, then row length
    kind: str
    std: float | None = None  # of a matrix; None for a norm

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        return tensor_bytes(self.kind, self.count)


def _check(shape: ModelShape) -> None:
    whole = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")
    for name in whole:
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} {getattr(shape, name)}: must be at least 1")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads {shape.heads}: must be a multiple of kv_heads {shape.kv_heads}")
    rope_dims = shape.head_dim if shape.rope_dims is None else shape.rope_dims
    if rope_dims % 2 or not 0 < rope_dims <= shape.head_dim:
        raise ValueError(f"rope_dims {rope_dims}: must be even, and in 2..head_dim {shape.head_dim}")
    if shape.rope_scaling not in ("none", "linear", "llama3"):
        raise ValueError(f"rope_scaling {shape.rope_scaling!r}: must be none, linear or llama3")
    for name in ("rope_base", "rope_factor", "norm_eps"):
        if not (math.isfinite(getattr(shape, name)) and getattr(shape, name) > 0):
            raise ValueError(f"{name} {getattr(shape, name)}: must be finite and above 0")
    if shape.tokenizer not in VOCABULARIES:
        raise ValueError(f"tokenizer {shape.tokenizer!r}: must be one of {', '.join(VOCABULARIES)}")


def _tensors(shape: ModelShape, tensor_type: str, embedding_type: str) -> Iterator[_Tensor]:
    """Every random tensor, in the order of the file.

    A projection of an input of size 1 has outputs of size 1. Queries and keys are 1.5 times that: scores then
    have a deviation of about 2, and attention picks some positions. All additions to the residual stream
    together are 1.5 times the embedding, so the context counts, yet rounding errors do not grow from layer to
    layer as they do where the embedding is drowned. Logits have a deviation of about 3.
    """
    dim, att_dim, kv_dim = shape.dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    unit, embedding = dim**-0.5, 3 * dim**-0.5
    residual = 1.5 * embedding * (2 * shape.layers) ** -0.5
    yield _Tensor("token_embd.weight", (shape.vocab, dim), embedding_type, embedding)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        yield _Tensor(prefix + "attn_norm.weight", (dim,), "F32")
        yield _Tensor(prefix + "attn_q.weight", (att_dim, dim), tensor_type, 1.5 * unit)
        yield _Tensor(prefix + "attn_k.weight", (kv_dim, dim), tensor_type, 1.5 * unit)
        yield _Tensor(prefix + "attn_v.weight", (kv_dim, dim), tensor_type, unit)
        yield _Tensor(prefix + "attn_output.weight", (dim, att_dim), tensor_type, att_dim**-0.5 * residual)
        yield _Tensor(prefix + "ffn_norm.weight", (dim,), "F32")
        yield _Tensor(prefix + "ffn_gate.weight", (shape.ffn, dim), tensor_type, unit)
        yield _Tensor(prefix + "ffn_up.weight", (shape.ffn, dim), tensor_type, unit)
        yield _Tensor(prefix + "ffn_down.weight", (dim, shape.ffn), tensor_type, shape.ffn**-0.5 * residual)
    yield _Tensor("output_norm.weight", (dim,), "F32")
    if shape.output_type != TIED:
        yield _Tensor("output.weight", (shape.vocab, dim), shape.output_type, embedding)


def _with_types(tensor: _Tensor, overrides: Mapping[str, str]) -> _Tensor:
    """Apply the overrides to a matrix and check that its type is known and fits its rows."""
    if tensor.std is None:
        return tensor
    for pattern, kind in overrides.items():
        if fnmatchcase(tensor.name, pattern):
            tensor = replace(tensor, kind=kind)
    if tensor.kind not in TENSOR_TYPES:
        raise ValueError(
            f"{tensor.name}: unknown tensor type {tensor.kind!r}; known are {', '.join(TENSOR_TYPES)}"
        )
    block = block_weights(tensor.kind)
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{tensor.name}: rows of {tensor.shape[-1]} weights cannot be {tensor.kind}, "
            f"whose blocks hold {block}"
        )
    return tensor


def llama3_rope_factors(
    rope_dims: int, base: float, factor: float, original_context: int
) -> NDArray[np.float32]:
    """Divisors of RoPE's frequencies that extend the context as Llama 3.1 does.

    Wavelengths up to a quarter of the original context stay, those beyond the whole of it are stretched by
    `factor`, and those between go smoothly from one to the other.

    Returns
    -------
    float32 [rope_dims / 2]
    """
    low_freq_factor, high_freq_factor = 1.0, 4.0  # the published values of every Llama 3.1 and 3.2
    wavelength = 2 * math.pi * np.float64(base) ** (np.arange(0, rope_dims, 2) / rope_dims)
    turns = original_context / wavelength
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _add_metadata(writer: GGUFWriter, name: str, shape: ModelShape, tensor_type: str) -> None:
    writer.add_name(name)
    writer.add_file_type(LlamaFileType[_FILE_TYPES.get(tensor_type, f"MOSTLY_{tensor_type}")])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    if shape.head_dim * shape.heads != shape.dim:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.rope_dims or shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.rope_scaling == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope_factor)


def _add_tokenizer(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
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
    writer.add_add_bos_token(vocabulary.model == "llama")
    writer.add_add_space_prefix(vocabulary.model == "llama")


def _write_weights(
    writer: GGUFWriter, tensors: Sequence[_Tensor], seed: int, progress: Progress | None
) -> None:
    total, done = sum(tensor.size for tensor in tensors), 0
    streams = np.random.SeedSequence(seed).spawn(len(tensors))
    for tensor, stream in zip(tensors, streams, strict=True):
        rng = np.random.Generator(np.random.SFC64(stream))
        if tensor.std is None:
            data = random_norm(rng, tensor.count, signed=tensor.name == "output_norm.weight")
        else:
            data = random_tensor(rng, tensor.kind, tensor.count, tensor.std)
        writer.write_tensor_data(data)
        done += tensor.size
        if progress:
            progress(done, total)


def synthesize(
    path: str | os.PathLike[str],
    *,
    preset: str = "smollm-135m",
    layers: int | None = None,
    dim: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn: int | None = None,
    vocab: int | None = None,
    context: int | None = None,
    tensor_type: str = "Q4_0",
    embedding_type: str = "Q8_0",
    output_type: str | None = None,
    overrides: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
    rope_base: float | None = None,
    rope_dims: int | None = None,
    rope_scaling: str | None = None,
    rope_factor: float | None = None,
    norm_eps: float | None = None,
    architecture: str = "llama",
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Write a model with random weights.

    The same arguments give the same file. It is written under another name and renamed when it is complete,
    so an interrupted call leaves no half of a model.

    Parameters
    ----------
    path
        File to write; an existing one is replaced.
    preset
        A name in `PRESETS`, the shape to start from.
    layers, dim, heads, kv_heads, head_dim, ffn, vocab, context
        Instead of the preset's; see `ModelShape`. Where `dim` or `heads` is given and `head_dim` is not,
        `head_dim` becomes dim / heads.
    tensor_type
        Type of the matrices in the layers, one of `TENSOR_TYPES`. Norms are F32.
    embedding_type
        Type of the token embedding, which is also the output head where that is tied.
    output_type
        Type of a separate output head, or "tied" for none.
    overrides
        Types for single matrices, as ``{"blk.*.ffn_down.weight": "Q6_K"}``; the last pattern that matches
        counts.
    tokenizer, rope_base, rope_dims, rope_scaling, rope_factor, norm_eps
        Instead of the preset's; see `ModelShape`.
    architecture
        What the file calls its architecture, for tests of those that are refused.
    seed
        Decides all weights.
    progress
        Called after each tensor with the bytes of weights written so far and their total.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the shape contradicts itself or a type does not fit it; names the field or the tensor. Nothing is
        written.
    OSError
        If the file cannot be written.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
    changes = {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": ffn,
        "vocab": vocab,
        "context": context,
        "output_type": output_type,
        "tokenizer": tokenizer,
        "rope_base": rope_base,
        "rope_dims": rope_dims,
        "rope_scaling": rope_scaling,
        "rope_factor": rope_factor,
        "norm_eps": norm_eps,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    shape = replace(PRESETS[preset], **given)  # type: ignore[arg-type]  # each has its field's type
    if head_dim is None and (dim is not None or heads is not None):
        if shape.heads < 1 or shape.dim % shape.heads:
            raise ValueError(
                f"dim {shape.dim}: not a multiple of heads {shape.heads}, so head_dim must be given"
            )
        shape = replace(shape, head_dim=shape.dim // shape.heads)
    _check(shape)
    if seed < 0:
        raise ValueError(f"seed {seed}: must not be negative")
    tensors = [
        _with_types(tensor, overrides or {}) for tensor in _tensors(shape, tensor_type, embedding_type)
    ]
    vocabulary = VOCABULARIES[shape.tokenizer](shape.vocab)

    check_target(path)  # before the work
    writer = GGUFWriter(None, architecture)
    _add_metadata(writer, f"Synthetic {preset}", shape, tensor_type)
    _add_tokenizer(writer, vocabulary)
    # The factors stand first: they are few, and the random tensors can then be written as they are made.
    factors: NDArray[np.float32] | None = None
    if shape.rope_scaling == "llama3":
        original_context = max(1, int(shape.context / shape.rope_factor))
        rotated = shape.rope_dims or shape.head_dim
        factors = llama3_rope_factors(rotated, shape.rope_base, shape.rope_factor, original_context)
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    with replacing(path) as part:
        try:
            writer.write_header_to_file(part)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            _write_weights(writer, tensors, seed, progress)
        finally:
            writer.close()
    return Path(path)


def _override(text: str) -> tuple[str, str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r}: must be PATTERN=TYPE")
    return pattern, kind.upper()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `metal-prefill synth` to a parser; `run` takes what it parsed."""
    parser.add_argument("path", metavar="OUT.gguf", type=Path, help="file to write")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="smollm-135m", help="shape to start from")
    for name in ("layers", "dim", "heads", "kv-heads", "head-dim", "ffn", "vocab", "context"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="instead of the preset's")
    parser.add_argument(
        "--type",
        dest="tensor_type",
        type=str.upper,
        choices=TENSOR_TYPES,
        default="Q4_0",
        metavar="TYPE",
        help=f"matrices of the layers: {', '.join(TENSOR_TYPES)}",
    )
    parser.add_argument(
        "--embedding-type",
        type=str.upper,
        default="Q8_0",
        choices=TENSOR_TYPES,
        help="token embedding",
        metavar="TYPE",
    )
    parser.add_argument("--output-type", metavar="TYPE", help='separate output head, or "tied" for none')
    parser.add_argument(
        "--override",
        dest="overrides",
        type=_override,
        action="append",
        metavar="PATTERN=TYPE",
        help="type of the tensors whose name matches, as 'blk.*.ffn_down.weight=Q6_K'; repeatable",
    )
    parser.add_argument("--tokenizer", choices=tuple(VOCABULARIES), help="byte-level BPE or SentencePiece")
    parser.add_argument("--rope-base", type=float, metavar="X", help="base of RoPE's frequencies")
    parser.add_argument("--rope-dims", type=int, metavar="N", help="rotated dimensions of a head")
    parser.add_argument(
        "--rope-scaling", choices=("none", "linear", "llama3"), help="how the context was extended"
    )
    parser.add_argument("--rope-factor", type=float, metavar="X", help="by how much it was extended")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides all weights")


def run(arguments: argparse.Namespace, progress: Progress | None = None) -> Path:
    """Write the model that the options of `add_arguments` describe; see `synthesize`."""
    known = inspect.signature(synthesize).parameters
    options = {name: value for name, value in vars(arguments).items() if name in known}
    output_type, overrides = options.get("output_type"), options.get("overrides")
    if output_type is not None and output_type != TIED:
        options["output_type"] = output_type.upper()
    if overrides is not None:
        options["overrides"] = dict(overrides)
    return synthesize(**options, progress=progress)
