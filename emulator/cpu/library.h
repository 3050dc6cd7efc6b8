// Shader libraries for the Metal classes, built from the tables of compiled shaders.
#pragma once

#include "abi.h"

namespace metal_emulator::cpu {

// The object that Kernel::entry points to.
struct KernelEntry {
  const abi::Kernel* plain = nullptr;
  const abi::Kernel* checked = nullptr;  // null if the shaders were built without checks
};

}  // namespace metal_emulator::cpu
