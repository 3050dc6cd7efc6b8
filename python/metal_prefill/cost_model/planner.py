"""The dispatches of the Metal engine for any shape, wherever there is no Metal to ask.

The functions have the names and the arithmetic of `cpp/metal/ops.mm`, `forward_pass.mm` and
`forward_plan.mm`. A test holds their result equal to what the engine itself encodes
(`tests/metal_engine/test_plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from metal_prefill.architecture import ModelConfig, collect_tensors, read_config
from metal_prefill.dispatches import Dispatch
from metal_prefill.errors import UnsupportedModelError
from metal_prefill.gguf_file import GGUFFile

SIMD = 32
MULTI_TOKEN_TILE = MULTI_TOKEN_ROWS = 8
NARROW, WIDE = 32, 64  # tokens and rows of a matmul's tile
MATMUL_THREADS = 128
DECODE_SIMDGROUPS = ROPE_SIMDGROUPS = 8
PREFILL_KEYS = 32


@dataclass(frozen=True)
class Tuning:
    """Sizes that depend on the GPU: a row of `kTunings` in `cpp/metal/tuning.h`."""

    few_tokens: int = 8
    wide_groups: int = 40
    matvec_threads: int = 12288
    matvec_group: int = 64
    split_keys: int = 128
    max_splits: int = 32
    prefill_simdgroups: int = 4
    argmax_groups: int = 32


TUNINGS = {
    9: Tuning(matvec_threads=16384),
    8: Tuning(),
    7: Tuning(wide_groups=32, prefill_simdgroups=2),
}


@dataclass(frozen=True)
class Matrix:
    """Type, as kernels are named by it, and dimensions of a weight matrix."""

    kind: str
    rows: int
    cols: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind.upper()]]
        return int(self.cols // values * size)


@dataclass(frozen=True)
class LayerShape:
    """Matrices of a layer, and what else it has."""

    wq: Matrix
    wk: Matrix
    wv: Matrix
    wo: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    has_bias: bool = False
    has_q_norm: bool = False
    has_k_norm: bool = False
    post_attn_norm: bool = False
    post_ffn_norm: bool = False


@dataclass(frozen=True)
class Shape:
    """All that the dispatches of a model depend on."""

    config: ModelConfig
    embedding: Matrix
    output: Matrix
    layers: tuple[LayerShape, ...]


def shape_of(gguf: GGUFFile) -> Shape:
    """Return the shape of a model file.

    Raises
    ------
    GGUFError, UnsupportedModelError
        As for a model that is opened.
    """
    config = read_config(gguf)
    found = {(role, layer): tensor for role, layer, tensor in collect_tensors(gguf, config)}

    def matrix(role: str, layer: int) -> Matrix:
        tensor = found[role, layer]
        return Matrix(tensor.type_name.lower(), *tensor.shape)

    layers = tuple(
        LayerShape(
            wq=matrix("wq", i),
            wk=matrix("wk", i),
            wv=matrix("wv", i),
            wo=matrix("wo", i),
            gate=matrix("w_gate", i),
            up=matrix("w_up", i),
            down=matrix("w_down", i),
            has_bias=any((role, i) in found for role in ("bq", "bk", "bv")),
            has_q_norm=("q_norm", i) in found,
            has_k_norm=("k_norm", i) in found,
            post_attn_norm=("post_attn_norm", i) in found,
            post_ffn_norm=("post_ffn_norm", i) in found,
        )
        for i in range(config.n_layers)
    )
    embedding = matrix("token_embedding", -1)
    return Shape(config, embedding, matrix("output", -1) if ("output", -1) in found else embedding, layers)


def uniform_shape(config: ModelConfig, kind: str, embedding: str, output: str | None = None) -> Shape:
    """Return the shape of a Llama whose layers have matrices of one type; without `output`, a tied head."""
    c = config
    q, k, v = c.n_heads * c.key_dim, c.n_kv_heads * c.key_dim, c.n_kv_heads * c.value_dim
    layer = LayerShape(
        wq=Matrix(kind, q, c.dim),
        wk=Matrix(kind, k, c.dim),
        wv=Matrix(kind, v, c.dim),
        wo=Matrix(kind, c.dim, c.n_heads * c.value_dim),
        gate=Matrix(kind, c.ffn_dim, c.dim),
        up=Matrix(kind, c.ffn_dim, c.dim),
        down=Matrix(kind, c.dim, c.ffn_dim),
    )
    table = Matrix(embedding, c.vocab_size, c.dim)
    head = Matrix(output, c.vocab_size, c.dim) if output else table
    return Shape(config, table, head, (layer,) * c.n_layers)


@dataclass(frozen=True)
class Projection:
    """Matrices that one dispatch reads as a stack."""

    parts: tuple[Matrix, ...]

    @property
    def kind(self) -> str:
        """Type of the weights."""
        return self.parts[0].kind

    @property
    def in_dim(self) -> int:
        """Columns."""
        return self.parts[0].cols

    @property
    def out_dim(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    def args(self) -> dict[str, Any]:
        """Return the arguments that describe the stack."""
        rows = [part.rows for part in self.parts]
        return {"rows": rows + [0] * (3 - len(rows)), "row_bytes": self.parts[0].row_bytes}


def _merge(matrices: Iterable[Matrix]) -> list[Projection]:
    merged: list[list[Matrix]] = []
    for m in matrices:
        if merged and (merged[-1][0].kind, merged[-1][0].cols) == (m.kind, m.cols):
            merged[-1].append(m)
        else:
            merged.append([m])
    return [Projection(tuple(parts)) for parts in merged]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def decode_size(head_dim: int) -> int:
    """Return the largest head that the variant of attention_decode for `head_dim` holds."""
    return next(size for size in (32, 64, 96, 128, 256) if size >= head_dim)


def prefill_size(head_dim: int) -> int:
    """Return the largest head that the variant of attention_prefill for `head_dim` holds."""
    return next(size for size in (64, 128, 256) if size >= head_dim)


def prefill_row_blocks(size: int, kv_type: str) -> int:
    """Return how many blocks of 8 query rows a simdgroup of attention_prefill owns."""
    return 2 if size * (2 if kv_type == "f16" else 4) <= 256 else 1


@dataclass
class Planner:
    """Lists dispatches as the engine makes them."""

    shape: Shape
    tuning: Tuning
    kv_type: str = "f16"
    fused_norm: bool = False
    fused_silu: bool = False
    dispatches: list[Dispatch] = field(default_factory=list)
    _layer: int = -1
    _overlap: bool = False
    _needs_barrier: bool = False

    def chunk(self, tokens: int, position: int, greedy: bool) -> None:
        """Add the dispatches of a chunk."""
        c = self.shape.config
        few = self.tuning.few_tokens if all(self._all_q4_0(layer) for layer in self.shape.layers) else 1
        path = "one" if tokens == 1 else "few" if tokens <= few else "many"
        table = self.shape.embedding
        self._dispatch(
            f"embed_{table.kind}",
            (_ceil_div(c.dim // 8, SIMD), tokens),
            SIMD,
            dim=c.dim,
            row_bytes=table.row_bytes,
            tokens=tokens,
            scale=c.embedding_scale,
        )
        for i, layer in enumerate(self.shape.layers):
            self._layer = i
            if i < c.n_layers - 1:
                self._encode_layer(layer, tokens, path, position, tokens, path)
            else:
                self._encode_layer(layer, tokens, path, position, 1 if greedy else 0, "one")
        self._layer = -1
        if greedy:
            self._normed_projections([Projection((self.shape.output,))], 1, "one", c.vocab_size)
            groups = self.tuning.argmax_groups
            self._dispatch("argmax_stage1", (groups,), 256, n=c.vocab_size)
            self._dispatch("argmax_stage2", (1,), SIMD, n=groups)

    def _dispatch(
        self, kernel: str, grid: tuple[int, ...], threads: int, threadgroup_bytes: int = 0, **args: Any
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        barrier, self._needs_barrier = self._needs_barrier, not self._overlap
        self.dispatches.append(
            Dispatch(kernel, self._layer, (x, y, z), threads, threadgroup_bytes, barrier, args)
        )

    @staticmethod
    def _all_q4_0(layer: LayerShape) -> bool:
        matrices = (layer.wq, layer.wk, layer.wv, layer.wo, layer.gate, layer.up, layer.down)
        return all(m.kind == "q4_0" for m in matrices)

    def _encode_layer(
        self, w: LayerShape, tokens: int, path: str, position: int, wanted: int, wanted_path: str
    ) -> None:
        c = self.shape.config
        i = self._layer
        qkv_dim = w.wq.rows + w.wk.rows + w.wv.rows
        self._normed_projections(_merge((w.wq, w.wk, w.wv)), tokens, path, qkv_dim)
        rotated = c.rope_dim if not c.layer_uses_rope or c.layer_uses_rope[i] else 0
        rope: dict[str, Any] = {
            "n_heads": c.n_heads,
            "n_kv_heads": c.n_kv_heads,
            "key_dim": c.key_dim,
            "value_dim": c.value_dim,
            "rope_dim": rotated,
            "style": int(c.rope_style == "neox"),
            "position": position,
            "has_bias": int(w.has_bias),
            "has_q_norm": int(w.has_q_norm),
            "has_k_norm": int(w.has_k_norm),
            "eps": c.norm_eps,
            "skip_queries": int(not wanted),
        }
        if tokens == wanted == 1:
            self._attention(position, 1, "one", qkv_dim, rope)
        else:
            heads = 2 * c.n_kv_heads + (c.n_heads if wanted else 0)
            simdgroups = next(n for n in range(ROPE_SIMDGROUPS, 0, -1) if heads % n == 0)
            grid = (heads // simdgroups, tokens)
            self._dispatch(f"rope_append_{self.kv_type}", grid, simdgroups * SIMD, **rope)
            if not wanted:
                return
            self._attention(position + tokens - wanted, wanted, wanted_path, qkv_dim)
        self._add_block(w.wo, wanted, wanted_path, w.post_attn_norm)
        self._feed_forward(w, wanted, wanted_path)

    def _attention(
        self, position: int, tokens: int, path: str, q_stride: int, rope: dict[str, Any] | None = None
    ) -> None:
        c, t = self.shape.config, self.tuning
        keys = position + tokens
        splits = min(max(keys // t.split_keys, 1), t.max_splits)
        split_keys = _ceil_div(keys, splits)
        args: dict[str, Any] = {
            "n_heads": c.n_heads,
            "n_kv_heads": c.n_kv_heads,
            "key_dim": c.key_dim,
            "value_dim": c.value_dim,
            "tokens": tokens,
            "position": position,
            "q_stride": q_stride,
            "window": c.layer_window[self._layer] if c.layer_window else 0,
            "splits": splits,
            "split_keys": split_keys,
            "scale": c.attention_scale or c.key_dim**-0.5,
        }
        head_dim, shared = max(c.key_dim, c.value_dim), c.n_heads // c.n_kv_heads
        if path == "many":
            size = prefill_size(head_dim)
            blocks = prefill_row_blocks(size, self.kv_type)
            scratch = 4 * (blocks * (8 * PREFILL_KEYS + 64) + 64)
            grid = (_ceil_div(shared * tokens, t.prefill_simdgroups * blocks * 8), c.n_kv_heads)
            self._dispatch(
                f"attention_prefill_{self.kv_type}_{size}",
                grid,
                t.prefill_simdgroups * SIMD,
                t.prefill_simdgroups * scratch,
                **args,
            )
            return
        size = decode_size(head_dim)
        chunks = size // 32
        heads = 4 if chunks <= 2 else 2 if chunks <= 4 else 1
        simdgroups = min(max(_ceil_div(split_keys, 4), 1), DECODE_SIMDGROUPS)
        blocks = _ceil_div(shared, heads)
        self._dispatch(
            f"{'rope_' if rope else ''}attention_decode_{self.kv_type}_{size}",
            (splits, c.n_kv_heads * blocks, tokens),
            simdgroups * SIMD,
            **(rope or {}) | args,
        )
        if splits > 1:
            threads = _ceil_div(c.value_dim, SIMD) * SIMD
            self._dispatch("attention_combine", (c.n_heads, tokens), threads, **args)

    def _feed_forward(self, w: LayerShape, tokens: int, path: str) -> None:
        c = self.shape.config
        activation = int(c.activation == "gelu")
        gate_up = _merge((w.gate, w.up))
        fuses_silu = self.fused_silu and w.down.kind == "q4_0" and not w.post_ffn_norm
        apart = (
            len(gate_up) > 1 or path == "few" or (path == "one" and (self._fuses_norm(gate_up) or fuses_silu))
        )
        if not apart:
            self._rmsnorm(tokens, path == "many")
            if path == "one":
                self._matvec("matvec_swiglu", gate_up[0], c.ffn_dim, activation=activation)
            else:
                self._matmul("matmul_swiglu", gate_up[0], tokens, c.ffn_dim, c.ffn_dim, activation=activation)
        else:
            self._normed_projections(gate_up, tokens, path, 2 * c.ffn_dim)
            down = Projection((w.down,))
            if path == "one" and fuses_silu:
                self._matvec("silu_matvec", down, c.dim, "_accumulate", activation=activation)
                return
            kind = "f16" if path == "many" else "f32"
            grid = (_ceil_div(c.ffn_dim, 256), tokens)
            self._dispatch(
                f"swiglu_{kind}", grid, 256, ffn_dim=c.ffn_dim, tokens=tokens, activation=activation
            )
        self._add_block(w.down, tokens, path, w.post_ffn_norm)

    def _add_block(self, w: Matrix, tokens: int, path: str, post_norm: bool) -> None:
        c = self.shape.config
        self._project(Projection((w,)), tokens, path, c.dim, accumulate=not post_norm)
        if post_norm:
            self._dispatch("rmsnorm_add", (tokens,), self._norm_threads(), dim=c.dim, eps=c.norm_eps)

    def _fuses_norm(self, projections: list[Projection]) -> bool:
        return self.fused_norm and all(w.kind in ("q4_0", "f32") for w in projections)

    def _normed_projections(
        self, projections: list[Projection], tokens: int, path: str, out_stride: int
    ) -> None:
        fused = path == "one" and self._fuses_norm(projections)
        if not fused:
            self._rmsnorm(tokens, path == "many")
        self._overlap = True
        for w in projections:
            if fused:
                self._matvec("rmsnorm_matvec", w, w.out_dim, eps=self.shape.config.norm_eps)
            else:
                self._project(w, tokens, path, out_stride, accumulate=False)
        self._overlap, self._needs_barrier = False, True

    def _norm_threads(self) -> int:
        dim = self.shape.config.dim
        return min(1024, _ceil_div(dim // 4, SIMD) * SIMD)

    def _rmsnorm(self, tokens: int, half: bool) -> None:
        c = self.shape.config
        kind = "f16" if half else "f32"
        self._dispatch(f"rmsnorm_{kind}", (tokens,), self._norm_threads(), dim=c.dim, eps=c.norm_eps)

    def _project(self, w: Projection, tokens: int, path: str, out_stride: int, accumulate: bool) -> None:
        if path == "one":
            self._matvec("matvec", w, w.out_dim, accumulate=int(accumulate))
        elif path == "few":
            self._dispatch(
                "multi_token_matvec_q4_0" + ("_accumulate" if accumulate else ""),
                (_ceil_div(w.out_dim, MULTI_TOKEN_ROWS), _ceil_div(tokens, MULTI_TOKEN_TILE)),
                MULTI_TOKEN_ROWS * SIMD,
                **w.args(),
                in_dim=w.in_dim,
                out_dim=w.out_dim,
                batch_size=tokens,
                out_stride=out_stride,
            )
        else:
            self._matmul("matmul", w, tokens, w.out_dim, out_stride, accumulate=int(accumulate))

    def _matvec(self, stem: str, w: Projection, rows: int, suffix: str = "", **changed: Any) -> None:
        lanes = 8
        while lanes < SIMD and rows * lanes < self.tuning.matvec_threads:
            lanes *= 2
        args = {"accumulate": 0, "activation": 0, "eps": 0.0, **changed}
        threads = self.tuning.matvec_group
        grid = (_ceil_div(rows, threads // lanes),)
        kernel = f"{stem}_{w.kind}{suffix}"
        self._dispatch(
            kernel, grid, threads, **w.args(), in_dim=w.in_dim, out_dim=rows, lanes_per_row=lanes, **args
        )

    def _matmul(
        self, stem: str, w: Projection, tokens: int, out_dim: int, out_stride: int, **changed: int
    ) -> None:
        rows = w.out_dim
        tiles = _ceil_div(rows, WIDE) * _ceil_div(tokens, WIDE)
        wide = tokens > NARROW and tiles >= self.tuning.wide_groups
        tile, name = (WIDE, "wide") if wide else (NARROW, "narrow")
        self._dispatch(
            f"{stem}_{w.kind}_{name}",
            (_ceil_div(rows, tile), _ceil_div(tokens, tile)),
            MATMUL_THREADS,
            **w.args(),
            in_dim=w.in_dim,
            out_dim=out_dim,
            tokens=tokens,
            out_stride=out_stride,
            **{"accumulate": 0, "activation": 0, **changed},
        )


def plan(
    shape: Shape,
    tokens: int,
    *,
    position: int = 0,
    family: int = 9,
    kv_type: str = "f16",
    chunk_tokens: int = 512,
    fused_norm: bool = False,
    fused_silu: bool = False,
) -> list[Dispatch]:
    """Return the dispatches of ``forward_prompt``.

    Parameters
    ----------
    shape
        Of the model.
    tokens
        Length of the prompt; 1 is a step of decoding.
    position
        Tokens that are in the cache before.
    family
        Apple GPU family, 7 (M1) to 9 (M3, M4).
    kv_type, chunk_tokens, fused_norm, fused_silu
        As the options of :class:`metal_prefill.Model`.

    Raises
    ------
    ValueError
        If `tokens` or `position` make no sense, or the family is unknown.
    UnsupportedModelError
        If the engine would pad the model, or its heads are too large.
    """
    c = shape.config
    if tokens < 1 or position < 0:
        raise ValueError(f"cannot plan {tokens} tokens at position {position}")
    if family not in TUNINGS:
        raise ValueError(f"unknown GPU family {family}; known are {', '.join(map(str, TUNINGS))}")
    for name in ("dim", "key_dim", "value_dim", "ffn_dim"):
        if getattr(c, name) % 8:
            raise UnsupportedModelError(f"{name} {getattr(c, name)}: a plan needs a multiple of 8")
    if max(c.key_dim, c.value_dim) > 256:
        raise UnsupportedModelError(
            f"attention heads of {max(c.key_dim, c.value_dim)} dimensions: at most 256"
        )
    planner = Planner(shape, TUNINGS[family], kv_type, fused_norm, fused_silu)
    done = 0
    while done < tokens:
        n = min(chunk_tokens, tokens - done)
        planner._needs_barrier = False
        planner.chunk(n, position + done, done + n == tokens)
        done += n
    return planner.dispatches
