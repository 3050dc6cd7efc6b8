// The tensor types on the host: all host code that unpacks quantized blocks is here.
//
// A quantized format reads a row in spans of 32 columns. codes() writes the codes of a span. A code encodes
// an integer: code - kZero, or the code's entry of kTable. A value is scale * integer + min. Each half of a
// span has a scale; both may be the same one. Formats with scale_code() declare kMaxScale, the largest
// integer that it or min_code() returns.
//
// Sources that are built for one instruction set do not include this.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "../../shaders/grids.h"
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
concept Quantized = requires { Format::kBits; };
// Codes are indices into kTable.
template <class Format>
concept HasTable = requires { Format::kTable; };
// A super-block: its scales are small integers times one float.
template <class Format>
concept HasScaleCodes = requires(typename Format::Block block) { Format::scale_code(block, 0, 0); };
// Each half of a span has a separate float scale.
template <class Format>
concept HasHalfScales = requires(typename Format::Block block) { Format::half_scale(block, 0, 0); };
template <class Format>
concept HasMin = requires(typename Format::Block block) { Format::min_bits(block); };

// The float of which all scales of a block are multiples.
template <class Format>
float unit_of(const typename Format::Block& block) {
  if constexpr (requires { Format::unit(block); })
    return Format::unit(block);
  else
    return half_to_float(Format::scale_bits(block));
}

template <class Format>
float scale_of(const typename Format::Block& block, int span, int half) {
  if constexpr (HasHalfScales<Format>)
    return Format::half_scale(block, span, half);
  else if constexpr (HasScaleCodes<Format>)
    return unit_of<Format>(block) * float(Format::scale_code(block, span, half));
  else
    return unit_of<Format>(block);
}

template <HasMin Format>
float min_of(const typename Format::Block& block, int span, int half) {
  const float min = half_to_float(Format::min_bits(block));
  if constexpr (HasScaleCodes<Format>)
    return -(min * float(Format::min_code(block, span, half)));
  else
    return min;
}

// Scales of a span: one, or one for each half.
template <Quantized Format>
constexpr int scales_of() {
  if constexpr (requires { Format::kScales; })
    return Format::kScales;
  else
    return 1;
}

template <Quantized Format>
int integer_of(std::uint8_t code) {
  if constexpr (HasTable<Format>)
    return Format::kTable.values[code];
  else
    return int(code) - Format::kZero;
}

// Common properties of the formats: the size of their blocks, and the place of the scales.

template <class B>
struct Scaled {  // one f16
  using Block = B;
  static constexpr std::size_t kValues = QK4_0;
  static std::uint16_t scale_bits(const B& block) { return block.d; }
};

template <class B>
struct ScaledWithMin : Scaled<B> {  // two f16
  static std::uint16_t min_bits(const B& block) { return block.m; }
};

template <class B>
struct SuperBlock {
  using Block = B;
  static constexpr std::size_t kValues = QK_K;
  static std::uint16_t scale_bits(const B& block) { return block.d; }
};

template <class B>
struct SixBitScales : SuperBlock<B> {  // 6-bit scales and minima of 8 spans
  static constexpr int kMaxScale = 63;
  // Spans 4-7 keep their low four bits in the last four bytes, the high two above the scales of spans 0-3.
  static int scale_code(const B& block, int span, int) {
    const u8_t* s = block.scales;
    return span < 4 ? s[span] & 63 : (s[span + 4] & 15) | s[span - 4] >> 6 << 4;
  }
  static int min_code(const B& block, int span, int) {
    const u8_t* s = block.scales;
    return span < 4 ? s[span + 4] & 63 : s[span + 4] >> 4 | s[span] >> 6 << 4;
  }
  static std::uint16_t min_bits(const B& block) { return block.dmin; }
};

