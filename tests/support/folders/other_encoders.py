"""Folders of encoders that transformers does not support, and their forward passes in float64.

They are Jina's BERT for code and nomic-embed-text-v2-moe. A pass reads tensors by their names in the folder.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support.folders import model_folders
from support.folders.encoder_folders import CONTEXT
from support.folders.model_folders import (
    DIM,
    FFN,
    HEADS,
    LAYERS,
    Folder,
    Shapes,
    filled,
    linear,
    norm,
    repeated,
    weights,
)
from support.kernels.float64 import Array, alibi_slope, attention, gelu, layer_norm, rotate, softmax


class FolderTensors:
    """Tensors of a folder in float64, and the steps of a pass."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]], prefix: str = "", eps: float = 1e-12) -> None:
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self._prefix = prefix
        self._eps = eps

    def __getitem__(self, name: str) -> Array:
        return self._tensors[self._prefix + name]

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def linear(self, name: str, x: Array) -> Array:
        """Multiply by a matrix, and add its bias if it has one."""
        y: Array = x @ self[f"{name}.weight"].T
        return y + self._tensors.get(f"{self._prefix}{name}.bias", 0.0)

    def normed(self, name: str, x: Array) -> Array:
        return layer_norm(x, self._eps) * self[f"{name}.weight"] + self[f"{name}.bias"]


def attended(q: Array, k: Array, v: Array, heads: int, added: Iterable[Array | float] = repeat(0.0)) -> Array:
    """Return attention of ``[n, dim]``; `added` is added to the scores of each head."""
    n, width = len(q), q.shape[1] // heads
    q, k, v = (x.reshape(n, heads, width) for x in (q, k, v))
    return attention(q, k, v, width**-0.5, added).reshape(n, -1)


def rotated(x: Array, heads: int, base: float) -> Array:
    """Rotate each head by its position."""
    width = x.shape[1] // heads
    frequencies = base ** (-np.arange(0, width, 2) / width)
    turns = np.exp(1j * np.arange(len(x))[:, None] * frequencies)
    return rotate(x.reshape(len(x), heads, width), turns, halves=True).reshape(x.shape)


def _embeddings(vocab: int, types: int, dim: int) -> Shapes:
    tables = {"word_embeddings": (vocab, dim), "token_type_embeddings": (types, dim)}
    return weights("embeddings.", tables)


def jina_code(path: Path) -> Folder:
    """Make a folder of the class of jina-embeddings-v2-base-code."""
    made = model_folders.bert(path)
    made.config |= {
        "architectures": ["JinaBertForMaskedLM"],
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
    }
    layer: Shapes = {}
    for name in ("self.query", "self.key", "self.value", "output.dense"):
        layer |= linear(f"attention.{name}")
    for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "attention.output.LayerNorm"):
        layer |= norm(name)
    layer |= norm("layer_norm_1") | norm("layer_norm_2") | linear("mlp.down_layer", DIM, FFN)
    layer |= {"mlp.up_gated_layer.weight": (2 * FFN, DIM)}
    shapes = _embeddings(made.config["vocab_size"], 2, DIM) | norm("embeddings.LayerNorm")
    shapes |= repeated("encoder.layer.{}.", layer)
    made.tensors = filled({f"bert.{name}": shape for name, shape in shapes.items()})
    return made


def jina_code_states(folder: Folder, ids: npt.NDArray[np.int64]) -> Array:
    """Return the hidden states after the last layer."""
    t, n = FolderTensors(folder.tensors, "bert."), len(ids)
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = t.normed("embeddings.LayerNorm", x)
    distances = np.abs(np.arange(n)[None, :] - np.arange(n)[:, None])
    added = np.stack([-alibi_slope(head, HEADS) * distances for head in range(HEADS)])
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        q, k, v = (t.linear(f"{at}attention.self.{name}", x) for name in ("query", "key", "value"))
        q, k = (t.normed(f"{at}attention.self.layer_norm_{name}", y) for name, y in (("q", q), ("k", k)))
        read = t.linear(f"{at}attention.output.dense", attended(q, k, v, HEADS, added))
        block = t.normed(f"{at}attention.output.LayerNorm", x + read)
        x = t.normed(f"{at}layer_norm_1", x + block)
        up, gate = np.split(t.linear(f"{at}mlp.up_gated_layer", x), 2, axis=1)
        x = t.normed(f"{at}layer_norm_2", x + t.linear(f"{at}mlp.down_layer", gelu(gate) * up))
    return x


