"""Writer of a synthetic model's GGUF file: metadata, vocabulary and tensors."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from metal_prefill._core import has_attention
from metal_prefill._support.arguments import Progress
from metal_prefill._support.atomic_write import replacing
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._gguf_writer import GGUFWriter
from metal_prefill.files._hyperparameters import NORM_EPS_KEYS, SCALE_KEYS, SIGMOID
from metal_prefill.files._task_config import NUMBERED_POOLINGS
from metal_prefill.synth._shape import ModelShape
from metal_prefill.synth._tensors import TOKEN_TYPES, Tensor
from metal_prefill.synth._tokenizer import VOCABULARIES


def _metadata(shape: ModelShape) -> dict[str, Any]:
    """Return the metadata of the architecture, without its prefix."""
    traits, experts = shape.traits, shape.experts
    kv_heads = [shape.kv_heads] if traits.attention_every else shape.kv_heads_of_layers
    found: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "context_length": shape.context,
        "embedding_length": shape.dim,
        "block_count": shape.layers,
        "feed_forward_length": _once(shape.ffn_of_layers),
        "attention.head_count": shape.heads,
        "attention.head_count_kv": _once(kv_heads),
    }
    if traits.attention_every:
        found |= _layers_with_attention(shape)
    if (layered := shape.layered) is not None:
        found |= {
            "attention.sliding_window_pattern": layered.windowed(shape.layers),
            "attention.key_length_swa": layered.window_head_dim,
            "attention.value_length_swa": layered.window_head_dim,
            "rope.dimension_count_swa": layered.window_head_dim,
            "attention.shared_kv_layers": layered.shared,
            "embedding_length_per_layer_input": layered.inputs,
        }
    if traits.image_sections:
        pairs = shape.rotated // 2
        found["rope.dimension_sections"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0]
    if shape.conv_layers:
        found["shortconv.l_cache"] = shape.conv_taps
    if (scan := shape.scan) is not None:
        found |= {
            "ssm.conv_kernel": scan.taps,
            "ssm.inner_size": scan.inner,
            "ssm.state_size": scan.state,
            "ssm.time_step_rank": scan.heads,
            "ssm.group_count": scan.groups,
        }
    if experts is not None:
        optional = {
            "expert_feed_forward_length": experts.ffn if experts.ffn != shape.ffn else 0,
            "expert_shared_feed_forward_length": experts.shared,
            "leading_dense_block_count": experts.dense_layers,
            "expert_gating_func": SIGMOID if traits.router_score == "sigmoid" else 0,
        }
        found |= {"expert_count": experts.count, "expert_used_count": experts.used}
        found |= {key: value for key, value in optional.items() if value}
    found[NORM_EPS_KEYS[traits.norm_kind]] = float(shape.norm_eps)
    if shape.head_dim * shape.heads != shape.dim or shape.value_width != shape.head_dim or shape.layered:
        found |= {"attention.key_length": shape.head_dim, "attention.value_length": shape.value_width}
    if traits.parallel == "optional":
        found["use_parallel_residual"] = shape.parallel
    if shape.window is not None:
        found["attention.sliding_window"] = shape.window
    found |= dict.fromkeys(SCALE_KEYS, 1.0) if traits.scales == "required" else {}
    found |= {key: float(value) for key, value in shape.scales}
    if traits.rope_switch and traits.recurrent:  # as published: states depend on the order of tokens
        found["rope.scaling.finetuned"] = False
    if traits.rope:
        found |= {"rope.dimension_count": shape.rotated, "rope.freq_base": float(shape.rope_base)}
    found |= _rope_scaling(shape)
    if shape.pooling is not None:
        found["pooling_type"] = NUMBERED_POOLINGS.index(shape.pooling)
    if not traits.causal:
        found["attention.causal"] = False
    if shape.dense is not None:
        found |= {"dense_2_feat_in": shape.dim, "dense_2_feat_out": shape.dense}
        found |= {"dense_3_feat_in": shape.dense, "dense_3_feat_out": shape.dim}
    if shape.labels:
        found["classifier.output_labels"] = list(shape.labels)
    return found


def _once(values: list[int]) -> int | list[int]:
    """Return the common value of all layers, or the list if they differ."""
    return values if len(set(values)) > 1 else values[0]


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    kind, original = shape.rope_scaling, shape.context_before
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    found: dict[str, Any] = {"rope.scaling.type": kind}
    if kind != "longrope":
        found["rope.scaling.factor"] = float(shape.rope_factor)
    if kind != "linear":
        found["rope.scaling.original_context_length"] = original
    if kind == "longrope":  # the factor as published in Phi-3
        scale = shape.context / original
        growth = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = growth
    return found


def _layers_with_attention(shape: ModelShape) -> dict[str, Any]:
    attends = [has_attention(kind) for kind in shape.kinds]
    every = attends.index(True) + 1 if True in attends else shape.layers + 1
    if attends == [(layer + 1) % every == 0 for layer in range(shape.layers)]:
        return {"full_attention_interval": every}
    return {"attention.recurrent_layers": [not has for has in attends]}


def write(
    path: str | os.PathLike[str],  # path of the file; an existing file is replaced
    name: str,  # display name of the model
    # Shape and tensor type recorded in the metadata.
    shape: ModelShape,
    tensor_type: str,
    tensors: Sequence[Tensor],  # tensors in file order
    # Values of each tensor. An iterator can compute them when they are written, so that only one tensor is in
    # memory at a time.
    values: Iterable[NDArray[Any]],
    progress: Progress | None = None,  # function called after each tensor with the bytes so far and in total
    check: Callable[[Path], None] = lambda path: None,  # function called when the header is written
) -> None:
    """Write a model atomically."""
    vocabulary = VOCABULARIES[shape.tokenizer](shape.vocab)
    writer = writer_of(name, shape, tensor_type)
    writer.add_vocabulary(vocabulary)
    writer.add_add_bos_token(vocabulary.model != "gpt2")
    if shape.pooling is not None:
        writer.add_add_eos_token(True)
    writer.add_add_space_prefix(vocabulary.model == "llama")
    with replacing(path) as part, closing(writer):
        writer.write_header(part, [tensor.outline for tensor in tensors])
        try:
            check(part)
        except (GGUFError, UnsupportedModelError) as error:
            raise ValueError(str(error).removeprefix(f"{part}: ")) from None
        done, total = 0, sum(tensor.size for tensor in tensors)
        for tensor, data in zip(tensors, values, strict=True):
            writer.write_tensor_data(data)
            done += tensor.size
            if progress is not None:
                progress(done, total)


def writer_of(name: str, shape: ModelShape, tensor_type: str) -> GGUFWriter:
    """Return a writer with the metadata of a model, without vocabulary."""
    writer = GGUFWriter(None, shape.architecture)
    writer.add_model(name, tensor_type)
    for suffix, value in _metadata(shape).items():
        writer.add_value(f"{shape.architecture}.{suffix}", value)
    if shape.traits.token_types != "absent":
        writer.add_token_type_count(TOKEN_TYPES)
    return writer
