"""Forward passes of encoders in float64, on the tensors of a model folder by the names of transformers."""

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from support.folders.model_folders import LAYERS, Folder
from support.kernels.float64 import (
    Array,
    alibi_slope,
    attention,
    gelu,
    layer_norm,
    position_bucket,
    rotate,
    softmax,
)

LAYER = "encoder.layer.{}."
BIAS = "encoder.relative_attention_bias.weight"


class FolderTensors:
    """Tensors of a folder in float64, and steps that use them."""

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
    """Return attention of ``[n, dim]``; `added` is what `attention` adds to the scores of each head."""
    n, width = len(q), q.shape[1] // heads
    q, k, v = (x.reshape(n, heads, width) for x in (q, k, v))
    return attention(q, k, v, width**-0.5, added).reshape(n, -1)


def rotated(x: Array, heads: int, base: float, factor: float = 1.0) -> Array:
    """Rotate each head by its position.

    With a factor (https://kexue.fm/archives/9706) the base is larger, and all frequencies are lower.
    """
    width = x.shape[1] // heads
    frequencies = (base * factor) ** (-np.arange(0, width, 2) / width) / factor ** (2 / width)
    turns = np.exp(1j * np.arange(len(x))[:, None] * frequencies)
    return rotate(x.reshape(len(x), heads, width), turns, halves=True).reshape(x.shape)


def states(folder: Folder, ids: npt.NDArray[np.int64], prefix: str, names: Mapping[str, str]) -> Array:
    """Return the states of BERT or a relative after the last layer.

    `names` are those of BERT's modules in the class. Its tensors and settings tell what a layer does.
    """
    config = folder.config
    t = FolderTensors(folder.tensors, prefix, config.get("layer_norm_eps", 1e-12))
    heads, n = config.get("num_attention_heads") or config["n_heads"], len(ids)
    x = t["embeddings.word_embeddings.weight"][ids]
    if "embeddings.token_type_embeddings.weight" in t:
        x = x + t["embeddings.token_type_embeddings.weight"][0]
    if "embeddings.position_embeddings.weight" in t:
        offset = config["pad_token_id"] + 1 if config.get("model_type") == "mpnet" else 0
        x = x + t["embeddings.position_embeddings.weight"][offset : offset + n]
    x = t.normed("embeddings.LayerNorm", x)
    after = np.arange(n)[None, :] - np.arange(n)[:, None]
    added = np.zeros((heads, n, n))
    if BIAS in t:
        added = t[BIAS][np.vectorize(position_bucket)(after)].transpose(2, 0, 1)
    if config.get("position_embedding_type") == "alibi":
        added = np.stack([-alibi_slope(head, heads) * np.abs(after) for head in range(heads)])
    for layer in range(LAYERS):
        at = names.get(LAYER, LAYER).format(layer)

        def of(name: str, at: str = at) -> str:
            return at + names.get(name, name)

        if f"{of('attention.self.query_key_value')}.weight" in t:
            q, k, v = np.split(t.linear(of("attention.self.query_key_value"), x), 3, axis=1)
        else:
            q, k, v = (t.linear(of(f"attention.self.{name}"), x) for name in ("query", "key", "value"))
        if f"{at}attention.self.layer_norm_q.weight" in t:
            q, k = (t.normed(f"{at}attention.self.layer_norm_{name}", y) for name, y in (("q", q), ("k", k)))
        if config.get("position_embedding_type") == "rope":
            factor = (config["rope_scaling"] or {"factor": 1.0})["factor"]
            q, k = (rotated(y, heads, config["rope_theta"], factor) for y in (q, k))
        read = t.linear(of("attention.output.dense"), attended(q, k, v, heads, added))
        block = t.normed(of("attention.output.LayerNorm"), x + read)
        x = t.normed(f"{at}layer_norm_1", x + block) if f"{at}layer_norm_1.weight" in t else block
        if f"{of('intermediate.gated')}.weight" in t:
            up, gate = np.split(t.linear(of("intermediate.gated"), x), 2, axis=1)
            inner = gelu(gate) * up
        else:
            inner = gelu(t.linear(of("intermediate.dense"), x))
        x = t.normed(of("output.LayerNorm"), x + t.linear(of("output.dense"), inner))
    return x


def nomic_moe_states(
    config: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], ids: npt.NDArray[np.int64]
) -> tuple[Array, Array]:
    """Return the states of nomic-embed-text-v2-moe after the last layer, and the router's least margins.

    A margin is the difference of a row's products for its last expert and the next one.
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
