"""The forward pass in float64 NumPy, written from the models' descriptions: the oracle of the engines.

Slow and plain. It shares no code with the package: files are read by `gguf.GGUFReader`, weights dequantized
by `gguf.quants`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from support.files.gguf_reader import GGUFReader
from support.kernels.float64 import (
    Array,
    alibi_slope,
    attention,
    clamped_silu,
    gated_delta_step,
    gelu,
    gelu_tanh,
    layer_norm,
    position_bucket,
    rms,
    rotate,
    scan_step,
    sigmoid,
    silu,
    soft_limit,
    softmax,
    visible,
)

GEMMA = ("gemma2", "gemma3", "gemma-embedding", "gemma4")
BERT = ("bert", "deberta-v2", "nomic-bert", "jina-bert-v2")
ENCODERS = (*BERT, "modern-bert", "eurobert", "privacy-filter")
BIASED = ("gpt2", "gptneox", "starcoder2", "phi2")
LAYER_NORM = (*BERT, "modern-bert", *BIASED, "stablelm", "cohere2")
EXACT_GELU = ("bert", "deberta-v2", "modern-bert", "jina-bert-v2", "gptneox")
TANH_GELU = (*GEMMA, "gpt2", "starcoder2", "phi2")
PARALLEL = ("phi2", "cohere2")  # with one norm for both blocks
# Names of the feed-forward's norm.
FEED_FORWARD_NORMS = {
    **dict.fromkeys(("qwen35", "privacy-filter"), "post_attention_norm"),
    **dict.fromkeys(PARALLEL, "attn_norm"),
}
WITHOUT_ROTATION = ("bert", "deberta-v2", "jina-bert-v2", "gpt2")
NORMS_ROWS_OF_QK = ("olmo2", "olmoe", "jina-bert-v2")  # all heads of a token together
ROTATES_HALVES = (
    *("qwen2", "qwen3", "phi3", "hunyuan-dense", "olmo2", "exaone4", "lfm2", "falcon-h1", "qwen35"),
    *("qwen3vl", "qwen3moe", "olmoe", "lfm2moe", "gptneox", "starcoder2", "phi2", "stablelm"),
    *("nomic-bert", "modern-bert", "eurobert", *GEMMA),
)


def _convolved(inputs: Array, taps: Array) -> Array:
    """Convolve each channel causally with its filter, ``[channels, taps]``, the current token's tap last."""
    convolved = np.zeros_like(inputs)
    for back in range(min(taps.shape[1], len(inputs))):
        convolved[back:] += inputs[: len(inputs) - back] * taps[:, taps.shape[1] - 1 - back]
    return convolved


def _state(inputs: Array, taps: Array, matrices: npt.ArrayLike = ()) -> Array:
    """Return the state after a text: the last inputs of a filter, and the matrices of a recurrence."""
    before = np.zeros((taps.shape[1] - 1, inputs.shape[1]))
    last = np.concatenate([before, inputs])[len(inputs) :]
    return np.concatenate([last.ravel(), np.ravel(matrices)])


def _of_length_1(heads: Array) -> Array:
    return heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True) + 1e-6)


