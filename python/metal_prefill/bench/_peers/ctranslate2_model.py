"""Conversion of a GGUF file of the architecture `llama` to CTranslate2's format.

``python -m metal_prefill.bench._peers.ctranslate2_model FILE FOLDER`` writes the model in float32. Tokens are
named by their ids, so that a benchmark needs no tokenizer.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import numpy as np
from ctranslate2.specs import TransformerDecoderModelSpec, common_spec

from metal_prefill.files._gguf_file import GGUFFile, dequantized
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import ModelConfig

# Fields of the configuration that the converted model has as well.
_SIZES = {
    *("architecture", "n_layers", "dim", "n_heads", "n_kv_heads", "key_dim", "value_dim", "ffn_dim"),
    *("vocab_size", "context_length", "norm_eps", "rope_dim", "rope_base", "rope_original_context"),
    *("attention_scale", "layer_uses_rope", "layer_window", "layer_kinds"),
}


def check(config: ModelConfig) -> None:
    """Raise ValueError for a model that the conversion does not support."""
    plain = {field.name: field.default for field in fields(ModelConfig) if field.name not in _SIZES}
    other = [name for name, default in plain.items() if getattr(config, name) != default]
    if config.architecture != "llama" or other:
        what = f" with {', '.join(other)}" if other else ""
        raise ValueError(
            f"CTranslate2 is compared for plain llama models only, not {config.architecture}{what}"
        )
    if not config.rope_dim == config.key_dim == config.value_dim:
        raise ValueError(f"heads of {config.key_dim} dimensions rotate {config.rope_dim}: not supported")


def convert(path: str, folder: str) -> None:
    """Write the converted model to a folder."""
    gguf = GGUFFile(path)
    config = read_config(gguf)
    check(config)
    tensors = gguf.tensors
    unsupported = [name for name in tensors if name.endswith(".bias") or name == "rope_freqs.weight"]
    if unsupported:
        raise ValueError(f"tensor {unsupported[0]} is not supported")

    def weight(name: str) -> Any:
        return dequantized(gguf, tensors[f"{name}.weight"])

    spec = TransformerDecoderModelSpec.from_config(
        config.n_layers,
        config.n_heads,
        activation=common_spec.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=True,
        rotary_base=config.rope_base,
        num_heads_kv=config.n_kv_heads,
        head_dim=config.key_dim,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weight("token_embd")
    decoder.layer_norm.gamma = weight("output_norm")
    decoder.projection.weight = weight("output" if "output.weight" in tensors else "token_embd")
    for i, layer in enumerate(decoder.layer):
        attention, ffn, block = layer.self_attention, layer.ffn, f"blk.{i}"
        attention.layer_norm.gamma = weight(f"{block}.attn_norm")
        attention.linear[0].weight = np.concatenate([weight(f"{block}.attn_{name}") for name in "qkv"])
        attention.linear[1].weight = weight(f"{block}.attn_output")
        ffn.layer_norm.gamma = weight(f"{block}.ffn_norm")
        ffn.linear_0.weight = weight(f"{block}.ffn_gate")
        ffn.linear_0_noact.weight = weight(f"{block}.ffn_up")
        ffn.linear_1.weight = weight(f"{block}.ffn_down")
    tokens = [str(token) for token in range(config.vocab_size)]
    spec.register_vocabulary(tokens)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = tokens[0]
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.validate()
    spec.optimize()
    spec.save(folder)


if __name__ == "__main__":
    convert(*sys.argv[1:])