// The integer of each 4-bit code.
struct Table {
  std::int8_t values[16];
};
// The table of codes with a sign bit above their level.
template <int... kMagnitudes>
constexpr Table signed_levels() {
  constexpr int kLevels = int(std::bit_ceil(sizeof...(kMagnitudes)));
  const std::int8_t magnitudes[kLevels] = {kMagnitudes...};
  Table table{};
  for (int i = 0; i < kLevels; ++i) {
    table.values[i] = magnitudes[i];
    table.values[i + kLevels] = std::int8_t(-magnitudes[i]);
  }
  return table;
}

// The codes of kCount values whose levels are bits of `levels` and whose signs are bits of `signs`.
template <int kCount>
void signed_codes(unsigned levels, unsigned signs, std::uint8_t* out) {
  constexpr int kLevelBits = kCount == 8 ? 2 : 3;
  for (int i = 0; i < kCount; ++i)
    out[i] =
        std::uint8_t((levels >> kLevelBits * i & ((1 << kLevelBits) - 1)) | (signs >> i & 1) << kLevelBits);
}

// Adds to seven sign bits the eighth, which makes the number of negative values even.
inline unsigned even_signs(unsigned bits) {
  bits &= 127;
  return bits | unsigned(std::popcount(bits) & 1) << 7;
}

template <class Word>
Word load_word(const void* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

inline int nibble(const u8_t* bytes, int i) {
  return bytes[i / 2] >> (i % 2 * 4) & 15;
}

// The low nibbles of 16 bytes, then the high ones.
inline void nibbles(const u8_t qs[16], std::uint8_t out[kSpan]) {
  for (int i = 0; i < 16; ++i) {
    out[i] = qs[i] & 15;
    out[i + 16] = qs[i] >> 4;
  }
}

// As nibbles(), with bit 4 of each value in a bit of qh.
inline void nibbles_and_bits(const u8_t qs[16], const u8_t qh[4], std::uint8_t out[kSpan]) {
  nibbles(qs, out);
  for (int i = 0; i < kSpan; i += 8) {
    // Eight bytes at a time: byte j keeps bit j of qh, which an addition carries into the top bit.
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

// Two bits of each value: four spans share 32 bytes.
inline void pairs_of_bits(const u8_t* qs, int span, std::uint8_t out[kSpan]) {
  qs += span / 4 * 32;
  for (int i = 0; i < kSpan; ++i) out[i] = qs[i] >> (span % 4 * 2) & 3;
}

struct Q2_K : SuperBlock<block_q2_K> {
  static constexpr int kBits = 2, kZero = 0, kScales = 2, kMaxScale = 15;
  static int scale_code(const Block& block, int span, int half) { return block.scales[span * 2 + half] & 15; }
  static int min_code(const Block& block, int span, int half) { return block.scales[span * 2 + half] >> 4; }
  static std::uint16_t min_bits(const Block& block) { return block.dmin; }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    pairs_of_bits(block.qs, span, out);
  }
};

struct Q3_K : SuperBlock<block_q3_K> {
  static constexpr int kBits = 3, kZero = 4, kScales = 2, kMaxScale = 31;
  static int scale_code(const Block& block, int span, int half) {
    const int i = span * 2 + half;  // low four bits: the low nibbles of 8 bytes, then the high ones
    const int low = block.scales[i % 8] >> (i / 8 * 4) & 15,
              high = block.scales[8 + i % 4] >> (i / 4 * 2) & 3;
    return (low | high << 4) - 32;
  }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    pairs_of_bits(block.qs, span, out);
    for (int i = 0; i < kSpan; ++i) out[i] |= std::uint8_t((block.hmask[i] >> span & 1) << 2);
  }
};

struct Q4_K : SixBitScales<block_q4_K> {
  static constexpr int kBits = 4, kZero = 0;
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const u8_t* qs = block.qs + span / 2 * 32;  // two spans share 32 bytes: low nibbles, high nibbles
    for (int i = 0; i < kSpan; ++i) out[i] = qs[i] >> (span % 2 * 4) & 15;
  }
};

