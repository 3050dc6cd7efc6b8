"""Writer of a synthetic model's GGUF file: metadata, vocabulary and tensors."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_VERSION,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    LlamaFileType,
    PoolingType,
    RopeScalingType,
)
from numpy.typing import NDArray

from metal_prefill._support.atomic_write import replacing
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._gguf_writer import GGUFWriter
from metal_prefill.files._hyperparameters import SCALE_KEYS
from metal_prefill.files._model_config import has_attention
from metal_prefill.files._task_config import NUMBERED_POOLINGS
from metal_prefill.synth._layers import LayerShape
from metal_prefill.synth._shape import ModelShape
from metal_prefill.synth._tensors import TOKEN_TYPES, Tensor
from metal_prefill.synth._tokenizer import VOCABULARIES, Vocabulary

_FILE_TYPES = {  # the rest: MOSTLY_<type>
    "F32": "ALL_F32",
    "Q3_K": "MOSTLY_Q3_K_S",
    "Q4_K": "MOSTLY_Q4_K_S",
    "Q5_K": "MOSTLY_Q5_K_S",
    "MXFP4": "MOSTLY_MXFP4_MOE",
}


def _add_metadata(writer: GGUFWriter, name: str, shape: ModelShape, tensor_type: str) -> None:
    writer.add_name(name)
    writer.add_file_type(LlamaFileType[_FILE_TYPES.get(tensor_type, f"MOSTLY_{tensor_type}")])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    widths = shape.ffn_of_layers
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else shape.ffn)
    writer.add_head_count(shape.heads)
    traits = shape.traits
    counts = [shape.kv_heads] if traits.attention_every else shape.kv_heads_of_layers
    writer.add_head_count_kv(counts if len(set(counts)) > 1 else counts[0])
    if traits.attention_every:
        _add_layers_with_attention(writer, shape)
    if shape.layered is not None:
        _add_layers(writer, shape, shape.layered)
    if traits.image_sections:
        pairs = shape.rotated // 2
        writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    if shape.conv_layers:
        writer.add_shortconv_l_cache(shape.conv_taps)
    if shape.scan is not None:
        writer.add_ssm_conv_kernel(shape.scan.taps)
        writer.add_ssm_inner_size(shape.scan.inner)
        writer.add_ssm_state_size(shape.scan.state)
        writer.add_ssm_time_step_rank(shape.scan.heads)
        writer.add_ssm_group_count(shape.scan.groups)
    if (experts := shape.experts) is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.used)
        if experts.ffn != shape.ffn:
            writer.add_expert_feed_forward_length(experts.ffn)
        if experts.shared:
            writer.add_expert_shared_feed_forward_length(experts.shared)
        if experts.dense_layers:
            writer.add_leading_dense_block_count(experts.dense_layers)
        if traits.router_score == "sigmoid":
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    (writer.add_layer_norm_rms_eps if traits.norm_kind == "rms" else writer.add_layer_norm_eps)(
        shape.norm_eps
    )
    if shape.head_dim * shape.heads != shape.dim or shape.value_width != shape.head_dim or shape.layered:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.value_width)
    if traits.parallel == "optional":
        writer.add_parallel_residual(shape.parallel)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
    unscaled = dict.fromkeys(SCALE_KEYS, 1.0) if traits.scales == "required" else {}
    for key, value in (unscaled | dict(shape.scales)).items():
        writer.add_float32(f"{shape.architecture}.{key}", value)
    if traits.rope_switch and traits.recurrent:  # as published: states know the order of tokens
        writer.add_rope_scaling_finetuned(False)
    if traits.rope:
        writer.add_rope_dimension_count(shape.rotated)
        writer.add_rope_freq_base(shape.rope_base)
    if shape.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(shape.rope_scaling))
        writer.add_rope_scaling_factor(shape.rope_factor)
    if shape.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(shape.context_before)
    if shape.rope_scaling == "longrope":  # the factor as published in Phi-3
        scale, original = shape.context / shape.context_before, shape.context_before
        attn_factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(attn_factor)
    if shape.pooling is not None:
        writer.add_pooling_type(PoolingType(NUMBERED_POOLINGS.index(shape.pooling)))
    if not traits.causal:
        writer.add_causal_attention(False)
    if traits.token_types != "absent":
        writer.add_token_type_count(TOKEN_TYPES)
    if shape.dense is not None:
        for name, end, width in (
            ("dense_2", "in", shape.dim),
            ("dense_2", "out", shape.dense),
            ("dense_3", "in", shape.dense),
            ("dense_3", "out", shape.dim),
        ):
            writer.add_uint32(f"{shape.architecture}.{name}_feat_{end}", width)
    if shape.labels:
        writer.add_array(f"{shape.architecture}.classifier.output_labels", list(shape.labels))


def _add_layers(writer: GGUFWriter, shape: ModelShape, layered: LayerShape) -> None:
    prefix = shape.architecture
    writer.add_array(f"{prefix}.attention.sliding_window_pattern", layered.windowed(shape.layers))
    for key, value in {
        "attention.key_length_swa": layered.window_head_dim,
        "attention.value_length_swa": layered.window_head_dim,
        "rope.dimension_count_swa": layered.window_head_dim,
        "attention.shared_kv_layers": layered.shared,
        "embedding_length_per_layer_input": layered.inputs,
    }.items():
        writer.add_uint32(f"{prefix}.{key}", value)


def _add_layers_with_attention(writer: GGUFWriter, shape: ModelShape) -> None:
    attends = [has_attention(kind) for kind in shape.kinds]
    every = attends.index(True) + 1 if True in attends else shape.layers + 1
    if attends == [(layer + 1) % every == 0 for layer in range(shape.layers)]:
        writer.add_full_attention_interval(every)
    else:
        writer.add_array(f"{shape.architecture}.attention.recurrent_layers", [not has for has in attends])


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """Add the metadata of a tokenizer's vocabulary."""
    writer.add_vocabulary(vocabulary)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    if vocabulary.model == "bert":
        writer.add_unk_token_id(vocabulary.tokens.index("[UNK]"))
        writer.add_sep_token_id(vocabulary.eos)
        writer.add_pad_token_id(vocabulary.tokens.index("[PAD]"))
        writer.add_mask_token_id(vocabulary.tokens.index("[MASK]"))


