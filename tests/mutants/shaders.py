"""Errors in the shaders."""

from __future__ import annotations

from mutants.mutant import Mutant

_STEPS, _LOGITS = "tests/metal_engine/test_token_steps.py", "tests/metal_engine/test_logits.py"
_PRODUCTS, _ATTENTION = "tests/metal_engine/test_projections.py", "tests/metal_engine/test_attention.py"
_TOKEN_ATTENTION = "tests/metal_engine/test_rope_attention.py"
_TYPES = "F32 or Q4_0"  # the build for planted errors has no kernels of rarer types

MUTANTS = (
    Mutant(
        "shaders/argmax.metal",
        "a.value == b.value && a.index < b.index",
        "a.value == b.value && a.index > b.index",
        "of equal logits the last one wins",
        (f"{_LOGITS}::test_argmax_of_special_values",),
    ),
    Mutant(
        "shaders/argmax.metal",
        "partial[row * args.n + i];",
        "partial[i];",
        "the second stage reads the candidates of the first row for every row",
        (f"{_LOGITS}::test_argmax_of_several_rows",),
    ),
    Mutant(
        "shaders/embed.metal",
        "out[W::kSecond / 4] = args.scale * b;",
        "out[W::kSecond / 4] = b;",
        "half of the embedding is not scaled",
        (f"{_STEPS}::test_embed", "-k", _TYPES),
    ),
    Mutant(
        "shaders/ffn.metal",
        "activate(gate[0], args.activation) * gate[args.ffn_dim]",
        "activate(gate[args.ffn_dim], args.activation) * gate[0]",
        "gate and up change places",
        (f"{_STEPS}::test_swiglu",),
    ),
    Mutant(
        "shaders/projection.h",
        "(1.0f + fast::exp(min(-argument, 88.0f)))",
        "(1.0f + fast::exp2(1.4427f * min(-argument, 88.0f)))",
        "the exponential of SwiGLU has a rounded base",
        (f"{_STEPS}::test_swiglu_is_as_accurate_as_the_fast_exponential_lets_it_be",),
    ),
    Mutant(
        "shaders/ffn.metal",
        "is_same<T, half>::value ? T(finite_half(value)) : T(value)",
        "T(value)",
        "what is too large for half precision becomes infinite",
        (_PRODUCTS, "-k", "swiglu_stays_finite or hide"),
    ),
    Mutant(
        "shaders/fused.metal",
        "squares = inside ? with_squares : squares;",
        "squares = with_squares;",
        "rounds beyond the end count in the norm",
        (f"{_PRODUCTS}::test_rmsnorm_matvec",),
    ),
    Mutant(
        "shaders/log_prob.metal",
        "logits[target] - best - log(sum)",
        "logits[target] - log(sum)",
        "log probabilities are too high by the largest logit",
        (f"{_LOGITS}::test_log_prob",),
    ),
    Mutant(
        "shaders/matmul.metal",
        "out = args.accumulate ? out + scratch[e] : scratch[e];",
        "out = scratch[e];",
        "tiles at an edge overwrite what they should add to",
        (f"{_PRODUCTS}::test_matmul_at_the_edges_of_its_tiles",),
    ),
    Mutant(
        "shaders/matmul_tensor.metal",
        "out = args.accumulate ? out + results[e] : results[e];",
        "out = results[e];",
        "products on tensors overwrite what they should add to",
        ("tests/metal_engine/test_matmul_tensor.py", "-k", "edges"),
    ),
    Mutant(
        "shaders/matmul_tiles.h",
        "const uint out = min(first + block / 2 * 8 + r % 8, args.out_dim - 1);",
        "const uint out = min(first + block * 8 + r % 8, args.out_dim - 1);",
        "half of the rows of gate and up are left out",
        ("tests/metal_engine/test_matmul_tensor.py", "-k", "swiglu and Q4_0"),
    ),
    Mutant(
        "shaders/matvec.metal",
        "sum[w][t] = inside ? with : sum[w][t];",
        "sum[w][t] = with;",
        "rounds beyond the end add the last item again",
        (f"{_PRODUCTS}::test_matvec", "-k", _TYPES),
    ),
    Mutant(
        "shaders/reduce.h",
        "if (lane == 0) partial[simdgroup] = value;",
        "if (lane == 0) partial[0] = value;",
        "simdgroups of a reduction overwrite each other's sums",
        (f"{_STEPS}::test_rmsnorm",),
    ),
    Mutant(
        "shaders/rmsnorm.metal",
        "precise::rsqrt(sum / float(dim) + eps)",
        "precise::rsqrt(sum / float(dim))",
        "the norm leaves out its epsilon",
        (_STEPS, "-k", "rmsnorm"),
    ),
    Mutant(
        "shaders/rmsnorm.metal",
        "y[i] += x[i] * row.scale * weight[i];",
        "y[i] = x[i] * row.scale * weight[i];",
        "the norm of a block overwrites the residual stream where a thread has several columns",
        (_STEPS, "-k", "rmsnorm"),
    ),
    Mutant(
        "shaders/rope.h",
        "value.x * turn.y + value.y * turn.x",
        "value.x * turn.y - value.y * turn.x",
        "the second of a pair turns the wrong way",
        (f"{_STEPS}::test_rope_append",),
    ),
    Mutant(
        "shaders/rope.metal",
        "v_page + in_page * v_dim + head * args.value_dim",
        "v_page + in_page * k_dim + head * args.value_dim",
        "rows of V are stored at the distance of those of K",
        (f"{_STEPS}::test_rope_append",),
    ),
    Mutant(
        "shaders/attention_prefill.metal",
        "column >= my_first && column <= my_last",
        "column >= my_first && column < my_last",
        "a token does not see itself",
        (f"{_ATTENTION}::test_attention_prefill_at_the_edges_of_its_tiles",),
    ),
    Mutant(
        "shaders/attention_prefill.metal",
        ": args.window - 1,",
        ": args.window,",
        "the window of a prompt is larger by one",
        (f"{_ATTENTION}::test_attention_prefill_in_a_window",),
    ),
    Mutant(
        "shaders/attention_decode.metal",
        "last > args.window ? last - args.window : 0",
        "last > args.window ? last - args.window + 1 : 0",
        "the window of a token is smaller by one",
        (f"{_ATTENTION}::test_attention_decode_in_a_window", f"{_TOKEN_ATTENTION}::test_in_a_window"),
    ),
    Mutant(
        "shaders/attention_decode.metal",
        "position % PAGE_POSITIONS * attention.n_kv_heads + share.kv_head",
        "position % PAGE_POSITIONS * attention.n_kv_heads",
        "a token's K and V are stored in the first head",
        (f"{_TOKEN_ATTENTION}::test_rope_attention_decode",),
    ),
    Mutant(
        "shaders/trial.metal",
        "simd_sum(float(lane))",
        "simd_max(float(lane))",
        "the trial of an unknown GPU computes something else than it expects",
        ("tests/metal_engine/test_first_contact.py", "-k", "virtual_machine"),
    ),
)
