#pragma once

#include <nanobind/nanobind.h>

namespace metal_emulator {

// Binds emulator.h in a Python module, so that tests can observe and control the emulator of this extension.
void bind_emulator(nanobind::module_& m);

// A DispatchCounter of the bound module; None in builds without checked mode. For programs that report the
// bytes of their dispatches without knowing the emulator.
nanobind::object make_dispatch_counter();

}  // namespace metal_emulator