struct Q5_K : SixBitScales<block_q5_K> {
  static constexpr int kBits = 5, kZero = 0;
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const u8_t* qs = block.qs + span / 2 * 32;
    for (int i = 0; i < kSpan; ++i)
      out[i] = std::uint8_t((qs[i] >> (span % 2 * 4) & 15) | (block.qh[i] >> span & 1) << 4);
  }
};

struct Q6_K : SuperBlock<block_q6_K> {
  static constexpr int kBits = 6, kZero = 32, kScales = 2, kMaxScale = 127;
  static int scale_code(const Block& block, int span, int half) { return block.scales[span * 2 + half]; }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const u8_t* ql =
        block.ql + span / 4 * 64 + span % 2 * 32;  // four spans share 64 bytes of ql and 32 of qh
    const u8_t* qh = block.qh + span / 4 * 32;
    for (int i = 0; i < kSpan; ++i)
      out[i] = std::uint8_t((ql[i] >> (span % 4 / 2 * 4) & 15) | (qh[i] >> (span % 4 * 2) & 3) << 4);
  }
};

template <class B>
struct IQ2 : SuperBlock<B> {
  static constexpr int kBits = 3, kMaxScale = 31;
  static constexpr Table kTable = signed_levels<IQ2_MAGNITUDES>();
  static float unit(const B& block) { return half_to_float(block.d) * 0.125f; }
};

struct IQ2_XXS : IQ2<block_iq2_xxs> {
  // A span has 8 bytes: four indices, then four times 7 sign bits, and 4 bits of scale.
  static std::uint32_t signs_and_scale(const Block& block, int span) {
    return load_word<std::uint32_t>(block.qs + span * 4 + 2);
  }
  static int scale_code(const Block& block, int span, int) {
    return 2 * int(signs_and_scale(block, span) >> 28) + 1;
  }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const std::uint32_t index = load_word<std::uint32_t>(block.qs + span * 4),
                        signs = signs_and_scale(block, span);
    for (int i = 0; i < 4; ++i)
      signed_codes<8>(kIQ2_XXS_grid[index >> 8 * i & 255], even_signs(signs >> 7 * i), out + 8 * i);
  }
};

template <class B>
struct IQ2WithHalves : IQ2<B> {  // a scale per 16 columns
  static constexpr int kScales = 2;
  static int scale_code(const B& block, int span, int half) {
    return 2 * nibble(block.scales, span * 2 + half) + 1;
  }
};

struct IQ2_XS : IQ2WithHalves<block_iq2_xs> {
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    for (int i = 0; i < 4; ++i) {
      const unsigned q = block.qs[span * 4 + i];
      signed_codes<8>(kIQ2_XS_grid[q & 511], even_signs(q >> 9), out + 8 * i);
    }
  }
};

struct IQ2_S : IQ2WithHalves<block_iq2_s> {
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    for (int i = 0; i < 4; ++i) {
      const int index = block.qs[span * 4 + i] | (block.qh[span] >> 2 * i & 3) << 8;
      signed_codes<8>(kIQ2_S_grid[index], block.signs[span * 4 + i], out + 8 * i);
    }
  }
};

struct IQ3_XXS : SuperBlock<block_iq3_xxs> {
  static constexpr int kBits = 4, kMaxScale = 31;
  static constexpr Table kTable = signed_levels<IQ3_XXS_MAGNITUDES>();
  static float unit(const Block& block) { return half_to_float(block.d) * 0.25f; }
  static std::uint32_t signs_and_scale(const Block& block, int span) {
    return load_word<std::uint32_t>(block.signs + span * 4);
  }
  static int scale_code(const Block& block, int span, int) {
    return 2 * int(signs_and_scale(block, span) >> 28) + 1;
  }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    const std::uint32_t bits = signs_and_scale(block, span);
    for (int i = 0; i < 8; ++i) {
      const unsigned signs = even_signs(bits >> 7 * (i / 2)) >> (i % 2 * 4);
      signed_codes<4>(kIQ3_XXS_grid[block.qs[span * 8 + i]], signs, out + 4 * i);
    }
  }
};

