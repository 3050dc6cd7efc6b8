// Reference conversions: the operations of gguf.quants in the same order, so that results are bit-identical.
// Built without contraction to FMA for the same reason.
#include "quants.h"

#include <bit>
#include <stdexcept>
#include <string>

#include "formats.h"

namespace metal_prefill {

namespace {

template <class Format>
void dequantize(const void* row, float* out, std::size_t n) {
  using namespace formats;
  if constexpr (std::is_same_v<Format, F32>) {
    std::memcpy(out, row, n * sizeof(float));
    return;
  }
  for (std::size_t b = 0; b < n / Format::kValues; ++b) {
    const auto block = block_at<Format>(row, b);
    if constexpr (Quantized<Format>) {
      for (int span = 0; span < int(Format::kValues) / kSpan; ++span, out += kSpan) {
        std::uint8_t codes[kSpan];
        Format::codes(block, span, codes);
        for (int half = 0; half < 2; ++half) {
          const float scale = scale_of<Format>(block, span, half);
          [[maybe_unused]] float min = 0;
          if constexpr (HasMin<Format>) min = min_of<Format>(block, span, half);
          for (int i = half * kSpan / 2; i < (half + 1) * kSpan / 2; ++i) {
            out[i] = scale * float(integer_of<Format>(codes[i]));
            if constexpr (HasMin<Format>) out[i] += min;
          }
        }
      }
    } else {
      out[b] = Format::value(block);
    }
  }
}

}  // namespace

std::span<const TypeInfo> tensor_types() {
  static constexpr TypeInfo kTypes[] = {
#define METAL_PREFILL_ROW(shader_name, Name, number) \
  {TensorType::k##Name, #Name, formats::Name::kValues, sizeof(formats::Name::Block)},
      EACH_TENSOR_TYPE(METAL_PREFILL_ROW)
#undef METAL_PREFILL_ROW
  };
  return kTypes;
}

const TypeInfo& type_info(TensorType type) {
  for (const TypeInfo& info : tensor_types())
    if (info.type == type) return info;
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
    return std::uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));  // a NaN stays quiet
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

void dequantize_row(TensorType type, const void* row, float* out, std::size_t n) {
  (void)row_bytes(type, n);  // rejects an unknown type or a partial block
  formats::visit(type, [&]<class Format>(Format) { dequantize<Format>(row, out, n); });
}

}  // namespace metal_prefill
