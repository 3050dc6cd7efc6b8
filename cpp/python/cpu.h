// Bindings for the abilities of the machine: its kernel sets, and limits to be timed.
#pragma once

#include <nanobind/nanobind.h>

namespace metal_prefill::cpu {

void bind_machine(nanobind::module_& m);

}  // namespace metal_prefill::cpu
