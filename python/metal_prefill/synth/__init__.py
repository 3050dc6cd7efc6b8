"""Synthetic GGUF models of any shape and tensor type, with random weights.

They serve for benchmarks, whose speed depends on the shape and not on the text, and for tests. A file is
complete and valid: it has a working tokenizer, and its weights are scaled so that activations keep their
magnitude through all layers, attention depends on the context, and the logits differ between tokens.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from metal_prefill._support.arguments import Progress
from metal_prefill.files._gguf_writer import check_header
from metal_prefill.synth._blocks import TENSOR_TYPES
from metal_prefill.synth._file import write, writer_of
from metal_prefill.synth._shape import (
    ROPE_SCALINGS,
    TIED,
    ExpertShape,
    LayerShape,
    ModelShape,
    ScanShape,
    check,
)
from metal_prefill.synth._tensors import TOKEN_TYPES, stacked, tensors, values_of, with_types

__all__ = [
    "PRESETS", "ROPE_SCALINGS", "TENSOR_TYPES", "TIED", "TOKEN_TYPES", "ExpertShape", "LayerShape",
    "ModelShape", "ScanShape", "synthesize",
]  # fmt: skip

_BERT: Mapping[str, Any] = {"architecture": "bert", "tokenizer": "bert", "norm_eps": 1e-12}

PRESETS: Mapping[str, ModelShape] = {
    "smollm-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152, 2048),
    "tinyllama-1.1b": ModelShape(
        22, 2048, 32, 4, 64, 5632, 32000, 2048, output_type="Q6_K", tokenizer="llama"
    ),
    "lfm2-350m": ModelShape(
        *(16, 1024, 16, 8, 64, 4608, 65536, 128000),
        architecture="lfm2",
        rope_base=1e6,
        conv_layers=(0, 1, 3, 4, 6, 7, 9, 11, 13, 15),
    ),
    "granite-4.0-h-tiny": ModelShape(
        *(40, 1536, 12, 4, 128, 512, 100352, 131072),
        architecture="granitehybrid",
        scan=ScanShape(3072, 128, 48, layers=tuple(n for n in range(40) if n % 10 != 5)),
        experts=ExpertShape(64, 6, 512, shared=1024),
        scales=(
            ("embedding_scale", 12.0),
            ("residual_scale", 0.22),
            ("logit_scale", 6.0),
            ("attention.scale", 0.0078125),
        ),
    ),
    "lfm2-8b-a1b": ModelShape(
        *(24, 2048, 32, 8, 64, 7168, 65536, 128000),
        architecture="lfm2moe",
        rope_base=1e6,
        conv_layers=tuple(n for n in range(24) if n not in (2, 6, 10, 14, 18, 21)),
        experts=ExpertShape(32, 4, 1792, dense_layers=2),
    ),
    "gemma-4-e2b": ModelShape(
        *(35, 1536, 8, 1, 512, 6144, 262144, 131072),
        architecture="gemma4",
        tokenizer="llama",
        rope_base=1e6,
        norm_eps=1e-6,
        window=512,
        scales=(("final_logit_softcapping", 30.0),),
        layered=LayerShape(5, 256, 1, inputs=256, shared=20, shared_ffn=12288),
    ),
    "mamba2-130m": ModelShape(
        *(24, 768, 0, 0, 0, 0, 50288, 1048576), architecture="mamba2", scan=ScanShape(1536, 128, 24)
    ),
    "falcon-h1-0.5b": ModelShape(
        *(36, 1024, 8, 2, 64, 2048, 32784, 16384),
        architecture="falcon-h1",
        output_type="Q8_0",
        rope_base=1e11,
        scan=ScanShape(1536, 128, 24, norm=False),
    ),
    "qwen3.5-0.8b": ModelShape(
        *(24, 1024, 8, 2, 256, 3584, 248320, 262144),
        architecture="qwen35",
        rope_base=1e7,
        rope_dims=64,
        norm_eps=1e-6,
        scan=ScanShape(2048, 128, 16, 16, layers=tuple(n for n in range(24) if n % 4 != 3)),
    ),
    "gpt2": ModelShape(12, 768, 12, 12, 64, 3072, 50257, 1024, architecture="gpt2"),
    "tiny": ModelShape(2, 64, 4, 2, 32, 128, 512, 256),
    "tiny-embedding": ModelShape(
        2, 64, 4, 2, 32, 128, 512, 512, architecture="qwen3", rope_base=1e6, norm_eps=1e-6, pooling="last"
    ),
    "minilm-l6": ModelShape(*(6, 384, 12, 12, 32, 1536, 30522, 512), **_BERT, pooling="mean"),
    "bge-base": ModelShape(*(12, 768, 12, 12, 64, 3072, 30522, 512), **_BERT, pooling="cls"),
    "mpnet-base": ModelShape(
        *(12, 768, 12, 12, 64, 3072, 30527, 512),
        architecture="bert",
        tokenizer="bert",
        position_bias=True,
        pooling="mean",
    ),
    "nomic-embed": ModelShape(
        *(12, 768, 12, 12, 64, 3072, 30522, 2048),
        architecture="nomic-bert",
        tokenizer="bert",
        rope_base=1000.0,
        norm_eps=1e-12,
        pooling="mean",
    ),
    "bge-m3": ModelShape(
        *(24, 1024, 16, 16, 64, 4096, 250002, 8192), architecture="bert", tokenizer="bert", pooling="cls"
    ),
    # 33 labels: O, and four tags of each of eight kinds of parts.
    "privacy-filter": ModelShape(
        *(8, 640, 14, 2, 64, 640, 200064, 131072),
        architecture="privacy-filter",
        rope_base=150000.0,
        window=257,
        all_biases=True,
        pooling="none",
        labels=("O", *(f"{tag}-{kind}" for kind in range(8) for tag in "BIES")),
        experts=ExpertShape(128, 4, 640),
    ),
}


def write_preset_outline(path: Path, preset: str) -> Path:
    """Write a file with the metadata and the tensors of a preset, but without vocabulary and values.

    Programs that read only the shape of a model accept it, such as the cost model. It has the size of the
    model, but takes no space if the file system supports that.
    """
    shape = PRESETS[preset]
    listed = stacked(tensors(shape, "Q4_0", "Q8_0"), shape)
    with closing(writer_of("outline", shape, "Q4_0")) as writer:
        writer.write_header(path, [tensor.outline for tensor in listed])
    return path


def synthesize(
    path: str | os.PathLike[str],
    *,
    preset: str = "smollm-135m",
    tensor_type: str = "Q4_0",
    embedding_type: str = "Q8_0",
    overrides: Mapping[str, str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **given: Any,
) -> Path:
    """Write a model with random weights.

    The same arguments produce the same file. It is written under a temporary name and renamed when complete,
    so that an interrupted call leaves no partial file.

    Parameters
    ----------
    path
        File to write; an existing one is replaced.
    preset
        A name in `PRESETS`, the shape to start from.
    tensor_type
        Type of the matrices in the layers, one of `TENSOR_TYPES`. Norms are F32.
    embedding_type
        Type of the token embedding, which is also a tied output head.
    overrides
        Types of individual matrices, as in ``{"blk.*.ffn_down.weight": "Q6_K"}``; the last matching pattern
        applies.
    seed
        Seed of all weights.
    progress
        Called after each tensor with the bytes of weights written so far and their total.
    given
        Fields of `ModelShape` that differ from the preset, such as ``layers=4``; None keeps the preset's. If
        `dim` or `heads` is given without `head_dim`, `head_dim` becomes dim / heads. With fewer `layers`,
        those of the preset beyond are omitted from `conv_layers` and `scan`, and fewer of `layered` share
        keys and values, unless these are given.

    Returns
    -------
    Path
        Path of the file.

    Raises
    ------
    ValueError
        If the shape is inconsistent or a type does not fit it; the message names the field, the key of the
        metadata or the tensor, and nothing is written.
    OSError
        If the file cannot be written.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
    shape = replace(PRESETS[preset], **given)
    if shape.pooling == "rank" and not shape.labels:
        shape = replace(shape, labels=("score",))  # its file must have a head
    if "conv_layers" not in given:
        shape = replace(shape, conv_layers=tuple(n for n in shape.conv_layers if n < shape.layers))
    if "scan" not in given and shape.scan is not None and shape.scan.layers is not None:
        kept = tuple(n for n in shape.scan.layers if n < shape.layers)
        shape = replace(shape, scan=replace(shape.scan, layers=kept))
    if "layered" not in given and shape.layered is not None:
        most = max(shape.layers - shape.layered.window_period, 0)
        shared = min(shape.layered.shared, most)
        shape = replace(shape, layered=replace(shape.layered, shared=shared))
    if "head_dim" not in given and shape.kv_heads and not {"dim", "heads"}.isdisjoint(given):
        if shape.heads < 1 or shape.dim % shape.heads:
            raise ValueError(f"dim={shape.dim}: not a multiple of heads={shape.heads}, so pass `head_dim`")
        shape = replace(shape, head_dim=shape.dim // shape.heads)
    check(shape)
    if seed < 0:
        raise ValueError(f"seed={seed}: must not be negative")
    whole = stacked(tensors(shape, tensor_type, embedding_type), shape)
    listed = [with_types(tensor, overrides or {}) for tensor in whole]
    values = values_of(listed, shape, seed)
    write(path, f"Synthetic {preset}", shape, tensor_type, listed, values, progress, check_header)
    return Path(path)
