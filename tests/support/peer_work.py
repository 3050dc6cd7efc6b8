"""Published GPU work of other programs, with which the cost model is compared.

The kernels are described by their published geometry, not by their speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from metal_prefill.gpu._cost_model import Ops, Work

LOOP = Ops(alu=8, slow=2)


def llama_matmul(rows: int, cols: int, tokens: int, weight_bytes: float) -> Work:
    """Return llama.cpp's kernel_mul_mm on Q4_0: tiles of 64 rows x 32 tokens, four simdgroups.

    Steps of 32 columns. A thread dequantizes 16 weights a step (mask, conversion, FMA each), stores them one
    by one as half, and stages 8 activations. A simdgroup holds 8 sums of 8x8, for which it loads 4 + 2
    blocks. The staging memory is not doubled: loads, stores and products follow each other.
    """
    steps, groups = ceil(cols / 32), ceil(rows / 64) * ceil(tokens / 32)
    step = Ops(alu=2 * 16 + 16, slow=16, memory=3 + 16 + 4) + LOOP + Ops(mma=32, memory=24)
    x, out = tokens * cols * 4, tokens * rows * 4
    staged, loaded, fetched = (64 + 32) * 32 * 2, 4 * 24 * 128, 64 * 18 + 32 * 128
    return Work(
        groups=groups,
        simdgroups=4,
        ops=step * steps,
        trips=steps,
        dram_bytes=rows * cols * weight_bytes,
        cached_bytes=x + out,
        fetched_bytes=rows * cols * weight_bytes * ceil(tokens / 32) + x * ceil(rows / 64) + out,
        core_bytes=groups * steps * (staged + loaded + fetched) + out,
        threadgroup_bytes=8192,
    )


def llama_matvec(rows: int, cols: int, weight_bytes: float) -> Work:
    """Return llama.cpp's kernel_mul_mv on Q4_0: two simdgroups of 4 rows each, half a block for a lane.

    Nibbles are masked in place and the activations scaled instead: mask, conversion and FMA for each weight.
    """
    groups = ceil(rows / 8)
    rounds = ceil(cols / 16 / 32)
    ops = (Ops(alu=4 * (16 * 2 + 8) + 48, slow=4 * 16, memory=4 * 5 + 4) + LOOP) * rounds
    weights = rows * cols * weight_bytes
    return Work(
        groups=groups,
        simdgroups=2,
        ops=ops + Ops(alu=20, shuffle=20),
        trips=rounds + 1,
        dram_bytes=weights,
        cached_bytes=cols * 4 + rows * 4,
        fetched_bytes=weights + groups * cols * 4,
        core_bytes=weights + groups * 2 * cols * 4,
    )


def stream(bytes_moved: float) -> Work:
    """Return an elementwise step."""
    threads = bytes_moved / 32
    return Work(
        groups=max(1, ceil(threads / 256)),
        simdgroups=8,
        ops=Ops(alu=8, memory=3) + LOOP,
        trips=1,
        dram_bytes=0,
        cached_bytes=bytes_moved,
        fetched_bytes=bytes_moved,
        core_bytes=bytes_moved,
    )


Q4_0, Q4_K_M, Q6_K = 18 / 32, 4.85 / 8, 210 / 256  # bytes of a weight
MLX_4_BIT = 4.5 / 8  # groups of 64 with a scale and a bias in half precision


@dataclass(frozen=True)
class PeerShape:
    """Dimensions of a model."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    qk_norm: bool = False

    @property
    def products(self) -> list[tuple[int, int]]:
        """Rows and columns of a layer's seven matrices."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(q, self.dim), (kv, self.dim), (kv, self.dim), (self.dim, q)]
        return [*attention, (self.ffn, self.dim), (self.ffn, self.dim), (self.dim, self.ffn)]


SHAPES = {
    "Llama-2-7B": PeerShape(32, 4096, 32, 32, 128, 11008, 32000),
    "Qwen3-0.6B": PeerShape(28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True),
    "Gemma3-270M": PeerShape(18, 640, 4, 1, 256, 2048, 262144, qk_norm=True),
    "Llama-3.2-1B": PeerShape(16, 2048, 32, 8, 64, 8192, 128256),
}


def llama_cpp(shape: PeerShape, tokens: int, position: int = 0, weight_bytes: float = Q4_0) -> list[Work]:
    """Return a pass of llama.cpp, the head in Q6_K.

    About 18 dispatches a layer. Attention is taken as the matmuls of a prompt without a mask, or as a pass
    over the cached keys and values for one token.
    """
    row, kv = shape.dim * 4, shape.kv_heads * shape.head_dim
    works: list[Work] = []
    for _ in range(shape.layers):
        if tokens == 1:
            works += [llama_matvec(rows, cols, weight_bytes) for rows, cols in shape.products]
            works += [stream(position * kv * 2)] * 2
        else:
            works += [llama_matmul(rows, cols, tokens, weight_bytes) for rows, cols in shape.products]
            works += [llama_matmul(shape.heads * tokens, shape.head_dim, tokens, 2)]
            works += [llama_matmul(shape.heads * shape.head_dim, tokens, tokens, 2)]
        # Norms with their weights, rope, append, mask and softmax, SwiGLU, residuals.
        works += [stream(tokens * row * 2.5)] * 7 + [stream(tokens * shape.ffn * 4 * 2.5)] * 2
        works += [stream(tokens * kv * 4 * 2.5)] * (2 if shape.qk_norm else 0)
    return [*works, llama_matvec(shape.vocab, shape.dim, Q6_K)]


def mlx_matmul(rows: int, cols: int, tokens: int, matrix_units: bool) -> Work:
    """Return MLX's qmm_t of four bits: four simdgroups, 2 x 2 over a tile, one step staged at a time.

    Tiles of 32 x 32 without matrix units, of which a thread dequantizes 8 weights per step (mask, conversion,
    FMA with the group's scale and bias). With matrix units, tiles of 64 x 64 whose activations the simdgroups
    read from device memory.
    """
    tile = 64 if matrix_units else 32
    steps, groups, blocks = ceil(cols / 32), ceil(rows / tile) * ceil(tokens / tile), tile // 16
    items = tile * 4 // 128
    step = (Ops(alu=8 * 3, slow=8, memory=3 + 2) + Ops(alu=8, memory=4)) * items + LOOP
    products = 4 * blocks * blocks
    step += Ops(matrix_unit=products) if matrix_units else Ops(mma=products, memory=4 * 2 * blocks)
    x, out, weights = tokens * cols * 2, tokens * rows * 2, rows * cols * MLX_4_BIT
    staged = (1 if matrix_units else 2) * tile * 32 * 2
    loaded = 4 * 4 * 2 * blocks * 64 * 2
    fetched = tile * 32 * MLX_4_BIT + (0 if matrix_units else tile * 32 * 2)
    return Work(
        groups=groups,
        simdgroups=4,
        ops=step * steps,
        trips=steps,
        local_trips=5 * steps,
        dram_bytes=weights,
        cached_bytes=x + out,
        fetched_bytes=weights * ceil(tokens / tile) + x * ceil(rows / tile) + out,
        core_bytes=groups * steps * (staged + loaded + fetched) + out,
        threadgroup_bytes=2 * tile * 40 * 2,
    )


def mlx(shape: PeerShape, tokens: int, matrix_units: bool = False) -> list[Work]:
    """Return a prompt of mlx-lm with weights of four bits.

    Half of attention's products are skipped by the causal mask, except with heads of 256 dimensions, for
    which MLX has no fused attention: scores and weights then go through memory.
    """
    row, kv = shape.dim * 2, shape.kv_heads * shape.head_dim * 2
    fused = shape.head_dim <= 128
    share = 0.5 if fused else 1.0
    attention = [
        llama_matmul(shape.heads * tokens, shape.head_dim, tokens, 2),
        llama_matmul(shape.heads * shape.head_dim, tokens, tokens, 2),
    ]
    works: list[Work] = []
    for _ in range(shape.layers):
        works += [mlx_matmul(rows, cols, tokens, matrix_units) for rows, cols in shape.products]
        for w in attention:
            works.append(
                replace(
                    w,
                    ops=w.ops * share,
                    fetched_bytes=w.fetched_bytes * share,
                    core_bytes=w.core_bytes * share,
                )
            )
        if not fused:
            works += [stream(shape.heads * tokens * tokens * 2 * 2)] * 3
        # Norms, residuals, rope, append, SwiGLU.
        works += [stream(tokens * row * 2.5)] * (6 if shape.qk_norm else 4)
        works += [stream(tokens * kv * 2.5)] * 4 + [stream(tokens * shape.ffn * 2 * 3)]
    return [*works, llama_matvec(shape.vocab, shape.dim, MLX_4_BIT)]


def original_matvec(rows: int, cols: int, weight_bytes: float, of_weight: Ops) -> Work:
    """Return the matvec of the plan: eight simdgroups of a row each, a lane takes whole blocks of weights.

    At 576 columns 18 of 32 lanes have one; the others wait.
    """
    groups, rounds = ceil(rows / 8), ceil(cols / 32 / 32)
    weights = rows * cols * weight_bytes
    return Work(
        groups=groups,
        simdgroups=8,
        ops=(of_weight * 32 + LOOP) * rounds + Ops(alu=5, shuffle=5),
        trips=rounds + 1,
        dram_bytes=weights,
        cached_bytes=cols * 4 + rows * 4,
        fetched_bytes=weights + groups * cols * 4,
        core_bytes=weights + groups * 8 * cols * 4,
    )


def original_decode() -> list[Work]:
    """Return a token of SmolLM-135M as the plan's own engine computes it: 302 dispatches, ten a layer.

    Seven projections, two norms and attention in each layer; SwiGLU and rope are assumed to be part of
    others. Q4_0 is unpacked plainly: a byte's nibbles are masked and shifted, then converted, subtracted and
    scaled, with an FMA that waits for the previous one (two cycles), and scalar loads.
    """
    dim, ffn, kv, vocab = 576, 1536, 192, 49152
    naive = Ops(alu=4.5, slow=1.5, memory=1.5)
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn)]
    norm = Work(1, 1, Ops(alu=60, memory=20, rsqrt=1), 3, 0, 3 * dim * 4, 3 * dim * 4, 3 * dim * 4)
    attention = Work(
        9, 4, Ops(alu=400, memory=80, exp=20), 8, 0, 64 * kv * 4, 3 * 64 * kv * 4, 3 * 64 * kv * 4
    )
    layer = [original_matvec(rows, cols, Q4_0, naive) for rows, cols in shapes] + [norm, norm, attention]
    head = original_matvec(vocab, dim, 34 / 32, Ops(alu=3, slow=1, memory=2))
    return layer * 30 + [norm, head]
