// Vectors of four: NEON (Advanced SIMD), which every 64-bit Arm processor has.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "packing.h"
#include "simd_ops.h"

namespace metal_prefill::cpu {
namespace {

struct Vectors {
  using F = float32x4_t;
  using I = int32x4_t;
  static I set_int(std::int32_t x) { return vdupq_n_s32(x); }
};

struct Simd : SimdOps<Vectors> {
  static constexpr const char* kName = "neon";
  // 32 registers. Products of bytes: 8 integer and 8 float sums, 2 of codes, and those of their widening.
  static constexpr int kInt8Rows = 2, kInt8RowsOfOne = 2, kInt8Tokens = 4;
  // 24 sums hide a latency of 4 cycles on 4 pipes; 4 weights and an activation fit, too.
  static constexpr int kFloatRows = 4, kFloatTokens = 6, kFloatPanelTokens = 6;
  static constexpr int kPanelVectors = 4, kPanelTokens = 6, kRotatedZero = kSignedCodes;
  static constexpr int kAttentionRows = 6, kAttentionVectors = 4, kLaneSteps = 8;
  static constexpr int kNarrowVectors = 8;
#ifdef __ARM_FEATURE_DOTPROD
  static constexpr bool kOneDot = true;  // dot() is one instruction
#else
  static constexpr bool kOneDot = false;
#endif

  static F set(float x) { return vdupq_n_f32(x); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F max(F a, F b) { return vmaxq_f32(a, b); }  // NaN if either is
  static F min(F a, F b) { return vminq_f32(a, b); }  // likewise
  static float reduce_add(F a) {                      // adds halves, as the other sets do
    const float32x2_t half = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(vpadd_f32(half, half), 0);
  }
  static float reduce_max(F a) { return vmaxvq_f32(a); }
  static I round(F a) { return vcvtnq_s32_f32(a); }  // to nearest even
  // Exchanges lanes whose indices differ in exactly these bits: 1, 2, 3, or four times that.
  template <int kBits>
  static F swap(F a) {
    const F pairs = kBits & 1 ? vrev64q_f32(a) : a;
    return kBits & 2 ? vextq_f32(pairs, pairs, 2) : pairs;
  }
  static std::int32_t reduce_max(I a) { return vmaxvq_s32(a); }

  // Lane i of a[j] becomes lane j of a[i].
  static void transpose_quads(F (&a)[4]) {
    const float32x4x2_t first = vtrnq_f32(a[0], a[1]), second = vtrnq_f32(a[2], a[3]);
    a[0] = vcombine_f32(vget_low_f32(first.val[0]), vget_low_f32(second.val[0]));
    a[1] = vcombine_f32(vget_low_f32(first.val[1]), vget_low_f32(second.val[1]));
    a[2] = vcombine_f32(vget_high_f32(first.val[0]), vget_high_f32(second.val[0]));
    a[3] = vcombine_f32(vget_high_f32(first.val[1]), vget_high_f32(second.val[1]));
  }

  static F load_half(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store_half(std::uint16_t* p, F a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
  static void store_int8(std::int8_t* p, I a) {  // values within -128..127
    const int16x4_t words = vmovn_s32(a);
    const std::int32_t bytes = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
    std::memcpy(p, &bytes, 4);
  }
  static void store_low_bytes(std::int8_t* p, I a) { store_int8(p, a); }  // the lowest byte of each lane
  static std::int32_t reduce_add(I a) { return vaddvq_s32(a); }

  // Products of 8-bit integers: four bytes to a lane.
  static I high_nibbles(I a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
  static I load_table(const std::uint8_t* p) { return load_codes(p); }  // of 16 bytes
  static I look_up(I table, I codes) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(codes)));
  }
  static I load_int8(const std::int8_t* p) {
    std::int32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)))));
  }
  static I load_uint8(const std::uint8_t* p) {
    std::uint32_t bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))))));
  }

  // Codes up to 127 are signed bytes; those with a zero point of 128 become signed by flipping the highest
  // bit. The sum of two products fits 16 bits: 2 * 128 * 127 < 2^15.
  template <int kZero>
  static constexpr bool kStartsFromSum = kZero > 0 && kZero != 128;
  template <int kZero>
  static I dot(I acc, I codes, I x) {
    int8x16_t w = vreinterpretq_s8_s32(codes);
    if constexpr (kZero == 128) w = veorq_s8(w, vdupq_n_s8(-128));
    const int8x16_t v = vreinterpretq_s8_s32(x);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(acc, w, v);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(v)), high = vmull_high_s8(w, v);
    return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
  }
#ifndef __ARM_FEATURE_DOTPROD
  // Sixteen bits hold the products of a block of 4-bit codes, even the sums of two columns: 16 * 15 * 127. So
  // multiply-adds widen to 16 bits, and sums to 32 bits once per block.
  struct Halfwords {
    int16x8_t low, high;  // of the bytes of a vector
  };
  static Halfwords no_halfwords() { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  static Halfwords add_pairs(Halfwords acc, I codes, I x) {
    const int8x16_t w = vreinterpretq_s8_s32(codes), v = vreinterpretq_s8_s32(x);
    return {vmlal_s8(acc.low, vget_low_s8(w), vget_low_s8(v)), vmlal_high_s8(acc.high, w, v)};
  }
  static Halfwords add_halfwords(Halfwords a, Halfwords b) {
    return {vaddq_s16(a.low, b.low), vaddq_s16(a.high, b.high)};
  }
  static I sum_halfwords(I acc, Halfwords a) { return vpadalq_s16(acc, vpaddq_s16(a.low, a.high)); }
#endif
};

}  // namespace
}  // namespace metal_prefill::cpu
