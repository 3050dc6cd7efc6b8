// Tensor types of a GGUF file: their sizes, and the reference conversion of a row to float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "../shaders/quants.h"

namespace metal_prefill {

// Values are those of the GGUF specification.
enum class TensorType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

struct TypeInfo {
  std::string_view name;
  std::size_t block_values;  // values in a block
  std::size_t block_bytes;   // bytes of a block
};

// Throws std::invalid_argument for a type that is not in the enumeration.
const TypeInfo& type_info(TensorType type);

// Bytes of a row of `n` values. Throws std::invalid_argument when `n` is not a multiple of the block.
std::size_t row_bytes(TensorType type, std::size_t n);

float half_to_float(std::uint16_t bits);
std::uint16_t float_to_half(float value);  // round to nearest even
float bfloat16_to_float(std::uint16_t bits);

// The 6-bit scale and minimum of one of the eight groups of a Q4_K or Q5_K super-block.
struct ScaleMin {
  std::uint8_t scale;
  std::uint8_t min;
};
ScaleMin k_scale_min(const std::uint8_t scales[12], int group);

// Dequantizes `n` values, exactly as `gguf.quants` does (same operations, same order, float32).
void dequantize_row(TensorType type, const void* row, float* out, std::size_t n);

}  // namespace metal_prefill
