// _cpu_testing: the kernels of each instruction set on NumPy arrays, single steps of the engine for timing,
// and the prefix tree. Every function for a kernel takes the name of a set in _core.kernel_sets().
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "cpu/threads.h"
#include "kernel_calls.h"
#include "kernel_workloads.h"
#include "prefix_tree_module.h"
#include "python/bindings.h"
#include "python/gil.h"
#include "python/vector_length.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::cpu {
namespace {

// The Python type of a parameter: arrays for views of them, everything else unchanged.
template <typename T>
struct Python {
  using Type = T;
  static T view(T value) { return value; }
};
template <typename T, int kDimensions>
struct Python<calls::Array<T, kDimensions>> {
  using Type = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
  static calls::Array<T, kDimensions> view(const Type& array) {
    return {array.data(), array.shape(0), kDimensions > 1 ? array.shape(kDimensions - 1) : 1};
  }
};

template <typename Result, typename... Parameters>
auto on_arrays(Result (*call)(Parameters...)) {
  return [call](const typename Python<std::decay_t<Parameters>>::Type&... arguments) {
    return call(Python<std::decay_t<Parameters>>::view(arguments)...);
  };
}

// Returns how often each item of each phase was computed if a team runs `phases` in each of `jobs` calls: a
// list per phase with an entry per item. An item sees the count of the same item of the previous phase.
std::vector<std::vector<int>> run_team(int threads, const std::vector<int>& phases, int jobs) {
  std::vector<std::vector<int>> counts;
  for (const int items : phases) counts.emplace_back(std::size_t(items));
  const GilRelease release;
  Team team(threads);
  for (int job = 0; job < jobs; ++job) {
    std::atomic<bool> in_order{true};
    team.run([&](Worker& worker) {
      for (std::size_t p = 0; p < phases.size(); ++p) {
        worker.for_each(phases[p], [&](int i) {
          // A thread that does not wait for the first item overtakes it.
          if (i == 0 && job < 5) std::this_thread::sleep_for(std::chrono::microseconds(200));
          ++counts[p][std::size_t(i)];
          if (p > 0 && i < phases[p - 1] && counts[p - 1][std::size_t(i)] != job + 1) in_order = false;
        });
      }
    });
    if (!in_order) throw std::runtime_error("a phase began before the one before it was over");
  }
  return counts;
}

double squares(const calls::Vector& x) {
  return sum_of_squares({x.data(), x.shape(0)});
}

void bind_kernels(nb::module_& m) {
#define METAL_PREFILL_CALL(name) m.def(#name, on_arrays(calls::name));
  METAL_PREFILL_KERNEL_CALLS(METAL_PREFILL_CALL)
#undef METAL_PREFILL_CALL
  nb::class_<Workload>(m, "Workload", "A step of the engine, or a limit of the machine, to be timed.")
      .def("run", &Workload::run, "repetitions"_a, nb::call_guard<GilRelease>(),
           "Seconds that the repetitions take.")
      .def_ro("multiply_adds", &Workload::multiply_adds, "Products of one repetition.")
      .def_ro("bytes", &Workload::bytes, "Bytes of weights that one repetition reads.");
  m.def("peak_workload", peak_workload, "set"_a, "what"_a, "threads"_a,
        "Products in registers (int8, float32, bfloat16) or reading of memory.");
  m.def("peaks", peaks, "set"_a, "Names of the limits that a set has.");
  m.def("product_workload", product_workload, "set"_a, "type"_a, "rows"_a, "cols"_a, "tokens"_a, "threads"_a,
        "compute"_a = "int8", "A matrix by a chunk of activations, weights from memory.");
  m.def("attention_workload", attention_workload, "set"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
        "threads"_a, "Causal attention of a prompt in one layer.");
  m.def("sum_of_squares", on_arrays(squares), "x"_a, "Sum of the squares of a vector, in double precision.");
  m.def("run_team", run_team, "threads"_a, "phases"_a, "jobs"_a, "How often a team computes each item.");
}

}  // namespace
}  // namespace metal_prefill::cpu

NB_MODULE(_cpu_testing, m) {
  m.doc() = "Kernels and steps of the CPU engine, for tests and for tools/measure/bench_kernels.py.";
  metal_prefill::python::bind_machine(m);
  metal_prefill::cpu::bind_kernels(m);
  metal_prefill::bind_prefix_tree(m);
}
