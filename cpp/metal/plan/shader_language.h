// The language version of each shader source.
#pragma once

#include <string_view>

namespace metal_prefill::metal {

struct ShaderLanguage {
  int major, minor;
};

// The sources that need Metal 4. Others use the language of the oldest macOS that the package supports.
inline constexpr std::string_view kMatmulTensorSource = "matmul_tensor.metal";
inline constexpr std::string_view kAttentionTensorSource = "attention_tensor.metal";

constexpr bool is_tensor_source(std::string_view source) {
  return source == kMatmulTensorSource || source == kAttentionTensorSource;
}

constexpr ShaderLanguage language_of(std::string_view source) {
  return is_tensor_source(source)
             ? ShaderLanguage{METAL_PREFILL_TENSOR_LANGUAGE_MAJOR, METAL_PREFILL_TENSOR_LANGUAGE_MINOR}
             : ShaderLanguage{METAL_PREFILL_LANGUAGE_MAJOR, METAL_PREFILL_LANGUAGE_MINOR};
}

}  // namespace metal_prefill::metal
