// The language that each source of the shaders is compiled as.
#pragma once

#include <string_view>

namespace metal_prefill::metal {

struct ShaderLanguage {
  int major, minor;
};

// Needs Metal 4. Other sources take the language of the oldest macOS that the package runs on.
inline constexpr std::string_view kTensorSource = METAL_PREFILL_TENSOR_SOURCE;

constexpr ShaderLanguage language_of(std::string_view source) {
  return source == kTensorSource
             ? ShaderLanguage{METAL_PREFILL_TENSOR_LANGUAGE_MAJOR, METAL_PREFILL_TENSOR_LANGUAGE_MINOR}
             : ShaderLanguage{METAL_PREFILL_LANGUAGE_MAJOR, METAL_PREFILL_LANGUAGE_MINOR};
}

}  // namespace metal_prefill::metal
