"""Embedding of texts in padded batches, as libraries do that compute rectangles of tokens.

Encoders of a GGUF file become models of Hugging Face transformers, which reads no such files by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from metal_prefill._support.messages import counted
from metal_prefill.bench._engines import BenchError, Engine, Identity, Ids, Options, Vectors
from metal_prefill.bench._machine import available_threads, cpu_name
from metal_prefill.files._gguf_file import GGUFFile, dequantized
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import ModelConfig
from metal_prefill.files._task_config import read_head

_LLAMA = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
# By architecture: names in transformers of the tensors of a file.
NAMES: dict[str, dict[str, str]] = {
    "bert": _EMBEDDINGS
    | {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    "nomic-bert": _LLAMA
    | _EMBEDDINGS
    | {"attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_mlp_layernorm"},
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
        "output_norm": "final_norm",
    },
    "eurobert": _LLAMA,
}
_MODEL_TYPES = {"nomic-bert": "nomic_bert", "modern-bert": "modernbert"}


class _States(torch.nn.Module):  # type: ignore[misc]
    """Encoder whose only output is the last hidden states."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, ``[texts, tokens, dim]``."""
        states: torch.Tensor = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return states


def load_encoder(path: Path, attention: str = "sdpa") -> Any:
    """Return the transformers model of a file, in float32."""
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        made: Any = transformers.AutoModel.from_config(_config(config, attention)).float().eval()
        missing, unexpected = made.load_state_dict(dict(_weights(gguf, config)), strict=False)
    missing = [name for name in missing if not name.startswith("pooler.")]
    if missing or unexpected:
        raise ValueError(f"{path}: transformers lacks {unexpected}, and the file lacks {missing}")
    return made


def export(path: Path, graph: Path) -> Path:
    """Write the encoder of a GGUF file as an ONNX graph, and return the graph's path."""
    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        # The exporter that does not warn needs another package and gains nothing for these graphs.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _States(load_encoder(path, "eager")).eval(),
            (ids, torch.ones_like(ids)),
            str(graph),
            input_names=["input_ids", "attention_mask"],
            output_names=["states"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "states": axes},
            opset_version=17,
            dynamo=False,
        )
    return graph


def _config(config: ModelConfig, attention: str) -> Any:
    rope = {"rope_type": "default", "rope_theta": config.rope_base}
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "max_position_embeddings": config.context_length,
        **dict.fromkeys(("layer_norm_eps", "rms_norm_eps", "norm_eps"), config.norm_eps),
        "attn_implementation": attention,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        "pad_token_id": 0,
    }
    if config.architecture != "bert":
        settings["rope_parameters"] = rope
    if config.architecture == "bert":
        settings["type_vocab_size"] = config.token_types
    if config.architecture == "modern-bert":
        windowed = {"rope_type": "default", "rope_theta": min(config.layer_rope_base)}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": windowed}
        settings["local_attention"] = max(config.layer_window)
    return transformers.AutoConfig.for_model(
        _MODEL_TYPES.get(config.architecture, config.architecture), **settings
    )


def _weights(gguf: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    names = NAMES[config.architecture]
    layers = "encoder.layer" if config.architecture == "bert" else "layers"
    for tensor in gguf.tensors.values():
        stem, kind = tensor.name.rsplit(".", 1)
        *layer, part = stem.split(".")
        data = torch.from_numpy(np.array(dequantized(gguf, tensor)).reshape(tensor.shape))
        prefix = f"{layers}.{layer[1]}." if layer else ""
        if part == "attn_qkv" and part not in names:
            for name, rows in zip(("attn_q", "attn_k", "attn_v"), data.chunk(3), strict=True):
                yield f"{prefix}{names[name]}.{kind}", rows
        elif part in names:
            yield f"{prefix}{names[part]}.{kind}", data
        else:
            yield tensor.name, data  # which load_encoder reports


POOLINGS = ("last", "mean", "cls")
ENCODER_BATCH = 32  # texts, as sentence-transformers takes by default


class PaddedTexts(Engine):
    """Engine that sorts texts by length, as sentence-transformers does, and computes padded batches."""

    batch = 8  # texts: 0.64 of the time of single ones with an embedding model of 600 million parameters
    config: ModelConfig
    pooling: str

    def __init__(self, name: str, options: Options, *, causal: bool = False) -> None:
        """Read the configuration of a file."""
        self.path = Path(options.path)
        self.threads = options.threads or available_threads()
        with GGUFFile(self.path) as gguf:
            self.config = read_config(gguf)
            head = read_head(gguf, self.config.architecture, self.config.dim)
        self.is_encoder = self.config.architecture in NAMES
        known = self.is_encoder or (causal and self.config.causal)
        if head.pooling not in POOLINGS or head.steps or not known:
            kinds = "causal attention or " * causal + f"one of {', '.join(NAMES)}"
            raise BenchError(
                f"comparing with {name} takes {kinds}, pooling {', '.join(POOLINGS)}, no steps after it; "
                f"{self.path.name} is another kind of model"
            )
        self.pooling = head.pooling
        if self.is_encoder:
            self.batch = ENCODER_BATCH

    @property
    def build(self) -> str:
        """Names and versions of the libraries."""
        raise NotImplementedError

    @property
    def arithmetic(self) -> str:
        """Number formats of weights and activations."""
        raise NotImplementedError

    def identity(self) -> Identity:
        return Identity(
            build=self.build,
            device=f"CPU ({cpu_name()}, {counted(self.threads, 'thread')})",
            threads=self.threads,
            settings=f"{self.arithmetic}, texts sorted by length, batches of {self.batch}",
        )

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the last hidden states of a batch, float32 ``[texts, tokens, dim]``."""
        raise NotImplementedError

    def embed(self, texts: list[Ids]) -> Vectors:
        """Return the pooled vectors of texts, normalized, float32 ``[texts, dim]``."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for begin in range(0, len(order), self.batch):
            group = order[begin : begin + self.batch]
            for i, vector in zip(group, self._run([texts[i] for i in group]), strict=True):
                vectors[i] = vector
        return np.array(vectors, np.float32)

    def _run(self, texts: Sequence[Ids]) -> npt.NDArray[np.float32]:
        lengths = np.array([len(text) for text in texts])
        ids = np.zeros((len(texts), lengths.max()), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        states = self.states(ids, mask)
        if self.pooling == "mean":
            pooled = (states * mask[..., None]).sum(axis=1, dtype=np.float32) / lengths[:, None]
        else:
            pooled = states[np.arange(len(texts)), 0 if self.pooling == "cls" else lengths - 1]
        vectors: npt.NDArray[np.float32] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors
