// Vectors of four in plain C++: the fallback, and the oracle of the other sets. Everything is internal to the
// including file, so that code built for one instruction set never runs on another.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../weights/packing.h"

namespace metal_prefill::cpu {
namespace {

struct Simd {
  static constexpr const char* kName = "scalar";
  static constexpr int kLanes = 4;
  // Tile sizes: accumulators that a product keeps, rows (in vectors) by tokens.
  static constexpr int kInt8Rows = 1, kInt8RowsOfOne = 1, kInt8Tokens = 2;
  static constexpr int kFloatRows = 2, kFloatTokens = 2, kFloatPanelTokens = 2;
  static constexpr int kAttentionRows = 2, kAttentionVectors = 2, kLaneSteps = 4;
  static constexpr int kPanelVectors = 1, kPanelTokens = 2, kRotatedZero = 128;
  static constexpr int kNarrowVectors = 1;  // unrolling all eight takes the compiler half a minute
  static constexpr bool kOneDot = false;    // dot() is one instruction

  struct F {
    float v[kLanes];
  };
  struct I {
    std::int32_t v[kLanes];
  };

  template <typename Op>
  static F map(Op op) {
    F out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = op(i);
    return out;
  }

  static F load(const float* p) {
    return map([&](int i) { return p[i]; });
  }
  static void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
  static F set(float x) {
    return map([&](int) { return x; });
  }
  static F add(F a, F b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(F a, F b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(F a, F b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(F a, F b) {
    return map([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F fma(F a, F b,
               F c) {  // a * b + c, rounded twice: without hardware a single rounding is a slow call
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static F max(F a, F b) {  // b if either is NaN
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F min(F a, F b) {  // likewise
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static float reduce_add(F a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
  static float reduce_max(F a) {
    const float x = a.v[0] > a.v[2] ? a.v[0] : a.v[2], y = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
    return x > y ? x : y;
  }
  static I round(F a) {  // to nearest even
    I out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = std::int32_t(std::lrint(a.v[i]));
    return out;
  }
  static F to_float(I a) {
    return map([&](int i) { return float(a.v[i]); });
  }
  // a * 2^n for normal results.
  static F scale_by_power(F a, I n) {
    return map([&](int i) {
      return std::bit_cast<float>(std::bit_cast<std::uint32_t>(a.v[i]) + (std::uint32_t(n.v[i]) << 23));
    });
  }
  // Exchanges lanes whose indices differ in exactly these bits: 1, 2, 3, or four times that.
  template <int kBits>
  static F swap(F a) {
    return map([&](int i) { return a.v[i ^ kBits]; });
  }
  // a if x >= limit or x is NaN, else 0.
  static F zero_below(F a, F x, F limit) {
    return map([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : a.v[i]; });
  }
  // The bits of |a|: ordered as the magnitudes are, with NaN above all.
  static I magnitude_bits(F a) {
    I out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = std::bit_cast<std::int32_t>(a.v[i]) & 0x7fffffff;
    return out;
  }
  static I max_int(I a, I b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
  }
  static std::int32_t reduce_max(I a) {
    std::int32_t out = a.v[0];
    for (const std::int32_t v : a.v) out = v > out ? v : out;
    return out;
  }

  // Loads four floats of one row.
  static F load_quads(const float* p, std::size_t) { return load(p); }
  static void store_quads(float* p, std::size_t, F a) { store(p, a); }
  // Lane i of a[j] becomes lane j of a[i].
  static void transpose_quads(F (&a)[4]) {
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < i; ++j) std::swap(a[i].v[j], a[j].v[i]);
  }

  static F load_half(const std::uint16_t* p) {
    return map([&](int i) { return half_to_float(p[i]); });
  }
  static void store_half(std::uint16_t* p, F a) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(a.v[i]);
  }
  static F load_bfloat16(const std::uint16_t* p) {
    return map([&](int i) { return bfloat16_to_float(p[i]); });
  }
  static void store_int8(std::int8_t* p, I a) {
    for (int i = 0; i < kLanes; ++i) p[i] = std::int8_t(a.v[i]);
  }
  static void store_low_bytes(std::int8_t* p, I a) { store_int8(p, a); }  // the lowest byte of each lane
  static std::int32_t reduce_add(I a) { return a.v[0] + a.v[1] + a.v[2] + a.v[3]; }

  // Products of 8-bit integers: four bytes to a lane.
  static I set_int(std::int32_t x) { return {x, x, x, x}; }
  static I load_codes(const std::uint8_t* p) {
    I out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static I low_nibbles(I a) {
    for (std::int32_t& v : a.v) v &= 0x0f0f0f0f;
    return a;
  }
  static I high_nibbles(I a) {
    for (std::int32_t& v : a.v) v = std::int32_t(std::uint32_t(v) >> 4 & 0x0f0f0f0f);
    return a;
  }
  static void store_codes(std::uint8_t* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
  // Moves kWidth bits of each byte from bit kFrom to bit kTo; other bits are zero.
  template <int kWidth, int kFrom, int kTo>
  static I field(I a) {
    constexpr std::uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
    for (std::int32_t& v : a.v) v = std::int32_t((std::uint32_t(v) >> kFrom & kMask) << kTo);
    return a;
  }
  static I or_int(I a, I b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] |= b.v[i];
    return a;
  }
  static I load_table(const std::uint8_t* p) { return load_codes(p); }  // of 16 bytes
  static I look_up(I table, I codes) {
    std::uint8_t values[4 * kLanes], bytes[4 * kLanes];
    std::memcpy(values, table.v, sizeof values);
    std::memcpy(bytes, codes.v, sizeof bytes);
    for (std::uint8_t& byte : bytes) byte = values[byte];
    return load_codes(bytes);
  }
  static I load_int8(const std::int8_t* p) { return {p[0], p[1], p[2], p[3]}; }
  static I load_uint8(const std::uint8_t* p) { return {p[0], p[1], p[2], p[3]}; }
  static I broadcast4(const std::int8_t* p) {
    std::int32_t x;
    std::memcpy(&x, p, 4);
    return set_int(x);
  }
  // Lanes of four bytes wrap around, as on processors: unsigned, since signed overflow is undefined.
  static I sub_int(I a, I b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = std::int32_t(std::uint32_t(a.v[i]) - std::uint32_t(b.v[i]));
    return a;
  }
  static I add_int(I a, I b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = std::int32_t(std::uint32_t(a.v[i]) + std::uint32_t(b.v[i]));
    return a;
  }
  template <int kBits>
  static I shift_left(I a) {
    for (std::int32_t& v : a.v) v = std::int32_t(std::uint32_t(v) << kBits);
    return a;
  }
  template <int kByte>
  static I byte_of(I a) {  // byte kByte of each lane, counted from the lowest
    for (std::int32_t& v : a.v) v = std::int32_t(std::uint32_t(v) >> (8 * kByte) & 255);
    return a;
  }
  // Whether dot() multiplies codes without subtracting kZero, so that -kZero * sum(x) must be in the
  // accumulator's start value.
  template <int kZero>
  static constexpr bool kStartsFromSum = false;
  // acc + sum over the four bytes of (codes - kZero) * x.
  template <int kZero>
  static I dot(I acc, I codes, I x) {
    for (int i = 0; i < kLanes; ++i) {
      for (int byte = 0; byte < 4; ++byte) {
        const int code = std::uint8_t(std::uint32_t(codes.v[i]) >> (8 * byte)) - kZero;
        const int value = std::int8_t(std::uint32_t(x.v[i]) >> (8 * byte));
        acc.v[i] += code * value;
      }
    }
    return acc;
  }
};

}  // namespace
}  // namespace metal_prefill::cpu
