// Bindings for the abilities of the machine: its kernel sets, and limits to be timed.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "../cpu/kernels/kernels.h"
#include "../cpu/kernels/processor.h"
#include "../cpu/workload.h"
#include "bindings.h"
#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::python {

using namespace cpu;

namespace {

std::vector<std::string> kernel_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace

void bind_machine(nb::module_& m) {
  m.def("kernel_sets", kernel_sets, "Names of the sets that this machine runs, fastest first.");
  m.def("pair_speedup", pair_speedup,
        "Measured speed of products of bfloat16 pairs in vectors relative to float32; 0 without such "
        "products.");
  m.def("use_pair_speedup", use_pair_speedup, "speedup"_a,
        "Takes the result of an earlier process for pair_speedup(), before anything has measured it.");
  m.def("built_sets", built_sets, "Names of the sets that the compiler built, fastest first.");
  nb::class_<Workload>(m, "Workload", "A step of the engine, or a limit of the machine, to be timed.")
      .def("run", &Workload::run, "repetitions"_a, nb::call_guard<GilRelease>(),
           "Seconds that the repetitions take.")
      .def_ro("multiply_adds", &Workload::multiply_adds, "Products of one repetition.")
      .def_ro("bytes", &Workload::bytes, "Bytes of weights that one repetition reads.");
  m.def("peak_workload", peak_workload, "set"_a, "what"_a, "threads"_a,
        "Products in registers (int8, float32, bfloat16) or reading of memory.");
  m.def("peaks", peaks, "set"_a, "Names of the limits that a set has.");
}

}  // namespace metal_prefill::python
