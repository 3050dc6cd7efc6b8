// The kernels of the CPU engine in the Python module, for tests.
#pragma once

#include <nanobind/nanobind.h>

namespace metal_prefill::cpu {

void bind_cpu_kernels(nanobind::module_& m);

}  // namespace metal_prefill::cpu
