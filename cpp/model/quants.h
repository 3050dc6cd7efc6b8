// Tensor types of a GGUF file: their sizes, and the reference conversion of a row to float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "../../shaders/quants.h"

namespace metal_prefill {

// Values follow the GGUF specification.
enum class TensorType : std::uint32_t {
#define METAL_PREFILL_TYPE(shader_name, Name, number) k##Name = (number),
  EACH_TENSOR_TYPE(METAL_PREFILL_TYPE)
#undef METAL_PREFILL_TYPE
};

struct TypeInfo {
  TensorType type;
  std::string_view name;
  std::size_t block_values;
  std::size_t block_bytes;
};

// All types, in the order in which a message lists them.
std::span<const TypeInfo> tensor_types();

// Throws std::invalid_argument for a type that is not in the enumeration.
const TypeInfo& type_info(TensorType type);

// Bytes of a row of `n` values. Throws std::invalid_argument when `n` is not a multiple of the block.
std::size_t row_bytes(TensorType type, std::size_t n);

// Pure functions of the argument (gnu::const), so that loops may compute a result once.
[[gnu::const]] float half_to_float(std::uint16_t bits);
[[gnu::const]] std::uint16_t float_to_half(float value);  // round to nearest even
[[gnu::const]] float bfloat16_to_float(std::uint16_t bits);

// Dequantizes `n` values exactly as `gguf.quants` does (same operations, same order, float32).
void dequantize_row(TensorType type, const void* row, float* out, std::size_t n);

}  // namespace metal_prefill
