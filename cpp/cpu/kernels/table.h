// The table of one instruction set; included last by each kernels_*.cpp.
#pragma once

#include "row_activations.h"
#include "row_ops.h"
#include "tile_attention.h"
#include "tile_float.h"
#include "tile_float_panels.h"
#include "tile_gated_delta.h"
#include "tile_gemm.h"
#include "tile_narrow.h"
#include "tile_peak.h"
#include "tile_rotated.h"
#include "tile_scan.h"

namespace metal_prefill::cpu {
namespace {

constexpr Kernels kTable = {
    .name = Simd::kName,
    .multiply_int8 = multiply_int8,
    .multiply_narrow = multiply_narrow,
    .widen = widen,
    .multiply_float = multiply_float,
    .multiply_half = multiply_half,
    .multiply_float_panels = multiply_float_panels,
    .to_blocks = to_blocks,
    .multiply_rotated = multiply_rotated<Simd>,
    .rotated_zero = kCodeZero,
    .rotate = rotate,
    .rotate_wide = wide_rotation<Simd>(),
    .limit_pairs = pair_limiter<Simd>(),
    .half_to_float = to_float_row<Simd::load_half, half_to_float>,
    .bfloat16_to_float = to_float_row<Simd::load_bfloat16, bfloat16_to_float>,
    .quantize = quantize,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rope = rope,
    .add_products = add_products,
    .gated = gated,
    .activate = activate,
    .scan = scan,
    .soft_cap = soft_cap,
    .apply_gate = apply_gate,
    .gated_delta = gated_delta,
    .relative_scores = relative_scores,
    .sum_exp = sum_exp,
    .store_keys = store_keys,
    .store_values = store_values,
    .attention = attention,
    .combine_splits = combine_splits,
    .run_dots = run_dots,
    .run_fmas = run_fmas,
};

}  // namespace
}  // namespace metal_prefill::cpu
