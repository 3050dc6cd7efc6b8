// _cpu_testing: the kernels of each instruction set on NumPy arrays, single steps of the engine for timing,
// and the prefix tree alone. Every function of a kernel takes the name of a set in _core.cpu.kernel_sets().
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
#include "engine/vector_length.h"
#include "kernel_calls.h"
#include "kernel_workloads.h"
#include "prefix_tree_module.h"
#include "python/bindings.h"
#include "python/gil.h"

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

// (q [tokens, cols], scale, scaled_sum, start, start_half [tokens, blocks]), float64.
nb::tuple quantize(const std::string& set, const Python<calls::Matrix>::Type& x, int first) {
  auto rows =
      std::make_unique<calls::QuantizedRows>(calls::quantize(set, Python<calls::Matrix>::view(x), first));
  calls::QuantizedRows& r = *rows;
  nb::capsule owner(rows.release(), [](void* p) noexcept { delete static_cast<calls::QuantizedRows*>(p); });
  const auto array = [&](std::vector<double>& values) {
    return nb::ndarray<nb::numpy, double, nb::ndim<2>>(
        values.data(), {r.tokens, r.tokens > 0 ? values.size() / r.tokens : 0}, owner);
  };
  return nb::make_tuple(array(r.q), array(r.scale), array(r.scaled_sum), array(r.start), array(r.start_half));
}

// How often each item of each phase was computed, when a team runs `phases` in each of `jobs` calls; one list
// per phase, its length the number of items. An item of a phase sees the count of the same item of the phase
// before.
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
  m.def("quantize", quantize, "set"_a, "x"_a, "first"_a = 0,
        "Activations in 8 bits: (q, scale, scaled_sum, start, start_half).");
  m.def("multiply_int8", on_arrays(calls::multiply_int8), "set"_a, "type"_a, "weight"_a, "rows"_a, "x"_a,
        "first"_a, "out"_a, "Product of a packed matrix and quantized activations.");
  m.def("multiply_float", on_arrays(calls::multiply_float), "set"_a, "weight"_a, "cols"_a, "x"_a, "out"_a,
        "Product of 32 rows and activations in float32.");
  m.def("multiply_float_panels", on_arrays(calls::multiply_float_panels), "set"_a, "weight"_a, "cols"_a,
        "x"_a, "out"_a, "Product of 32 rows and activations in float32.");
  m.def("multiply_half", on_arrays(calls::multiply_half), "set"_a, "weight"_a, "bfloat16"_a, "x"_a, "out"_a,
        "The same for few tokens, with weights in 16 bits.");
  m.def("multiply_pairs", on_arrays(calls::multiply_pairs), "set"_a, "type"_a, "weight"_a, "rows"_a, "x"_a,
        "first"_a, "out"_a, "Product of weights and activations rounded to bfloat16.");
  m.def("multiply_rotated", on_arrays(calls::multiply_rotated), "set"_a, "type"_a, "weight"_a, "rows"_a,
        "x"_a, "first"_a, "wide"_a, "activation"_a, "out"_a,
        "Product of rotated weights and activations in 8 or 16 bits, and its activation, if not -1.");
  m.def("rotate", on_arrays(calls::rotate), "set"_a, "x"_a, "wide"_a, "codes"_a, "scales"_a,
        "The form of activations in products of rotated rows.");
  m.def("round_to_bfloat16", on_arrays(calls::round_to_bfloat16), "set"_a, "x"_a, "out"_a,
        "The form of activations in products of pairs.");
  m.def("rms_norm", on_arrays(calls::rms_norm), "set"_a, "x"_a, "weight"_a, "eps"_a, "out"_a,
        "RMSNorm of a row.");
  m.def("layer_norm", on_arrays(calls::layer_norm), "set"_a, "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a,
        "LayerNorm of a row, without a bias if that is empty.");
  m.def("rope", on_arrays(calls::rope), "set"_a, "head"_a, "cos_sin"_a, "neox"_a,
        "Rotation of a head, in place.");
  m.def("gated", on_arrays(calls::gated), "set"_a, "gate"_a, "up"_a, "activation"_a, "out"_a,
        "SwiGLU, or GeGLU by tanh or by erf.");
  m.def("add_products", on_arrays(calls::add_products), "set"_a, "products"_a, "bias"_a, "columns"_a, "add"_a,
        "out"_a, "Products of a group with a bias, which may be empty, or added to what is there.");
  m.def("scan", on_arrays(calls::scan), "set"_a, "x"_a, "b"_a, "c"_a, "dt"_a, "factors"_a, "piece"_a,
        "state"_a, "out"_a, "The recurrence of one head of a state-space layer.");
  m.def("soft_cap", on_arrays(calls::soft_cap), "set"_a, "cap"_a, "x"_a, "cap * tanh(x / cap), in place.");
  m.def("relative_scores", on_arrays(calls::relative_scores), "set"_a, "q"_a, "k"_a, "keys"_a, "queries"_a,
        "row_of"_a, "scale"_a, "out"_a,
        "scale * (q . keys[row] + k[j] . queries[row]); the row of position j is entry n - 1 - j.");
  m.def("apply_gate", on_arrays(calls::apply_gate), "set"_a, "gate"_a, "x"_a, "x * sigmoid(gate), in place.");
  m.def("delta_rule", on_arrays(calls::delta_rule), "set"_a, "q"_a, "k"_a, "v"_a, "decay"_a, "beta"_a,
        "state"_a, "out"_a, "A token of the gated delta rule; the state is changed.");
  m.def("sum_exp", on_arrays(calls::sum_exp), "set"_a, "x"_a, "shift"_a, "Sum of exp(x - shift).");
  m.def("half_to_float", on_arrays(calls::half_to_float), "set"_a, "values"_a, "bfloat16"_a, "out"_a,
        "Conversion of 16-bit floats.");
  m.def("attention", on_arrays(calls::attention), "set"_a, "q"_a, "keys"_a, "values"_a, "kv_dtype"_a,
        "window"_a, "scale"_a, "first"_a, "count"_a, "out"_a, "sinks"_a, "exact"_a = false,
        "both_ways"_a = false, "key_multiple"_a = 0, "by_splits"_a = false,
        "Attention of one group of heads; sinks may be empty.");
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
