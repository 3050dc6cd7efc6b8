// Reference conversions: every operation and its order is that of gguf.quants, so that results are equal to
// the bit. Built without contraction to FMA for the same reason.
#include "quants.h"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace metal_prefill {

namespace {

constexpr TypeInfo kF32Info{"F32", 1, 4};
constexpr TypeInfo kF16Info{"F16", 1, 2};
constexpr TypeInfo kBF16Info{"BF16", 1, 2};
constexpr TypeInfo kQ4_0Info{"Q4_0", QK4_0, sizeof(block_q4_0)};
constexpr TypeInfo kQ4_1Info{"Q4_1", QK4_0, sizeof(block_q4_1)};
constexpr TypeInfo kQ5_0Info{"Q5_0", QK4_0, sizeof(block_q5_0)};
constexpr TypeInfo kQ5_1Info{"Q5_1", QK4_0, sizeof(block_q5_1)};
constexpr TypeInfo kQ8_0Info{"Q8_0", QK4_0, sizeof(block_q8_0)};
constexpr TypeInfo kQ4_KInfo{"Q4_K", QK_K, sizeof(block_q4_K)};
constexpr TypeInfo kQ5_KInfo{"Q5_K", QK_K, sizeof(block_q5_K)};
constexpr TypeInfo kQ6_KInfo{"Q6_K", QK_K, sizeof(block_q6_K)};

// The file promises an alignment of the tensor, not of each block; a copy compiles to plain loads.
template <typename Block>
Block block_at(const void* row, std::size_t index) {
  Block block;
  std::memcpy(&block, static_cast<const std::byte*>(row) + index * sizeof(Block), sizeof(Block));
  return block;
}

std::uint32_t word(const u8_t bytes[4]) {
  return std::uint32_t(bytes[0]) | std::uint32_t(bytes[1]) << 8 | std::uint32_t(bytes[2]) << 16 |
         std::uint32_t(bytes[3]) << 24;
}

void dequantize(const block_q4_0& block, float* out) {
  const float d = half_to_float(block.d);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * float((block.qs[j] & 15) - 8);
    out[j + 16] = d * float((block.qs[j] >> 4) - 8);
  }
}

void dequantize(const block_q4_1& block, float* out) {
  const float d = half_to_float(block.d);
  const float m = half_to_float(block.m);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * float(block.qs[j] & 15) + m;
    out[j + 16] = d * float(block.qs[j] >> 4) + m;
  }
}

void dequantize(const block_q5_0& block, float* out) {
  const float d = half_to_float(block.d);
  const std::uint32_t high = word(block.qh);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * float(int((block.qs[j] & 15) | (high >> j & 1) << 4) - 16);
    out[j + 16] = d * float(int((block.qs[j] >> 4) | (high >> (j + 16) & 1) << 4) - 16);
  }
}

void dequantize(const block_q5_1& block, float* out) {
  const float d = half_to_float(block.d);
  const float m = half_to_float(block.m);
  const std::uint32_t high = word(block.qh);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * float((block.qs[j] & 15) | (high >> j & 1) << 4) + m;
    out[j + 16] = d * float((block.qs[j] >> 4) | (high >> (j + 16) & 1) << 4) + m;
  }
}

void dequantize(const block_q8_0& block, float* out) {
  const float d = half_to_float(block.d);
  for (int j = 0; j < 32; ++j) out[j] = float(block.qs[j]) * d;
}

void dequantize(const block_q4_K& block, float* out) {
  const float d = half_to_float(block.d);
  const float dmin = half_to_float(block.dmin);
  for (int group = 0; group < 8; ++group) {
    const ScaleMin scale_min = k_scale_min(block.scales, group);
    const float scale = d * float(scale_min.scale);
    const float min = dmin * float(scale_min.min);
    const u8_t* qs = block.qs + group / 2 * 32;  // two groups share 32 bytes: low nibbles, high nibbles
    const int shift = group % 2 * 4;
    for (int j = 0; j < 32; ++j) *out++ = scale * float(qs[j] >> shift & 15) - min;
  }
}

void dequantize(const block_q5_K& block, float* out) {
  const float d = half_to_float(block.d);
  const float dmin = half_to_float(block.dmin);
  for (int group = 0; group < 8; ++group) {
    const ScaleMin scale_min = k_scale_min(block.scales, group);
    const float scale = d * float(scale_min.scale);
    const float min = dmin * float(scale_min.min);
    const u8_t* qs = block.qs + group / 2 * 32;
    const int shift = group % 2 * 4;
    for (int j = 0; j < 32; ++j) {
      const int q = (qs[j] >> shift & 15) | (block.qh[j] >> group & 1) << 4;
      *out++ = scale * float(q) - min;
    }
  }
}

