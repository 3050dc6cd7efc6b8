// Vectors of four in plain C++: the fallback, and the oracle of the other sets. Everything is internal to the
// including file, so that code built for one instruction set never runs on another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "packing.h"
#include "simd_ops.h"

namespace metal_prefill::cpu {
namespace {

struct Vectors {
  typedef float F __attribute__((vector_size(16)));
  typedef std::int32_t I __attribute__((vector_size(16)));
  static I set_int(std::int32_t x) { return I{x, x, x, x}; }
};

struct Simd : SimdOps<Vectors> {
  static constexpr const char* kName = "scalar";
  // Tile sizes: accumulators that a product keeps, rows (in vectors) by tokens.
  static constexpr int kInt8Rows = 1, kInt8RowsOfOne = 1, kInt8Tokens = 2;
  static constexpr int kFloatRows = 2, kFloatTokens = 2, kFloatPanelTokens = 2;
  static constexpr int kAttentionRows = 2, kAttentionVectors = 2, kLaneSteps = 4;
  static constexpr int kPanelVectors = 1, kPanelTokens = 2, kRotatedZero = 128;
  static constexpr int kNarrowVectors = 1;  // unrolling all eight takes the compiler half a minute
  static constexpr bool kOneDot = false;    // dot() is one instruction

  template <typename Op>
  static F map(Op op) {
    F out;
    for (int i = 0; i < kLanes; ++i) out[i] = op(i);
    return out;
  }

  static F set(float x) {
    return map([&](int) { return x; });
  }
  // Rounded twice: without hardware a single rounding is a slow call.
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) {  // b if either is NaN
    return map([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
  }
  static F min(F a, F b) {  // likewise
    return map([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
  }
  static float reduce_add(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  static float reduce_max(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }
  static I round(F a) {  // to nearest even
    I out;
    for (int i = 0; i < kLanes; ++i) out[i] = std::int32_t(std::lrint(a[i]));
    return out;
  }
  // Exchanges lanes whose indices differ in exactly these bits: 1, 2, 3, or four times that.
  template <int kBits>
  static F swap(F a) {
    return map([&](int i) { return a[i ^ kBits]; });
  }
  static std::int32_t reduce_max(I a) {
    const std::int32_t x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }

  // Lane i of a[j] becomes lane j of a[i].
  static void transpose_quads(F (&a)[4]) {
    const F rows[4] = {a[0], a[1], a[2], a[3]};
    for (int i = 0; i < 4; ++i) a[i] = map([&](int j) { return rows[j][i]; });
  }

  static F load_half(const std::uint16_t* p) {
    return map([&](int i) { return half_to_float(p[i]); });
  }
  static void store_half(std::uint16_t* p, F a) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(a[i]);
  }
  static void store_int8(std::int8_t* p, I a) {
    for (int i = 0; i < kLanes; ++i) p[i] = std::int8_t(a[i]);
  }
  static void store_low_bytes(std::int8_t* p, I a) { store_int8(p, a); }  // the lowest byte of each lane
  static std::int32_t reduce_add(I a) { return a[0] + a[1] + a[2] + a[3]; }

  // Products of 8-bit integers: four bytes to a lane.
  static I load_table(const std::uint8_t* p) { return load_codes(p); }  // of 16 bytes
  static I look_up(I table, I codes) {
    std::uint8_t values[4 * kLanes], bytes[4 * kLanes];
    std::memcpy(values, &table, sizeof values);
    std::memcpy(bytes, &codes, sizeof bytes);
    for (std::uint8_t& byte : bytes) byte = values[byte];
    return load_codes(bytes);
  }
  static I load_int8(const std::int8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
  static I load_uint8(const std::uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
  // Whether dot() multiplies codes without subtracting kZero, so that -kZero * sum(x) must be in the
  // accumulator's start value.
  template <int kZero>
  static constexpr bool kStartsFromSum = false;
  // acc + sum over the four bytes of (codes - kZero) * x.
  template <int kZero>
  static I dot(I acc, I codes, I x) {
    for (int i = 0; i < kLanes; ++i) {
      for (int byte = 0; byte < 4; ++byte) {
        const int code = std::uint8_t(std::uint32_t(codes[i]) >> (8 * byte)) - kZero;
        const int value = std::int8_t(std::uint32_t(x[i]) >> (8 * byte));
        acc[i] += code * value;
      }
    }
    return acc;
  }
};

}  // namespace
}  // namespace metal_prefill::cpu
