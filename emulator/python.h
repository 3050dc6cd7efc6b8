#pragma once

#include <nanobind/nanobind.h>

namespace metal_emulator {

// Puts emulator.h into a Python module: what a test sees and steers of the emulator inside this extension.
void bind_emulator(nanobind::module_& m);

}  // namespace metal_emulator
