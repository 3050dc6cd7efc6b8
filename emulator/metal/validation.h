// The checks of Apple's validation layer that depend on the bindings of a dispatch when it is encoded.
#pragma once

#include <string>

#include "emulator.h"

namespace metal_emulator {

// Formats "kernel 'name', dispatch 3, buffer(2) 'weights'".
std::string describe(const DispatchCommand& dispatch, const KernelArgument& argument);

// The caller's sizes, before they are narrowed.
struct Size {
  std::uint64_t width, height, depth;
};

// Each throws ValidationError.
void check_geometry(const DispatchCommand& dispatch, const Size& grid, const Size& group);
void check_buffers(const DispatchCommand& dispatch);
void check_threadgroup_memory(const DispatchCommand& dispatch);

}  // namespace metal_emulator
