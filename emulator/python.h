#pragma once

#include <nanobind/nanobind.h>

namespace metal_emulator {

// Binds emulator.h in a Python module, so that tests can observe and control the emulator of this extension.
void bind_emulator(nanobind::module_& m);

}  // namespace metal_emulator