def nomic_moe(
    path: Path, dim: int, heads: int, ffn: int, layers: int, experts: int, used: int, every: int = 2
) -> Folder:
    """Make a folder of nomic-embed-text-v2-moe, with experts in some layers."""
    made = model_folders.bert(path)
    made.config = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": dim,
        "n_head": heads,
        "n_inner": ffn,
        "n_layer": layers,
        "n_positions": CONTEXT,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu",
        "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "num_experts": experts,
        "moe_top_k": used,
        "moe_every_n_layers": every,
        "moe_normalize_expert_weights": False,
        "type_vocab_size": 1,
        "vocab_size": made.config["vocab_size"],
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        **dict.fromkeys(("causal", "prenorm", "expert_choice_router"), False),
    }
    shapes = _embeddings(made.config["vocab_size"], 1, dim) | norm("emb_ln", dim)
    for layer in range(layers):
        at = f"encoder.layers.{layer}."
        shapes |= linear(f"{at}attn.Wqkv", 3 * dim, dim) | linear(f"{at}attn.out_proj", dim, dim)
        shapes |= norm(f"{at}norm1", dim) | norm(f"{at}norm2", dim)
        if layer % every == 1:
            shapes |= {f"{at}mlp.experts.mlp.{name}": (experts * ffn, dim) for name in ("w1", "w2")}
            shapes |= {f"{at}mlp.experts.bias": (dim,), f"{at}mlp.router.layer.weight": (experts, dim)}
        else:
            shapes |= linear(f"{at}mlp.fc1", ffn, dim) | linear(f"{at}mlp.fc2", dim, ffn)
    made.tensors = filled(shapes)
    return made


def nomic_moe_states(
    config: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], ids: npt.NDArray[np.int64]
) -> tuple[Array, Array]:
    """Return the states of nomic-embed-text-v2-moe after the last layer, and the router's least margins.

    A margin is the difference between a row's products for its last expert and for the next one.
    The router's scores are a softmax over all experts. The factors of the chosen experts are not normalized,
    and one bias is added to the sum.
    """
    t = FolderTensors(tensors, eps=config["layer_norm_epsilon"])
    heads, experts, used = config["n_head"], config["num_experts"], config["moe_top_k"]
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.token_type_embeddings.weight"][0]
    x = t.normed("emb_ln", x)
    margins = np.full(len(x), np.inf)
    for layer in range(config["n_layer"]):
        at = f"encoder.layers.{layer}."
        q, k, v = np.split(t.linear(f"{at}attn.Wqkv", x), 3, axis=1)
        q, k = (rotated(y, heads, config["rotary_emb_base"]) for y in (q, k))
        x = t.normed(f"{at}norm1", x + t.linear(f"{at}attn.out_proj", attended(q, k, v, heads)))
        if layer % config["moe_every_n_layers"] != 1:
            x = t.normed(f"{at}norm2", x + t.linear(f"{at}mlp.fc2", gelu(t.linear(f"{at}mlp.fc1", x))))
            continue
        first, second = (np.split(t[f"{at}mlp.experts.mlp.{name}"], experts) for name in ("w1", "w2"))
        products = t.linear(f"{at}mlp.router.layer", x)
        last, following = -np.sort(-products, axis=1)[:, used - 1 : used + 1].T
        margins = np.minimum(margins, last - following)
        scores = softmax(products)
        read = np.tile(t[f"{at}mlp.experts.bias"], (len(x), 1))
        for row, expert in np.argwhere(np.argsort(np.argsort(-scores, axis=1), axis=1) < used):
            read[row] += scores[row, expert] * (gelu(first[expert] @ x[row]) @ second[expert])
        x = t.normed(f"{at}norm2", x + read)
    return x, margins


NOMIC_MOE: dict[str, Callable[[Path], Folder]] = {
    "nomic moe": partial(nomic_moe, dim=32, heads=4, ffn=64, layers=4, experts=8, used=2),
    "nomic moe, odd": partial(nomic_moe, dim=72, heads=3, ffn=88, layers=3, experts=5, used=3),
    "nomic moe, one of three": partial(
        nomic_moe, dim=48, heads=2, ffn=40, layers=5, experts=3, used=1, every=3
    ),
}
