// Shaders compiled for NVIDIA GPUs, as registered by objects that the build generates.
#pragma once

#include <span>
#include <string_view>

namespace metal_emulator::cuda {

// Assembly with one entry, ready for the driver except for its placeholders.
struct Module {
  const char* entry;
  const char* assembly;
};

// The modules of one source. Those of kernel n, in the order of its ShaderLibrary, are kernel_n_values and
// kernel_n_addresses.
struct Image {
  std::string_view name, source;  // as in the ShaderLibrary
  std::span<const Module> modules;
};

bool register_image(const Image* image);
// Returns null if the source was not compiled for NVIDIA GPUs.
const Image* find_image(std::string_view name, std::string_view source);

}  // namespace metal_emulator::cuda
