"""Folders of MPNet, DistilBERT, GTE and Jina's BERT for code with random weights, and heads of SPLADE."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from support.folders import model_folders
from support.folders.folder_reference import BIAS, LAYER, FolderTensors, states
from support.folders.model_folders import (
    DIM,
    FFN,
    HEADS,
    LAYERS,
    Folder,
    Shapes,
    bert_layer,
    linear,
    norm,
    repeated,
    values,
)
from support.kernels.float64 import Array, gelu

CONTEXT = 330  # distances beyond 128 have the same bias
# Names of BERT's modules in each class.
MPNET = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}
GTE = {
    "attention.self.query_key_value": "attention.qkv_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attn_ln",
    "intermediate.gated": "mlp.up_gate_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "mlp_ln",
}
JINA_CODE = {
    "intermediate.gated": "mlp.up_gated_layer",
    "output.dense": "mlp.down_layer",
    "output.LayerNorm": "layer_norm_2",
}
DISTILBERT = {
    LAYER: "transformer.layer.{}.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
_POSITIONS = "embeddings.position_embeddings.weight"
_TYPES = "embeddings.token_type_embeddings.weight"


def _with_body(folder: Folder, prefix: str, layer: Shapes, names: dict[str, str], *, types: bool) -> Folder:
    """Replace the layers and the table of positions; without token types, positions are absolute."""
    shapes: Shapes = {} if types else {_POSITIONS: (CONTEXT, DIM)}
    shapes |= repeated(names.get(LAYER, LAYER), layer)
    left_out = ("encoder.", _POSITIONS, *(() if types else (_TYPES,)))
    folder.tensors = {prefix + n: t for n, t in folder.tensors.items() if not n.startswith(left_out)}
    return folder.add(shapes, size=3, prefix=prefix)


def mpnet(path: Path) -> Folder:
    """Make a folder of all-mpnet-base-v2's class."""
    folder = model_folders.bert(path, max_position_embeddings=CONTEXT, pad_token_id=1)
    folder.config |= {
        "architectures": ["MPNetForMaskedLM"],
        "model_type": "mpnet",
        "layer_norm_eps": 1e-5,
        "relative_attention_num_buckets": 32,
    }
    del folder.config["type_vocab_size"]
    _with_body(folder, "mpnet.", bert_layer(MPNET), MPNET, types=False)
    folder.add({f"mpnet.{BIAS}": (32, HEADS)}, 7, size=10)
    tokenizer = folder.loaded("tokenizer.json")
    ids = tokenizer["model"]["vocab"]
    frame = {"sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", ids["[CLS]"]]}
    flags = dict.fromkeys(("trim_offsets", "add_prefix_space"), True)
    tokenizer["post_processor"] = {"type": "RobertaProcessing", **frame, **flags}
    folder.json("tokenizer.json", tokenizer)
    return folder


def distilbert(path: Path, architecture: str = "DistilBertModel") -> Folder:
    """Make a folder of DistilBERT, by default without a head."""
    folder = model_folders.bert(path)
    folder.config = {
        "architectures": [architecture],
        "model_type": "distilbert",
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dim": FFN,
        "max_position_embeddings": CONTEXT,
        "activation": "gelu",
        "vocab_size": folder.config["vocab_size"],
    }
    prefix = "distilbert." if "For" in architecture else ""
    _with_body(folder, prefix, bert_layer(DISTILBERT), DISTILBERT, types=False)
    if "Sequence" in architecture:
        folder.config["id2label"] = {"0": "NEGATIVE", "1": "POSITIVE"}
        folder.add(linear("pre_classifier") | linear("classifier", 2), 3, size=5)
    return folder


def gte(path: Path, rope_scaling: dict[str, Any] | None = None, prefix: str = "") -> Folder:
    """Make a folder of gte-multilingual-base's class."""
    folder = model_folders.bert(path, "XLMRobertaModel", "unigram", max_position_embeddings=CONTEXT)
    folder.config |= {
        "architectures": ["NewModel"],
        "model_type": "gte",
        "rope_theta": 500.0,
        "rope_scaling": rope_scaling,
        "layer_norm_type": "layer_norm",
        "position_embedding_type": "rope",
    }
    layer = linear("attention.qkv_proj", 3 * DIM) | linear("attention.o_proj") | norm("attn_ln")
    layer |= {
        "mlp.up_gate_proj.weight": (2 * FFN, DIM),
        **linear("mlp.down_proj", DIM, FFN),
        **norm("mlp_ln"),
    }
    return _with_body(folder, prefix, layer, GTE, types=True)