void dequantize(const block_q6_K& block, float* out) {
  const float d = half_to_float(block.d);
  for (int group = 0; group < 8; ++group) {  // 32 values each; four of them share 64 bytes of ql and 32 of qh
    const u8_t* ql = block.ql + group / 4 * 64 + group % 2 * 32;
    const u8_t* qh = block.qh + group / 4 * 32;
    const int low_shift = group % 4 / 2 * 4;
    const int high_shift = group % 4 * 2;
    for (int j = 0; j < 32; ++j) {
      const int q = ((ql[j] >> low_shift & 15) | (qh[j] >> high_shift & 3) << 4) - 32;
      const int scale = group * 2 + j / 16;
      *out++ = d * float(block.scales[scale]) * float(q);
    }
  }
}

template <typename Block, std::size_t kValues>
void dequantize_blocks(const void* row, float* out, std::size_t n) {
  for (std::size_t b = 0; b < n / kValues; ++b) dequantize(block_at<Block>(row, b), out + b * kValues);
}

template <float (*kConvert)(std::uint16_t)>
void convert(const void* row, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = kConvert(block_at<std::uint16_t>(row, i));
}

}  // namespace

const TypeInfo& type_info(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return kF32Info;
    case TensorType::kF16:
      return kF16Info;
    case TensorType::kBF16:
      return kBF16Info;
    case TensorType::kQ4_0:
      return kQ4_0Info;
    case TensorType::kQ4_1:
      return kQ4_1Info;
    case TensorType::kQ5_0:
      return kQ5_0Info;
    case TensorType::kQ5_1:
      return kQ5_1Info;
    case TensorType::kQ8_0:
      return kQ8_0Info;
    case TensorType::kQ4_K:
      return kQ4_KInfo;
    case TensorType::kQ5_K:
      return kQ5_KInfo;
    case TensorType::kQ6_K:
      return kQ6_KInfo;
  }
  throw std::invalid_argument("tensor type " + std::to_string(std::uint32_t(type)) + " is not known");
}

std::size_t row_bytes(TensorType type, std::size_t n) {
  const TypeInfo& info = type_info(type);
  if (n % info.block_values != 0) {
    throw std::invalid_argument("a row of " + std::to_string(n) + " values is not a multiple of the " +
                                std::to_string(info.block_values) + " values in a block of " +
                                std::string(info.name));
  }
  return n / info.block_values * info.block_bytes;
}

float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
  const std::uint32_t exponent = bits >> 10 & 31;
  const std::uint32_t fraction = bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float32
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(float(fraction) * 0x1p-24f));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000)
    return std::uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));  // NaN stays quiet
  if (magnitude >= 0x477ff000) return sign | 0x7c00;                  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {
    // Below 2^-14 the result counts units of 2^-24: adding 0.5 makes the float32 adder round to such units.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return std::uint16_t(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000));
  }
  const std::uint32_t odd = magnitude >> 13 & 1;
  return std::uint16_t(sign | (magnitude - (112u << 23) + 0xfff + odd) >> 13);
}

float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t(bits) << 16);
}

ScaleMin k_scale_min(const std::uint8_t scales[12], int group) {
  if (group < 4) return {std::uint8_t(scales[group] & 63), std::uint8_t(scales[group + 4] & 63)};
  // The upper groups keep their low four bits in the last four bytes, the high two atop those of the lower
  // groups.
  return {std::uint8_t((scales[group + 4] & 15) | scales[group - 4] >> 6 << 4),
          std::uint8_t(scales[group + 4] >> 4 | scales[group] >> 6 << 4)};
}

void dequantize_row(TensorType type, const void* row, float* out, std::size_t n) {
  (void)row_bytes(type, n);  // refuses an unknown type or a partial block
  switch (type) {
    case TensorType::kF32:
      std::memcpy(out, row, n * sizeof(float));
      return;
    case TensorType::kF16:
      convert<half_to_float>(row, out, n);
      return;
    case TensorType::kBF16:
      convert<bfloat16_to_float>(row, out, n);
      return;
    case TensorType::kQ4_0:
      dequantize_blocks<block_q4_0, QK4_0>(row, out, n);
      return;
    case TensorType::kQ4_1:
      dequantize_blocks<block_q4_1, QK4_0>(row, out, n);
      return;
    case TensorType::kQ5_0:
      dequantize_blocks<block_q5_0, QK4_0>(row, out, n);
      return;
    case TensorType::kQ5_1:
      dequantize_blocks<block_q5_1, QK4_0>(row, out, n);
      return;
    case TensorType::kQ8_0:
      dequantize_blocks<block_q8_0, QK4_0>(row, out, n);
      return;
    case TensorType::kQ4_K:
      dequantize_blocks<block_q4_K, QK_K>(row, out, n);
      return;
    case TensorType::kQ5_K:
      dequantize_blocks<block_q5_K, QK_K>(row, out, n);
      return;
    case TensorType::kQ6_K:
      dequantize_blocks<block_q6_K, QK_K>(row, out, n);
      return;
  }
}

}  // namespace metal_prefill
