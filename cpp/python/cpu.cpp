// Bindings for the processor's kernel sets.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "../cpu/kernels/kernels.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {

using namespace cpu;

void bind_machine(nb::module_& m) {
  m.def("kernel_sets", kernel_sets, "Names of the sets that this machine runs, fastest first.");
  m.def("pair_speedup", pair_speedup,
        "Measured speed of products of bfloat16 pairs in vectors relative to float32; 0 without such "
        "products.");
  m.def("use_pair_speedup", use_pair_speedup, "speedup"_a,
        "Takes the result of an earlier process for pair_speedup(), before anything has measured it.");
  m.def("built_sets", built_sets, "Names of the sets that the compiler built, fastest first.");
}

}  // namespace metal_prefill::python