def jina_code(path: Path) -> Folder:
    """Make a folder of the class of jina-embeddings-v2-base-code."""
    folder = model_folders.bert(path)
    folder.config |= {
        "architectures": ["JinaBertForMaskedLM"],
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
    }
    layer = {name: shape for name, shape in bert_layer({}).items() if name.startswith("attention.")}
    for name in (*(f"attention.self.layer_norm_{part}" for part in "qk"), "layer_norm_1", "layer_norm_2"):
        layer |= norm(name)
    layer |= {"mlp.up_gated_layer.weight": (2 * FFN, DIM), **linear("mlp.down_layer", DIM, FFN)}
    return _with_body(folder, "bert.", layer, JINA_CODE, types=True)


# Modules of the heads that predict masked tokens: a layer, its norm, and the output.
DISTILBERT_HEAD = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
GTE_HEAD = ("lm_head.dense", "lm_head.norm", "lm_head.decoder")


def _with_masked_head(folder: Folder, names: tuple[str, str, str]) -> Folder:
    """Add the head that predicts masked tokens, and the modules of SPLADE."""
    dense, middle, output = names
    for name, shape in (linear(dense) | norm(middle)).items():
        folder.add({name: shape}, 8, size=3)
    folder.add({f"{output}.bias": (folder.config["vocab_size"],)}, 9, size=3)
    return splade_modules(folder)


_SPARSE = "sentence_transformers.sparse_encoder.models."


def splade_modules(folder: Folder) -> Folder:
    """Add the modules of SPLADE."""
    folder.json("1_SpladePooling/config.json", {"pooling_strategy": "max", "activation_function": "relu"})
    return folder.modules({"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}, _SPARSE)


def distilbert_masked(path: Path) -> Folder:
    """Make a SPLADE folder of DistilBERT."""
    return _with_masked_head(distilbert(path, "DistilBertForMaskedLM"), DISTILBERT_HEAD)


def gte_masked(path: Path) -> Folder:
    """Make a SPLADE folder of the class of gte-multilingual-mlm-base."""
    folder = _with_masked_head(gte(path, prefix="new."), GTE_HEAD)
    folder.config["architectures"] = ["NewForMaskedLM"]
    return folder


def routed(path: Path) -> Folder:
    """Make a SPLADE folder whose queries are weights of their tokens."""
    folder = distilbert_masked(path)
    folder.config["pad_token_id"] = 0
    query, pooling = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"
    kinds = {query: "SparseStaticEmbedding", "": "MLMTransformer", pooling: "SpladePooling"}
    folder.modules({"": "Router"})
    folder.json(
        "router_config.json",
        {
            "types": {name: f"{_SPARSE}{kind}.{kind}" for name, kind in kinds.items()},
            "structure": {"query": [query], "document": ["", pooling]},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        },
    )
    folder.json("config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    (path / "1_SpladePooling").rename(path / pooling)
    folder.json(f"{query}/config.json", {"frozen": False})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / name, path / query / name)
    weights = np.abs(values((folder.config["vocab_size"],), 11))
    save_file({"weight": np.where(weights > 0.02, weights, 0)}, path / query / "model.safetensors")
    return folder


def vocabulary_vector(folder: Folder, ids: npt.NDArray[np.int64]) -> Array:
    """Return the vector of SPLADE (arXiv:2109.10086) of a text, ``[vocab]``."""
    t = FolderTensors(folder.tensors)
    is_gte = folder.config["model_type"] == "gte"
    prefix, names, head = ("new.", GTE, GTE_HEAD) if is_gte else ("distilbert.", DISTILBERT, DISTILBERT_HEAD)
    dense, middle, output = head
    hidden = t.normed(middle, gelu(t.linear(dense, states(folder, ids, prefix, names))))
    logits = hidden @ t[f"{prefix}embeddings.word_embeddings.weight"].T + t[f"{output}.bias"]
    return np.log1p(np.maximum(logits, 0)).max(axis=0)
