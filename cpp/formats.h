// The tensor types as the host reads them: the one place where blocks of quantized values are taken apart.
//
// A quantized format reads a row in spans of 32 columns. codes() writes the integers of a span, counted from
// kZero; a value is scale * (code - kZero) + min. A format has one scale for a span, or one for each half
// (kHalves), and either a minimum for a span or none.
//
// Sources that are built for one instruction set do not include this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "quants.h"

namespace metal_prefill::formats {

constexpr int kSpan = 32;

template <typename T, float (*kConvert)(T)>
struct Floats {
  using Block = T;
  static constexpr std::size_t kValues = 1;
  static float value(T bits) { return kConvert(bits); }
};
inline float identity(float value) {
  return value;
}
struct F32 : Floats<float, identity> {};
struct F16 : Floats<std::uint16_t, half_to_float> {};
struct BF16 : Floats<std::uint16_t, bfloat16_to_float> {};

template <class Format>
concept Quantized = requires { Format::kZero; };
template <class Format>
concept HasMin = requires(typename Format::Block block) { Format::min(block, 0); };
// Its scale is one f16 of the block.
template <class Format>
concept HasHalfScale = requires(typename Format::Block block) { Format::scale_bits(block); };

// Properties that the formats have in common: how large their blocks are, and where the scales are.

template <class B>
struct Scaled {  // one f16
  using Block = B;
  static constexpr std::size_t kValues = QK4_0;
  static constexpr bool kHalves = false;
  static std::uint16_t scale_bits(const B& block) { return block.d; }
  static float scale(const B& block, int, int) { return half_to_float(block.d); }
};

template <class B>
struct ScaledWithMin {  // two f16
  using Block = B;
  static constexpr std::size_t kValues = QK4_0;
  static constexpr bool kHalves = false;
  static float scale(const B& block, int, int) { return half_to_float(block.d); }
  static float min(const B& block, int) { return half_to_float(block.m); }
};

template <class B>
struct SuperBlock {  // 6-bit scales and minima of 8 spans
  using Block = B;
  static constexpr std::size_t kValues = QK_K;
  static constexpr bool kHalves = false;
  static float scale(const B& block, int span, int) {
    // The upper spans keep their low four bits in the last four bytes, the high two atop those of the lower.
    const u8_t* s = block.scales;
    const int bits = span < 4 ? s[span] & 63 : (s[span + 4] & 15) | s[span - 4] >> 6 << 4;
    return half_to_float(block.d) * float(bits);
  }
  static float min(const B& block, int span) {
    const u8_t* s = block.scales;
    const int bits = span < 4 ? s[span + 4] & 63 : s[span + 4] >> 4 | s[span] >> 6 << 4;
    return -(half_to_float(block.dmin) * float(bits));
  }
};

// The low nibbles of 16 bytes, then the high ones.
inline void nibbles(const u8_t qs[16], std::uint8_t out[kSpan]) {
  for (int i = 0; i < 16; ++i) {
    out[i] = qs[i] & 15;
    out[i + 16] = qs[i] >> 4;
  }
}

// Likewise, with bit 4 of each value in a bit of qh.
inline void nibbles_and_bits(const u8_t qs[16], const u8_t qh[4], std::uint8_t out[kSpan]) {
  nibbles(qs, out);
  for (int i = 0; i < kSpan; i += 8) {
    // Eight bytes at a time: each keeps one bit of qh where it is, which a carry then moves to the top.
    std::uint64_t bits = qh[i / 8] * 0x0101010101010101u & 0x8040201008040201u;
    bits = (bits + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    for (int j = 0; j < 8; ++j) out[i + j] |= std::uint8_t(bits >> 8 * j);
  }
}

struct Q4_0 : Scaled<block_q4_0> {
  static constexpr int kBits = 4, kZero = 8;
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) { nibbles(block.qs, out); }
};

struct Q4_1 : ScaledWithMin<block_q4_1> {
  static constexpr int kBits = 4, kZero = 0;
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) { nibbles(block.qs, out); }
};

struct Q5_0 : Scaled<block_q5_0> {
  static constexpr int kBits = 5, kZero = 16;
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) {
    nibbles_and_bits(block.qs, block.qh, out);
  }
};

struct Q5_1 : ScaledWithMin<block_q5_1> {
  static constexpr int kBits = 5, kZero = 0;
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) {
    nibbles_and_bits(block.qs, block.qh, out);
  }
};

struct Q8_0 : Scaled<block_q8_0> {
  static constexpr int kBits = 8, kZero = 128;
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) {
    for (int i = 0; i < kSpan; ++i) out[i] = std::uint8_t(block.qs[i] + kZero);
  }
};

struct Q4_K : SuperBlock<block_q4_K> {
  static constexpr int kBits = 4, kZero = 0;
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const u8_t* qs = block.qs + span / 2 * 32;  // two spans share 32 bytes: low nibbles, high nibbles
    for (int i = 0; i < kSpan; ++i) out[i] = qs[i] >> (span % 2 * 4) & 15;
  }
};

struct Q5_K : SuperBlock<block_q5_K> {
  static constexpr int kBits = 5, kZero = 0;
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const u8_t* qs = block.qs + span / 2 * 32;
    for (int i = 0; i < kSpan; ++i)
      out[i] = std::uint8_t((qs[i] >> (span % 2 * 4) & 15) | (block.qh[i] >> span & 1) << 4);
  }
};

struct Q6_K {
  using Block = block_q6_K;
  static constexpr std::size_t kValues = QK_K;
  static constexpr int kBits = 6, kZero = 32;
  static constexpr bool kHalves = true;
  static float scale(const Block& block, int span, int half) {
    return half_to_float(block.d) * float(block.scales[span * 2 + half]);
  }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const u8_t* ql =
        block.ql + span / 4 * 64 + span % 2 * 32;  // four spans share 64 bytes of ql and 32 of qh
    const u8_t* qh = block.qh + span / 4 * 32;
    for (int i = 0; i < kSpan; ++i)
      out[i] = std::uint8_t((ql[i] >> (span % 4 / 2 * 4) & 15) | (qh[i] >> (span % 4 * 2) & 3) << 4);
  }
};

// Block `index` of a row. The file promises an alignment of the tensor, not of each block; a copy compiles to
// plain loads.
template <class Format>
typename Format::Block block_at(const void* row, std::size_t index) {
  typename Format::Block block;
  std::memcpy(&block, static_cast<const std::byte*>(row) + index * sizeof block, sizeof block);
  return block;
}

// Calls with_format with the format of a type. Throws std::invalid_argument for a type that is not in the
// enumeration.
template <class Call>
decltype(auto) visit(TensorType type, const Call& with_format) {
  switch (type) {
#define METAL_PREFILL_CASE(shader_name, Name, number) \
  case TensorType::k##Name:                           \
    return with_format(Name());
    EACH_TENSOR_TYPE(METAL_PREFILL_CASE)
#undef METAL_PREFILL_CASE
  }
  type_info(type);
  throw std::logic_error("a tensor type without a format");
}

}  // namespace metal_prefill::formats