def write(
    path: str | os.PathLike[str],  # path of the file; an existing file is replaced
    name: str,  # display name of the model
    # Shape and tensor type recorded in the metadata.
    shape: ModelShape,
    tensor_type: str,
    tensors: Sequence[Tensor],  # tensors in file order
    # Function that returns the bytes of a tensor; called in file order, so that only one tensor is in memory
    # at a time.
    values: Callable[[Tensor], NDArray[Any]],
    written: Callable[[Tensor], object] = lambda tensor: None,  # function called after each tensor
    check: Callable[[Path], None] = lambda path: None,  # function called when the header is written
) -> None:
    """Write a model atomically."""
    vocabulary = VOCABULARIES[shape.tokenizer](shape.vocab)
    writer = _writer(name, shape, tensor_type, tensors)
    add_vocabulary(writer, vocabulary)
    writer.add_add_bos_token(vocabulary.model != "gpt2")
    if shape.pooling is not None:
        writer.add_add_eos_token(True)
    writer.add_add_space_prefix(vocabulary.model == "llama")
    with replacing(path) as part:
        try:
            writer.write_header(part, [tensor.size for tensor in tensors])
            try:
                check(part)
            except (GGUFError, UnsupportedModelError) as error:
                raise ValueError(str(error).removeprefix(f"{part}: ")) from None
            for tensor in tensors:
                writer.write_tensor_data(values(tensor))
                written(tensor)
        finally:
            writer.close()


def write_outline(
    path: str | os.PathLike[str], shape: ModelShape, tensor_type: str, tensors: Sequence[Tensor]
) -> None:
    """Write a file with the metadata and the tensors of a model, but without vocabulary and values.

    It has the size of the model, but takes no space where the file system supports that.
    """
    writer = _writer("outline", shape, tensor_type, tensors)
    try:
        writer.write_header(path, [tensor.size for tensor in tensors])
    finally:
        writer.close()


def _writer(name: str, shape: ModelShape, tensor_type: str, tensors: Sequence[Tensor]) -> GGUFWriter:
    writer = GGUFWriter(None, shape.architecture)
    _add_metadata(writer, name, shape, tensor_type)
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size, raw_dtype=kind)
    return writer
