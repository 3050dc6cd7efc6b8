"""Work that other programs give the GPU, as far as it is published, for the cost model to be held against.

The kernels are described by their published geometry, not by their speed.
"""

from __future__ import annotations

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


Q4_0, Q6_K = 18 / 32, 210 / 256


def llama_cpp_7b(tokens: int, position: int = 0) -> list[Work]:
    """Return Llama-2-7B in Q4_0 (its head in Q6_K): 32 layers of 4096, feed-forward 11008, 32 heads of 128.

    About 18 dispatches a layer. Attention is taken as the matmuls of a prompt without a mask, or as a pass
    over the cached keys and values for one token.
    """
    dim, ffn, heads, head_dim, vocab = 4096, 11008, 32, 128, 32000
    shapes = [(dim, dim)] * 4 + [(ffn, dim)] * 2 + [(dim, ffn)]
    row = dim * 4
    works: list[Work] = []
    for _ in range(32):
        if tokens == 1:
            works += [llama_matvec(rows, cols, Q4_0) for rows, cols in shapes]
            works += [stream(position * heads * head_dim * 2)] * 2
        else:
            works += [llama_matmul(rows, cols, tokens, Q4_0) for rows, cols in shapes]
            works += [llama_matmul(heads * tokens, head_dim, tokens, 2)]
            works += [llama_matmul(heads * head_dim, tokens, tokens, 2)]
        # Norms with their weights, rope, append, mask and softmax, SwiGLU, residuals.
        works += [stream(tokens * row * 2.5)] * 7 + [stream(tokens * ffn * 4 * 2.5)] * 2
    return [*works, llama_matvec(vocab, dim, Q6_K)]


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

    Seven projections, two norms, and attention, in each layer; SwiGLU and rope are taken to be part of
    others. Q4_0 without tricks: a byte's nibbles masked and shifted, then conversion, subtraction, scale and
    an FMA that waits for the one before (two cycles), and scalar loads.
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