def dequantized(rows: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Return the values of rows of blocks, all at once: `gguf` would process 16 rows at a time."""
    values: npt.NDArray[np.float32] = quants.dequantize(rows.reshape(1, -1), kind)
    return values.reshape(*rows.shape[:-1], -1)


@dataclass(frozen=True)
class Result:
    """Results of a forward pass."""

    logits: Array  # ``[n, vocab]``
    # After the last layer, before and after the output norm, ``[n, dim]``.
    residual: Array
    hidden: Array
    # A session's contents, by layer: rotated keys and values, ``[n, kv_heads, key_dim]`` and
    # ``[n, kv_heads, value_dim]``, if the layer has its own; then the state of its recurrence.
    kept: list[Array]

    def log_probs(self, tokens: npt.ArrayLike) -> Array:
        """Return the log probability of each token given the previous ones, ``[n - 1]``."""
        targets = np.asarray(tokens)[1:]
        return np.log(softmax(self.logits)[np.arange(len(targets)), targets])


class ReferenceModel:
    """A model of any supported architecture."""

    def __init__(
        self,
        path: str | Path,  # GGUF file
        # Type to which keys and values are rounded, as in a KV cache of that type; ``"q8_0"`` selects blocks.
        kv_dtype: npt.DTypeLike | Literal["q8_0"] = np.float64,
        # Number of positions, which selects the factors of LongRoPE; None: the file's.
        context: int | None = None,
    ) -> None:
        reader = GGUFReader(path)
        self.kv_dtype = kv_dtype
        self._context = context
        self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        self.tensors: dict[str, Array] = {
            t.name: dequantized(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        self.architecture: str = self.metadata["general.architecture"]
        self.scale: dict[str, float] = {
            name: self.metadata.get(f"{self.architecture}.{name}", 1.0)
            for name in ("embedding_scale", "residual_scale", "logit_scale")
        }
        self.dim: int = self._key("embedding_length")
        self.n_layers: int = self._key("block_count")
        self.n_heads: int = self._key("attention.head_count")
        kv_heads: int | list[int] = self._key("attention.head_count_kv", self.n_heads)
        self.kv_heads_of_layers = [kv_heads] * self.n_layers if isinstance(kv_heads, int) else kv_heads
        self.n_kv_heads: int = max(self.kv_heads_of_layers)
        head_dim = self.dim // max(self.n_heads, 1)
        self.key_dim: int = self._key("attention.key_length", head_dim)
        self.value_dim: int = self._key("attention.value_length", head_dim)
        layer_norm = self.architecture in LAYER_NORM
        self.norm_eps: float = self._key(f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon")
        self.rope_dim: int = self._key("rope.dimension_count", self.key_dim)
        # By layer, the relative margin of the score of a token's last expert over the next best score.
        self.route_margins: dict[int, Array] = {}
        self._split()

    def forward(self, tokens: npt.ArrayLike) -> Result:
        """Run all of `tokens` from position 0."""
        ids = np.asarray(tokens)
        x = self.tensors["token_embd.weight"][ids]  # [n, dim]
        x = x * self.scale["embedding_scale"]
        if self.architecture in GEMMA:
            x = x * math.sqrt(self.dim)
        if not self.architecture.startswith("lfm2"):  # whose output norm has this name
            x = self._norm("token_embd_norm", x + self._positions_and_types(ids))
        if "token_embd_proj.weight" in self.tensors:
            x = x @ self.tensors["token_embd_proj.weight"].T + self.tensors["token_embd_proj.bias"]
        inputs = self._inputs_of_layers(ids, x)
        kept: list[Array] = []
        own: dict[bool, tuple[Array, Array]] = {}  # of the last layer with and without a window
        for layer in range(self.n_layers):
            projected: Array = np.zeros_like(x)
            state: list[Array] = []
            if f"blk.{layer}.shortconv.in_proj.weight" in self.tensors:
                projected, *state = self._short_convolution(layer, x)
            if f"blk.{layer}.ssm_in.weight" in self.tensors:
                projected, *state = self._state_space(layer, x)
            if self._is_delta(layer):
                projected, *state = self._gated_delta(layer, x)
            elif self.kv_heads_of_layers[layer] > 0:
                q, k, v, gate = self._project(layer, x)
                if layer < self.n_layers - self._key("attention.shared_kv_layers", 0):
                    kept += [k, v]
                    own[self._is_windowed(layer)] = k, v
                k, v = own[self._is_windowed(layer)]
                attended = gate * self._attention(layer, q, self._cached(k), self._cached(v))
                projected = projected + self._linear(layer, "attn_output", attended)
            kept += state
            added = self.scale["residual_scale"]
            if self.architecture not in FEED_FORWARD_NORMS:
                projected = self._normed(layer, "post_attention_norm", projected)
            stream = x + added * projected
            stream = self._normed(layer, "attn_output_norm", stream)
            if f"blk.{layer}.attn_norm_2.weight" in self.tensors:
                stream = self._normed(layer, "attn_norm_2", x + stream)
            # Attention and feed-forward of a layer may read the same input.
            parallel = self._key("use_parallel_residual", self.architecture in PARALLEL)
            feed_forward_input = x if parallel else stream
            x = stream
            if any(f"blk.{layer}.{name}.weight" in self.tensors for name in ("ffn_up", "ffn_up_exps")):
                x = x + added * self._normed(
                    layer, "post_ffw_norm", self._feed_forward(layer, feed_forward_input)
                )
            x = self._normed(layer, "layer_output_norm", x)
            if inputs is not None:
                gated = self._activated(self._linear(layer, "inp_gate", x)) * inputs[:, layer]
                x = x + self._normed(layer, "post_norm", self._linear(layer, "proj", gated))
            x = x * self.tensors.get(f"blk.{layer}.layer_output_scale.weight", 1.0)
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        hidden = self._norm("token_embd_norm" if self.architecture.startswith("lfm2") else "output_norm", x)
        if self.architecture in ENCODERS:
            logits = np.empty((len(x), 0))
        else:
            scale = self.scale["logit_scale"]
            scale = scale if self.architecture == "cohere2" else 1 / scale
            logits = scale * (hidden @ head.T) + self.tensors.get("output.bias", 0.0)
            logits = soft_limit(logits, self._soft_cap("final_logit_softcapping"))
        return Result(logits, x, hidden, kept)

    def pooled(self, tokens: npt.ArrayLike) -> Array:
        """Return the vector of a text, or the logits of its classes: ``[dim]`` or ``[classes]``."""
        states = self.forward(tokens).hidden
        pooling = self._key("pooling_type")
        x: Array = {1: states.mean(axis=0), 2: states[0], 3: states[-1], 4: states[-1]}[pooling]
        for name in ("dense_2.weight", "dense_3.weight", "cls.output.weight"):
            if name in self.tensors:
                x = self.tensors[name] @ x
        return x

    def _inputs_of_layers(self, ids: npt.NDArray[Any], x: Array) -> Array | None:
        """Compute the layers' inputs from the tokens themselves, ``[n, layers, width]``; None without any."""
        table = self.tensors.get("per_layer_token_embd.weight")
        if table is None:
            return None
        width = table.shape[1] // self.n_layers
        shape = (len(ids), self.n_layers, width)
        projected = (x @ self.tensors["per_layer_model_proj.weight"].T) / math.sqrt(self.dim)
        normed = self._norm("per_layer_proj_norm", projected.reshape(shape))
        return (normed + math.sqrt(width) * table[ids].reshape(shape)) / math.sqrt(2)

    def _positions_and_types(self, ids: npt.NDArray[Any]) -> Array | float:
        """Return embeddings of positions and of segments, which end with a separator, ``[n, dim]``."""
        added: Array | float = 0.0
        if "position_embd.weight" in self.tensors:
            added = added + self.tensors["position_embd.weight"][: len(ids)]
        if "token_types.weight" in self.tensors:
            table = self.tensors["token_types.weight"]
            separators = np.cumsum(ids == self.metadata.get("tokenizer.ggml.seperator_token_id", -1))
            added = added + table[np.minimum(np.concatenate([[0], separators[:-1]]), len(table) - 1)]
        return added

    def _short_convolution(self, layer: int, x: Array) -> tuple[Array, Array]:
        """Convolve the gated input with a causal filter per channel, and gate the result: ``[n, dim]``.

        Also return the state.
        """
        h = self._normed(layer, "attn_norm", x)
        before, after, inner = np.split(h @ self._weight(layer, "shortconv.in_proj").T, 3, axis=1)
        products, taps = before * inner, self._weight(layer, "shortconv.conv")
        mixed: Array = (after * _convolved(products, taps)) @ self._weight(layer, "shortconv.out_proj").T
        return mixed, _state(products, taps)

    def _state_space(self, layer: int, x: Array) -> tuple[Array, Array]:
        """Mamba-2, ``[n, dim]``, and its state."""
        inner, size = self._key("ssm.inner_size"), self._key("ssm.state_size")
        heads, groups = self._key("ssm.time_step_rank"), self._key("ssm.group_count")
        n, mixed = len(x), inner + 2 * groups * size
        projected = self._normed(layer, "attn_norm", x) @ self._weight(layer, "ssm_in").T
        gate, products, steps = np.split(projected, [inner, inner + mixed], axis=1)
        taps = self._weight(layer, "ssm_conv1d")
        convolved = _convolved(products, taps)
        convolved = silu(convolved + self.tensors.get(f"blk.{layer}.ssm_conv1d.bias", 0.0))
        u, b, c = np.split(convolved, [inner, inner + groups * size], axis=1)
        u = u.reshape(n, heads, inner // heads)
        # Consecutive heads share b and c of a group.
        b, c = (np.repeat(part.reshape(n, groups, size), heads // groups, axis=1) for part in (b, c))
        steps = steps + self.tensors[f"blk.{layer}.ssm_dt.bias"]
        a, skip = (self.tensors[f"blk.{layer}.ssm_{name}"].reshape(heads) for name in "ad")
        state, y = np.zeros((heads, size, inner // heads)), np.empty_like(u)
        for t in range(n):
            state, y[t] = scan_step(state, u[t], b[t], c[t], steps[t], a, skip)
        gated = (y.reshape(n, inner) * silu(gate)).reshape(n, groups, -1)
        weight = self.tensors.get(f"blk.{layer}.ssm_norm.weight")
        if weight is not None:
            gated = rms(gated, self.norm_eps) * weight.reshape(groups, -1)
        out: Array = gated.reshape(n, inner) @ self._weight(layer, "ssm_out").T
        return out, _state(products, taps, state)

    def _is_delta(self, layer: int) -> bool:
        return f"blk.{layer}.ssm_alpha.weight" in self.tensors

    def _gated_delta(self, layer: int, x: Array) -> tuple[Array, Array]:
        """Gated delta rule, ``[n, dim]``, and its state."""
        n, heads, groups = len(x), self._key("ssm.time_step_rank"), self._key("ssm.group_count")
        keys, width = self._key("ssm.state_size"), self._key("ssm.inner_size") // heads
        h = self._normed(layer, "attn_norm", x)
        inputs, taps = self._linear(layer, "attn_qkv", h), self._weight(layer, "ssm_conv1d")
        mixed = self._activated(_convolved(inputs, taps))
        q, k, v = np.split(mixed, [groups * keys, 2 * groups * keys], axis=1)
        q, k = (_of_length_1(part.reshape(n, groups, keys)) for part in (q, k))
        # Value heads that share a key head are stored `groups` apart.
        q, k = (np.tile(part, (1, heads // groups, 1)) for part in (q / math.sqrt(keys), k))
        v = v.reshape(n, heads, width)
        alpha = self._linear(layer, "ssm_alpha", h) + self.tensors[f"blk.{layer}.ssm_dt.bias"]
        decay = np.exp(self.tensors[f"blk.{layer}.ssm_a"] * np.log1p(np.exp(alpha)))
        beta = sigmoid(self._linear(layer, "ssm_beta", h))
        state, out = np.zeros((heads, keys, width)), np.empty((n, heads, width))
        for t in range(n):
            state, out[t] = gated_delta_step(state, q[t], k[t], v[t], decay[t], beta[t])
        gate = self._activated(self._linear(layer, "attn_gate", h))
        gated = self._normed(layer, "ssm_norm", out).reshape(n, -1) * gate
        return self._linear(layer, "ssm_out", gated), _state(inputs, taps, state)

    def _project(self, layer: int, x: Array) -> tuple[Array, Array, Array, Array | float]:
        """Compute queries, keys and values as attention reads them, each ``[n, heads, head_dim]``.

        Also return the factors of the output, ``[n, heads * head_dim]``.
        """
        h = self._normed(layer, "attn_norm", x)
        gate: Array | float = 1.0
        heads = []
        kv_heads, key_dim, value_dim = self.kv_heads_of_layers[layer], self.key_dim, self.value_dim
        if self.architecture == "gemma4" and self._is_windowed(layer):
            key_dim = value_dim = self._key("attention.key_length_swa")
        for name, count, width in (
            ("attn_q", self.n_heads, key_dim),
            ("attn_k", kv_heads, key_dim),
            ("attn_v", kv_heads, value_dim),
        ):
            if f"blk.{layer}.{name}.weight" not in self.tensors:  # another layer's keys and values are used
                heads.append(np.zeros((len(x), count, width)))
                continue
            projected = self._linear(layer, name, h)
            if self.architecture == "qwen35" and name == "attn_q":  # each head, then its gate
                projected, gate = np.split(projected.reshape(len(x), count, 2 * width), 2, axis=2)
                gate = sigmoid(gate).reshape(len(x), -1)
            if self.architecture in NORMS_ROWS_OF_QK:
                projected = self._normed(layer, f"{name}_norm", projected)
            heads.append(projected.reshape(len(x), count, width))
        q, k = (self._normed_and_rotated(layer, n, h) for n, h in zip("qk", heads, strict=False))
        v = heads[2]
        if self.architecture == "gemma4":
            v = rms(v, self.norm_eps)
        return q, k, v, gate

    def _normed_and_rotated(self, layer: int, name: str, heads: Array) -> Array:
        if self.architecture in NORMS_ROWS_OF_QK:
            return self._rotated(layer, heads)
        if self.architecture == "hunyuan-dense":
            return self._normed(layer, f"attn_{name}_norm", self._rotated(layer, heads))
        return self._rotated(layer, self._normed(layer, f"attn_{name}_norm", heads))

    def _attention(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Attention, ``[n, n_heads * value_dim]``."""
        position = np.arange(len(q))
        distance = position[:, None] - position[None, :]
        window = self._window if self._is_windowed(layer) else 0
        seen = visible(distance, window, self._key("attention.causal", True))
        hidden = np.where(seen, 0.0, -np.inf)
        added = (hidden + self._score_bias(layer, head, q, k, distance) for head in range(self.n_heads))
        cap = self._soft_cap("attn_logit_softcapping")
        sinks = self.tensors.get(f"blk.{layer}.attn_sinks.weight")
        return attention(q, k, v, self._attention_scale(), added, cap=cap, sinks=sinks).reshape(len(q), -1)

    def _score_bias(
        self, layer: int, head: int, q: Array, k: Array, distance: npt.NDArray[np.int64]
    ) -> Array | float:
        """Return the addends of a head's scores for the distances of its keys."""
        bias: Array | float = 0.0
        if self.architecture == "jina-bert-v2":
            bias = -alibi_slope(head, self.n_heads) * np.abs(distance)
        if "attn_rel_b.weight" in self.tensors:
            bias = self.tensors["attn_rel_b.weight"][np.vectorize(position_bucket)(-distance), head]
        if "attn_rel_row.weight" in self.tensors:
            bias = self._attention_scale() * self._relative(layer, head, q, k, distance)
        return bias

    def _soft_cap(self, key: str) -> float:
        usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return float(self._key(key, usual[key] if self.architecture == "gemma2" else 0.0))

    def _relative(self, layer: int, head: int, q: Array, k: Array, distance: npt.NDArray[np.int64]) -> Array:
        """Products with keys and queries of relative positions (arXiv:2006.03654), ``[n, n]``."""
        row_of = self.tensors["attn_rel_row.weight"]
        rows = row_of[distance + len(row_of) // 2].astype(int)
        keys, queries = (
            self._weight(layer, f"attn_rel_{name}").reshape(-1, self.n_heads, self.key_dim)[:, head][rows]
            for name in "kq"
        )
        by_query = np.einsum("id,ijd->ij", q[:, head], keys)
        return by_query + np.einsum("jd,ijd->ij", k[:, head], queries)

    def _feed_forward(self, layer: int, x: Array) -> Array:
        name = FEED_FORWARD_NORMS.get(self.architecture, "ffn_norm")
        h = self._normed(layer, name, x)
        if f"blk.{layer}.ffn_gate_inp.weight" in self.tensors:
            return self._experts(layer, h)
        up = self._linear(layer, "ffn_up", h)
        if f"blk.{layer}.ffn_gate.weight" in self.tensors:
            up = self._activated(self._linear(layer, "ffn_gate", h)) * up
        else:
            up = self._activated(up)
        return self._linear(layer, "ffn_down", up)

    def _experts(self, layer: int, h: Array) -> Array:
        """Add the outputs of the experts with the best scores, weighted by these: ``[n, dim]``."""
        products, used = self._linear(layer, "ffn_gate_inp", h), self._key("expert_used_count")
        scores = sigmoid(products) if self.architecture == "lfm2moe" else softmax(products)
        biased = scores + self.tensors.get(f"blk.{layer}.exp_probs_b.bias", 0.0)
        chosen = np.argsort(-biased, axis=1, kind="stable")[:, :used]
        ordered = np.concatenate([-np.sort(-biased, axis=1), np.zeros((len(h), 1))], axis=1)
        self.route_margins[layer] = 1 - ordered[:, used] / ordered[:, used - 1]
        factors = np.take_along_axis(scores, chosen, axis=1)
        if self.architecture == "lfm2moe":
            factors = factors / (factors.sum(axis=1, keepdims=True) + 1e-6)
        elif self.architecture != "olmoe":
            factors = factors / factors.sum(axis=1, keepdims=True)
        factors = factors * self._key("expert_weights_scale", 1.0)
        out = np.zeros_like(h)
        for expert in range(scores.shape[1]):
            rows, places = np.nonzero(chosen == expert)
            inner = self._gated(*(self._of_expert(layer, name, expert, h[rows]) for name in ("gate", "up")))
            out[rows] += factors[rows, places][:, None] * self._of_expert(layer, "down", expert, inner)
        if f"blk.{layer}.ffn_up_shexp.weight" in self.tensors:
            gate, up = (self._linear(layer, f"ffn_{name}_shexp", h) for name in ("gate", "up"))
            out = out + self._linear(layer, "ffn_down_shexp", silu(gate) * up)
        return out

    def decided(self, margin: float) -> npt.NDArray[np.bool_]:
        """Return whether each token's experts have at least this margin in every layer, for the last text."""
        smallest: Array = np.min(list(self.route_margins.values()), axis=0)
        return smallest >= margin

    def _of_expert(self, layer: int, name: str, expert: int, x: Array) -> Array:
        bias = self.tensors.get(f"blk.{layer}.ffn_{name}_exps.bias")
        product: Array = x @ self._weight(layer, f"ffn_{name}_exps")[expert].T
        return product if bias is None else product + bias[expert]

    def _gated(self, gate: Array, up: Array) -> Array:
        return clamped_silu(gate, up) if self.architecture == "privacy-filter" else silu(gate) * up

    def _activated(self, x: Array) -> Array:
        stated: str = self._key("hidden_activation", "")
        if self.architecture in EXACT_GELU and stated in ("", "gelu"):
            return gelu(x)
        if self.architecture in TANH_GELU or stated == "gelu_pytorch_tanh":
            return gelu_tanh(x)
        return silu(x)

    def _rotated(self, layer: int, x: Array) -> Array:
        """Rotary embedding of ``[n, heads, key_dim]`` at positions 0 to n."""
        if self.architecture in WITHOUT_ROTATION or (self.architecture == "smollm3" and layer % 4 == 3):
            return x
        if self.architecture in ("exaone4", "cohere2") and self._window and not self._is_windowed(layer):
            return x
        if self.architecture.startswith("granite") and not self._key("rope.scaling.finetuned", True):
            return x
        frequencies, magnitude = self._frequencies(layer)
        turns = magnitude * np.exp(1j * np.arange(len(x))[:, None] * frequencies)  # [n, rope_dim / 2]
        return rotate(x, turns, self.architecture in ROTATES_HALVES)

    def _frequencies(self, layer: int) -> tuple[Array, float]:
        """Radians per position of each pair, ``[rope_dim / 2]``, and the factor of cos and sin."""
        own_base = (*GEMMA[1:], "modern-bert")
        windowed = self.architecture in own_base and self._is_windowed(layer)
        base: float = 10000.0 if windowed else self._key("rope.freq_base", 10000.0)
        windowed = windowed or (self.architecture == "olmo2" and self._is_windowed(layer))
        pairs = np.arange(self._rope_dim(layer) // 2)
        frequencies: Array = base ** (-2.0 * pairs / self._rope_dim(layer))
        if "rope_freqs.weight" in self.tensors and not (self.architecture == "gemma4" and windowed):
            frequencies = frequencies / self.tensors["rope_freqs.weight"]
        if "rope_factors_long.weight" in self.tensors:  # LongRoPE, arXiv:2402.13753
            context = self._context or self._key("context_length")
            long = context > self._key("rope.scaling.original_context_length")
            factors = self.tensors[f"rope_factors_{'long' if long else 'short'}.weight"]
            return frequencies / factors, self._key("rope.scaling.attn_factor")
        kind = "none" if windowed else self._key("rope.scaling.type", "none")
        factor = self._key("rope.scaling.factor", 1.0)
        if kind in ("none", "linear"):
            return frequencies / (factor if kind == "linear" else 1.0), 1.0
        # YaRN, arXiv:2309.00071: pairs that turn often within the original context keep their frequency,
        # those that turn seldom are interpolated, and a ramp blends the pairs in between.
        original = self._key("rope.scaling.original_context_length")

        def pair_of(rotations: float) -> float:
            wavelength: float = original / (rotations * 2 * math.pi)
            return self.rope_dim * math.log(wavelength) / (2 * math.log(base))

        low = max(math.floor(pair_of(32.0)), 0)
        high = min(math.ceil(pair_of(1.0)), self.rope_dim - 1)
        interpolated = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        blended = frequencies * (1 - interpolated) + frequencies / factor * interpolated
        multiplier = self._key("rope.scaling.yarn_log_multiplier", 0.0)
        return blended, (1 + 0.1 * math.log(factor)) / (1 + 0.1 * multiplier * math.log(factor))

    def _rope_dim(self, layer: int) -> int:
        if self.architecture != "gemma4" or not self._is_windowed(layer):
            return self.rope_dim
        return int(self._key("rope.dimension_count_swa"))

    def _is_windowed(self, layer: int) -> bool:
        pattern = self._key("attention.sliding_window_pattern", ())
        if isinstance(pattern, list):
            return bool(pattern[layer])
        if self.architecture in ("starcoder2", "privacy-filter", "llama", "phi3"):
            return self._window > 0
        if self.architecture in ("exaone4", "olmo2", "cohere2"):
            return self._window > 0 and layer % 4 != 3
        if self.architecture == "modern-bert":
            return layer % 3 != 0
        if self.architecture == "gemma2":
            return layer % 2 == 0
        return self.architecture in GEMMA and layer % 6 != 5

    @property
    def _window(self) -> int:
        return int(self._key("attention.sliding_window", 0))

    def _attention_scale(self) -> float:
        default = 1.0 if self.architecture == "gemma4" else self.key_dim**-0.5
        return float(self._key("attention.scale", default))

    def _split(self) -> None:
        """Split stacked matrices: q, k and v, and gate and up."""
        q, k = self.n_heads * self.key_dim, self.n_kv_heads * self.key_dim
        ffn = self._key("feed_forward_length")
        if self.architecture == "gemma4":  # its matrices are separate
            return
        for layer in range(self.n_layers):
            at = f"blk.{layer}."
            for end in () if self._is_delta(layer) else ("weight", "bias"):
                whole = self.tensors.pop(f"{at}attn_qkv.{end}", None)
                if whole is not None:
                    rows = zip("qkv", np.split(whole, [q, q + k]), strict=True)
                    self.tensors |= {f"{at}attn_{name}.{end}": part for name, part in rows}
            gate_up = self.tensors.get(f"{at}ffn_up.weight")
            if gate_up is not None and len(gate_up) == 2 * ffn:
                gate, up = np.split(gate_up, 2)
                if f"{at}attn_norm_2.weight" in self.tensors:  # jina-bert-v2 for code
                    gate, up = up, gate
                self.tensors |= {f"{at}ffn_gate.weight": gate, f"{at}ffn_up.weight": up}

    def _cached(self, rows: Array) -> Array:
        if self.kv_dtype == "q8_0":
            blocks = quants.quantize(rows.astype(np.float32), GGMLQuantizationType.Q8_0)
            return quants.dequantize(blocks, GGMLQuantizationType.Q8_0).astype(np.float64)
        return rows.astype(self.kv_dtype).astype(np.float64)

    def _normed(self, layer: int, name: str, x: Array) -> Array:
        return self._norm(f"blk.{layer}.{name}", x)

    def _norm(self, name: str, x: Array) -> Array:
        """Apply the norm of that name, if the model has one."""
        weight = self.tensors.get(f"{name}.weight", self.tensors.get(name))
        if weight is None:
            return x
        normed = (layer_norm if self.architecture in LAYER_NORM else rms)(x, self.norm_eps) * weight
        return normed + self.tensors.get(f"{name}.bias", 0.0)

    def _linear(self, layer: int, name: str, x: Array) -> Array:
        y: Array = x @ self._weight(layer, name).T
        return y + self.tensors.get(f"blk.{layer}.{name}.bias", 0.0)

    def _weight(self, layer: int, name: str) -> Array:
        return self.tensors[f"blk.{layer}.{name}.weight"]

    def _key(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        assert value is not None, name
        return value
