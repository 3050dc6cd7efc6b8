"""Embedding of texts in padded batches, as in libraries that compute rectangles of tokens.

Encoders of a GGUF file become models of Hugging Face transformers, which does not read such files itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from metal_prefill._core import ModelConfig
from metal_prefill._support.messages import counted
from metal_prefill.bench._engines import Adapter, BenchError, Identity, Ids, Options, Vectors
from metal_prefill.bench._machine import available_threads, cpu_name
from metal_prefill.files._gguf_file import GGUFFile, dequantized
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._task_config import read_head

# Type of the model in transformers, by the architecture of a file.
MODEL_TYPES = {
    "bert": "bert",
    "nomic-bert": "nomic_bert",
    "modern-bert": "modernbert",
    "eurobert": "eurobert",
}
# Modules of a layer of nomic-bert that `gguf.TensorNameMap` lacks, and their names in a file.
_OF_NOMIC_BERT = {
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
}


class _States(torch.nn.Module):  # type: ignore[misc]
    """Encoder whose only output is the last hidden states."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, ``[texts, tokens, dim]``."""
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def load_encoder(path: Path, attention: str = "sdpa") -> Any:
    """Return the transformers model of a file, in float32."""
    with GGUFFile(path) as gguf:
        config = read_config(gguf)
        made: Any = transformers.AutoModel.from_config(_config(config, attention)).float().eval()
        wanted = [name for name in made.state_dict() if not name.startswith("pooler.")]
        made.load_state_dict(_weights(gguf, config, wanted), strict=False)
    return made


def export(path: Path, graph: Path) -> Path:
    """Write the encoder of a GGUF file as an ONNX graph, and return the graph's path."""
    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        # The newer exporter needs another package, without a benefit for these graphs.
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
    return transformers.AutoConfig.for_model(MODEL_TYPES[config.architecture], **settings)


def _weights(gguf: GGUFFile, config: ModelConfig, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return parameters of transformers, which must correspond one to one to the file's tensors."""
    names = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    known = get_tensor_name_map(names[config.architecture], config.n_layers)
    found: dict[str, torch.Tensor] = {}
    left = set(gguf.tensors)
    for name in wanted:
        module, _, kind = name.rpartition(".")
        _, layer, own = (*module.split(".", 2), "", "")[:3]
        role = known.get_name(module) or known.get_name(f"model.{module}") or ""
        if config.architecture == "nomic-bert" and own in _OF_NOMIC_BERT:
            role = f"blk.{layer}.{_OF_NOMIC_BERT[own]}"
        stored = f"{role}.{kind}"
        is_part = stored not in gguf.tensors and role.endswith(("attn_q", "attn_k", "attn_v"))
        stored = f"{role[:-1]}qkv.{kind}" if is_part else stored
        if stored not in gguf.tensors:
            raise ValueError(f"{gguf.path}: lacks a tensor for {name} of transformers")
        tensor = gguf.tensors[stored]
        data = torch.from_numpy(np.array(dequantized(gguf, tensor)).reshape(tensor.shape))
        found[name] = data.chunk(3)["qkv".index(role[-1])] if is_part else data
        left.discard(stored)
    if left:
        raise ValueError(f"{gguf.path}: transformers has no parameters for {', '.join(sorted(left))}")
    return found


POOLINGS = ("last", "mean", "cls")
ENCODER_BATCH = 32  # texts, the default of sentence-transformers


class PaddedTexts(Adapter):
    """Adapter that sorts texts by length, as sentence-transformers does, and computes padded batches.

    An adapter sets the function that computes them.
    """

    batch = 8  # texts: 0.64 of the time of single ones with an embedding model of 600 million parameters
    # Function of ids and mask of a batch that returns the last hidden states, ``[texts, tokens, dim]``.
    states: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float32]]
    build: str  # names and versions of the libraries
    arithmetic: str  # number formats of weights and activations

    def __init__(self, name: str, options: Options, *, causal: bool = False) -> None:
        self.path = Path(options.path)
        self.threads = options.threads or available_threads()
        with GGUFFile(self.path) as gguf:
            self.config = read_config(gguf)
            head = read_head(gguf, self.config.architecture, self.config.dim)
        self.is_encoder = self.config.architecture in MODEL_TYPES
        known = self.is_encoder or (causal and self.config.causal)
        if head.pooling not in POOLINGS or head.steps or not known:
            kinds = "causal attention or " * causal + f"one of {', '.join(MODEL_TYPES)}"
            raise BenchError(
                f"comparing with {name} takes {kinds}, pooling {', '.join(POOLINGS)}, no steps after it; "
                f"{self.path.name} is another kind of model"
            )
        self.pooling = head.pooling
        if self.is_encoder:
            self.batch = ENCODER_BATCH

    def identity(self) -> Identity:
        return Identity(
            build=self.build,
            device=f"CPU ({cpu_name()}, {counted(self.threads, 'thread')})",
            n_threads=self.threads,
            settings=f"{self.arithmetic}, texts sorted by length, batches of {self.batch}",
        )

    def embed(self, texts: list[Ids]) -> Vectors:
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
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