struct IQ3_S : SuperBlock<block_iq3_s> {
  static constexpr int kBits = 4, kMaxScale = 31;
  static constexpr Table kTable = signed_levels<IQ3_S_MAGNITUDES>();
  static int scale_code(const Block& block, int span, int) { return 2 * nibble(block.scales, span) + 1; }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    for (int i = 0; i < 8; ++i) {
      const int index = block.qs[span * 8 + i] | (block.qh[span] >> i & 1) << 8;
      signed_codes<4>(kIQ3_S_grid[index], block.signs[span * 4 + i / 2] >> (i % 2 * 4), out + 4 * i);
    }
  }
};

struct IQ4_NL : Scaled<block_iq4_nl> {
  static constexpr int kBits = 4;
  static constexpr Table kTable = {{IQ4_VALUES}};
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) { nibbles(block.qs, out); }
};

struct IQ4_XS : SuperBlock<block_iq4_xs> {
  static constexpr int kBits = 4, kMaxScale = 31;
  static constexpr Table kTable = {{IQ4_VALUES}};
  static int scale_code(const Block& block, int span, int) {
    return (nibble(block.scales_l, span) | (block.scales_h >> 2 * span & 3) << 4) - 32;
  }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    nibbles(block.qs + span * 16, out);
  }
};

// Three values in two bits. Scale and zero are 1.
template <class B>
struct Ternary : SuperBlock<B> {
  static constexpr int kBits = 2, kZero = 1, kMaxScale = 1;
  static int scale_code(const B&, int, int) { return 1; }
};

struct TQ1_0 : Ternary<block_tq1_0> {
  // byte / 256 is a fraction in base 3. A factor of 3^n moves digit n before the point.
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    static constexpr std::uint8_t kPowers[] = {1, 3, 9, 27, 81};
    for (int i = 0; i < kSpan; ++i) {
      // Columns in order: five digits of 32 bytes, five of 16, and four of 4.
      const int column = span * kSpan + i;
      const u8_t* bytes = column < 160 ? block.qs : column < 240 ? block.qs + 32 : block.qh;
      const int width = column < 160 ? 32 : column < 240 ? 16 : 4;
      const int at = column - (column < 160 ? 0 : column < 240 ? 160 : 240);
      out[i] = std::uint8_t(std::uint8_t(bytes[at % width] * kPowers[at / width]) * 3 >> 8);
    }
  }
};

struct TQ2_0 : Ternary<block_tq2_0> {
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    pairs_of_bits(block.qs, span, out);
  }
};

struct MXFP4 {
  using Block = block_mxfp4;
  static constexpr std::size_t kValues = QK4_0;
  static constexpr int kBits = 4;
  static constexpr Table kTable = {{MXFP4_VALUES}};
  static float unit(const Block& block) {  // 2^(e - 128), subnormal for 0 and 1
    return std::bit_cast<float>(block.e < 2 ? 0x200000u << block.e : (block.e - 1u) << 23);
  }
  static void codes(const Block& block, int, std::uint8_t out[kSpan]) { nibbles(block.qs, out); }
};

struct NVFP4 {
  using Block = block_nvfp4;
  static constexpr std::size_t kValues = QK_NVFP4;
  static constexpr int kBits = 4, kScales = 2;
  static constexpr Table kTable = {{MXFP4_VALUES}};
  static float half_scale(const Block& block, int span, int half) {
    const int bits = block.d[2 * span + half], exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (bits == 0x7F) return 0;  // the code of NaN
    return std::ldexp(float(exponent > 0 ? mantissa + 8 : mantissa), (exponent > 0 ? exponent : 1) - 11);
  }
  static void codes(const Block& block, int span, std::uint8_t out[kSpan]) {
    for (int i = 0; i < kSpan; ++i) {
      const u8_t byte = block.qs[span * 16 + i / 16 * 8 + i % 8];
      out[i] = i % 16 < 8 ? byte & 15 : byte >> 4;
    }
  }
};

// Returns block `index` of a row. Files align tensors, not blocks; the copy compiles to plain loads.
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
