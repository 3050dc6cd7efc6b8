"""Folders of MPNet, DistilBERT, ELECTRA and GTE with random weights, and their states in float64."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from support import model_folders
from support.folder_reference import Array, FolderTensors, attended, gelu
from support.model_folders import (
    BERT_LINEAR,
    BERT_NORMS,
    DIM,
    FFN,
    HEADS,
    LAYERS,
    Folder,
    Shapes,
    bert_layer,
    drawn,
    linear,
    norm,
    values,
)
from support.reference import position_bucket

CONTEXT = 330  # distances beyond 128 have the same bias
BIAS = "encoder.relative_attention_bias.weight"
LAYER = "encoder.layer.{}."
# Names of BERT's modules in each class.
MPNET = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}
GTE = {
    "attention.qkv_proj": (3 * DIM, DIM),
    "attention.o_proj": (DIM, DIM),
    "attn_ln": (DIM,),
    "mlp.up_gate_proj": (2 * FFN, DIM),
    "mlp.down_proj": (DIM, FFN),
    "mlp_ln": (DIM,),
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


def _with_layers(folder: Folder, prefix: str, names: dict[str, str]) -> None:
    """Replace the tensors by those of a class with other names of modules, and no token types."""
    shapes: Shapes = {"embeddings.position_embeddings.weight": (CONTEXT, DIM)}
    for layer in range(LAYERS):
        shapes |= bert_layer(names.get(LAYER, LAYER).format(layer), names)
    words = "embeddings.word_embeddings.weight"
    kept = {n: t for n, t in folder.tensors.items() if n == words or n.startswith("embeddings.LayerNorm")}
    folder.tensors = {prefix + n: t for n, t in (kept | drawn(shapes, size=3)).items()}


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
    _with_layers(folder, "mpnet.", MPNET)
    folder.tensors[f"mpnet.{BIAS}"] = 10 * values((32, HEADS), 7)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    frame = {"sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", ids["[CLS]"]]}
    tokenizer["post_processor"] = {"type": "RobertaProcessing", **frame} | dict.fromkeys(
        ("trim_offsets", "add_prefix_space"), True
    )
    folder.json("tokenizer.json", tokenizer)
    return folder


def distilbert(path: Path, architecture: str = "DistilBertModel") -> Folder:
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
    _with_layers(folder, "distilbert." if "For" in architecture else "", DISTILBERT)
    if "Sequence" in architecture:
        folder.config["id2label"] = {"0": "NEGATIVE", "1": "POSITIVE"}
        shapes = {"pre_classifier.weight": (DIM, DIM), "classifier.weight": (2, DIM), "classifier.bias": (2,)}
        folder.tensors |= {name: 5 * values(shape, 3) for name, shape in shapes.items()}
        folder.tensors["pre_classifier.bias"] = values((DIM,), 4)
    return folder


def electra(path: Path) -> Folder:
    folder = model_folders.bert(path, max_position_embeddings=CONTEXT)
    folder.config |= {
        "architectures": ["ElectraForPreTraining"],
        "model_type": "electra",
        "embedding_size": DIM,
    }
    types = folder.tensors["embeddings.token_type_embeddings.weight"]
    head = "discriminator_predictions.dense"
    predictions = linear(head) | linear(f"{head}_prediction", 1)
    _with_layers(folder, "electra.", {})
    folder.tensors |= {
        "electra.embeddings.token_type_embeddings.weight": types,
        **{name: values(shape) for name, shape in predictions.items()},
    }
    return folder


def gte(path: Path, rope_scaling: dict[str, Any] | None = None) -> Folder:
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
    shapes: Shapes = {}
    for layer in range(LAYERS):
        for name, shape in GTE.items():
            shapes[f"{LAYER.format(layer)}{name}.weight"] = shape
            if name != "mlp.up_gate_proj":
                shapes[f"{LAYER.format(layer)}{name}.bias"] = shape[:1]
    del folder.tensors["embeddings.position_embeddings.weight"]
    kept = {name: tensor for name, tensor in folder.tensors.items() if name.startswith("embeddings.")}
    folder.tensors = kept | drawn(shapes, size=3)
    return folder


def gte_states(folder: Folder, ids: npt.NDArray[np.int64], prefix: str = "") -> Array:
    """Return the states after the last layer."""
    t = FolderTensors(folder.tensors, prefix)
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = t.normed("embeddings.LayerNorm", x)
    width = DIM // HEADS
    base, scaling = folder.config["rope_theta"], folder.config["rope_scaling"] or {}
    # https://kexue.fm/archives/9706: a larger base, and all frequencies lower.
    factor = scaling["factor"] if scaling.get("type") == "ntk" else 1.0
    frequencies = (base * factor) ** (-np.arange(0, width, 2) / width) / factor ** (2 / width)
    angles = np.arange(len(ids))[:, None, None] * frequencies
    cos, sin = (np.concatenate([part, part], axis=2) for part in (np.cos(angles), np.sin(angles)))

    def rotated(x: Array) -> Array:
        heads = x.reshape(len(ids), HEADS, width)
        half = np.concatenate([-heads[..., width // 2 :], heads[..., : width // 2]], axis=2)
        turned: Array = (heads * cos + half * sin).reshape(len(ids), DIM)
        return turned

    for layer in range(LAYERS):
        at = LAYER.format(layer)
        q, k, v = np.split(t.linear(f"{at}attention.qkv_proj", x), 3, axis=1)
        read = t.linear(f"{at}attention.o_proj", attended(rotated(q), rotated(k), v, HEADS))
        x = t.normed(f"{at}attn_ln", x + read)
        up, gate = np.split(t.linear(f"{at}mlp.up_gate_proj", x), 2, axis=1)
        x = t.normed(f"{at}mlp_ln", x + t.linear(f"{at}mlp.down_proj", gelu(gate) * up))
    return x


def states(
    folder: Folder, ids: npt.NDArray[np.int64], prefix: str, names: dict[str, str], seen: int | None = None
) -> Array:
    """Return the states after the last layer; tokens attend to the first `seen`."""
    t = FolderTensors(folder.tensors, prefix, folder.config.get("layer_norm_eps", 1e-12))
    offset = folder.config.get("pad_token_id", -1) + 1 if prefix == "mpnet." else 0
    x = t["embeddings.word_embeddings.weight"][ids]
    if f"{prefix}embeddings.token_type_embeddings.weight" in folder.tensors:
        x = x + t["embeddings.token_type_embeddings.weight"][0]
    x = t.normed(
        "embeddings.LayerNorm", x + t["embeddings.position_embeddings.weight"][offset : offset + len(ids)]
    )
    bias = None
    if prefix + BIAS in folder.tensors:
        place = np.arange(len(ids))
        buckets = np.vectorize(position_bucket)(place[None, :] - place[:, None])
        bias = t[BIAS][buckets].transpose(2, 0, 1)
    for layer in range(LAYERS):
        at = names.get(LAYER, LAYER).format(layer)
        of = {name: at + names.get(name, name) for name in (*BERT_LINEAR, *BERT_NORMS)}
        q, k, v = (t.linear(of[f"attention.self.{name}"], x) for name in ("query", "key", "value"))
        read = t.linear(of["attention.output.dense"], attended(q, k, v, HEADS, seen=seen, bias=bias))
        x = t.normed(of["attention.output.LayerNorm"], x + read)
        inner = gelu(t.linear(of["intermediate.dense"], x))
        x = t.normed(of["output.LayerNorm"], x + t.linear(of["output.dense"], inner))
    return x


# Modules of the heads that predict masked tokens: a layer, its norm, and the output.
DISTILBERT_HEAD = ("vocab_transform", "vocab_layer_norm", "vocab_projector")
GTE_HEAD = ("lm_head.dense", "lm_head.norm", "lm_head.decoder")


def masked_head(folder: Folder, names: tuple[str, str, str] = DISTILBERT_HEAD) -> None:
    """Add the head that predicts masked tokens, and the modules of SPLADE."""
    vocab = folder.config["vocab_size"]
    dense, middle, output = names
    shapes = linear(dense) | norm(middle)
    folder.tensors |= {name: 3 * values(shape, 8) for name, shape in shapes.items()}
    folder.tensors[f"{output}.bias"] = 3 * values((vocab,), 9)
    splade_modules(folder)


def splade_modules(folder: Folder) -> None:
    """Add the modules of SPLADE."""
    package = "sentence_transformers.sparse_encoder.models"
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    folder.json("modules.json", modules)
    folder.json("1_SpladePooling/config.json", {"pooling_strategy": "max", "activation_function": "relu"})


def routed(path: Path) -> Folder:
    """Make a SPLADE folder whose queries are weights of their tokens."""
    folder = distilbert(path, "DistilBertForMaskedLM")
    masked_head(folder)
    folder.config["pad_token_id"] = 0
    package = "sentence_transformers.sparse_encoder.models"
    query, pooling = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"
    kinds = {query: "SparseStaticEmbedding", "": "MLMTransformer", pooling: "SpladePooling"}
    folder.json(
        "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
    )
    folder.json(
        "router_config.json",
        {
            "types": {name: f"{package}.{kind}.{kind}" for name, kind in kinds.items()},
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


def gte_masked(path: Path) -> Folder:
    """Make a SPLADE folder of the class of gte-multilingual-mlm-base."""
    folder = gte(path)
    folder.config["architectures"] = ["NewForMaskedLM"]
    folder.tensors = {f"new.{name}": tensor for name, tensor in folder.tensors.items()}
    masked_head(folder, GTE_HEAD)
    return folder


def vocabulary_vector(folder: Folder, ids: npt.NDArray[np.int64]) -> Array:
    """Return the vector of SPLADE (arXiv:2109.10086) of a text, ``[vocab]``."""
    t = FolderTensors(folder.tensors)
    if folder.config["model_type"] == "gte":
        prefix, (dense, norm, output) = "new.", GTE_HEAD
        hidden = gte_states(folder, ids, prefix)
    else:
        prefix, (dense, norm, output) = "distilbert.", DISTILBERT_HEAD
        hidden = states(folder, ids, prefix, DISTILBERT)
    hidden = t.normed(norm, gelu(t.linear(dense, hidden)))
    logits = hidden @ t[f"{prefix}embeddings.word_embeddings.weight"].T + t[f"{output}.bias"]
    vector: Array = np.log1p(np.maximum(logits, 0)).max(axis=0)
    return vector
