// The kernels of each instruction set, for tests: every function names a set of _core.cpu.kernel_sets().
#include "python.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "packing.h"
#include "peak.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace metal_prefill::cpu {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<const std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutVector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

const Kernels& kernels_of(const std::string& set) {
  for (const Kernels* kernels : available_kernels())
    if (set == kernels->name) return *kernels;
  throw std::invalid_argument("no kernel set '" + set + "'");
}

// Rows of x quantized into tiles; the first row is token `first`.
struct Tiles {
  Buffer memory;
  Int8Rows rows;

  Tiles(const Kernels& kernels, const Matrix& x, int first) {
    const int tokens = int(x.shape(0)), cols = int(x.shape(1));
    require(cols % kBlockCols == 0, "cols must be a multiple of 32");
    rows.blocks = cols / kBlockCols;
    const std::size_t n_tiles = std::size_t((first + tokens + kTileTokens - 1) / kTileTokens);
    memory = Buffer(n_tiles * std::size_t(rows.blocks) * sizeof(ActivationTile), "activations");
    rows.tiles = memory.as<ActivationTile>();
    for (int t = 0; t < tokens;) {
      const int lane = (first + t) % kTileTokens;
      const int n = std::min(tokens - t, kTileTokens - lane);
      kernels.quantize(x.data() + std::size_t(t) * std::size_t(cols), std::size_t(cols), lane, n, rows.blocks,
                       rows.tile(first + t));
      t += n;
    }
  }
};

// (q [tokens, cols], scale, scaled_sum, start, start_half [tokens, blocks]) as float64 arrays of their own.
nb::tuple quantize(const std::string& set, const Matrix& x, int first) {
  const Tiles tiles(kernels_of(set), x, first);
  const std::size_t tokens = x.shape(0), blocks = std::size_t(tiles.rows.blocks);
  const auto make = [&](std::size_t cols, auto&& value) {
    auto* data = new double[tokens * cols];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<double*>(p); });
    for (std::size_t t = 0; t < tokens; ++t) {
      const int token = first + int(t);
      for (std::size_t c = 0; c < cols; ++c)
        data[t * cols + c] = double(value(tiles.rows.tile(token), token % kTileTokens, c));
    }
    return nb::ndarray<nb::numpy, double, nb::ndim<2>>(data, {tokens, cols}, owner);
  };
  return nb::make_tuple(
      make(blocks * kBlockCols,
           [](const ActivationTile* x, int t, std::size_t c) { return x[c / 32].q[t][c % 32]; }),
      make(blocks, [](const ActivationTile* x, int t, std::size_t b) { return x[b].scale[t]; }),
      make(blocks, [](const ActivationTile* x, int t, std::size_t b) { return x[b].scaled_sum[t]; }),
      make(blocks, [](const ActivationTile* x, int t, std::size_t b) { return x[b].start[t]; }),
      make(blocks, [](const ActivationTile* x, int t, std::size_t b) { return x[b].start_half[t]; }));
}

// out[i, 32 * g + r] for tokens first + i, i < len(x). `out` may be wider: what is beyond the groups stays.
void multiply_int8(const std::string& set, std::uint32_t type, const Bytes& weight, int rows, const Matrix& x,
                   int first, OutMatrix out) {
  const Kernels& kernels = kernels_of(set);
  const int cols = int(x.shape(1)), tokens = int(x.shape(0));
  const Tensor tensor{
      "weight",       TensorType(type), rows, cols, reinterpret_cast<const std::byte*>(weight.data()),
      weight.shape(0)};
  require(tensor.bytes == row_bytes(tensor.type, std::size_t(cols)) * std::size_t(rows),
          "weight has another size");
  const Buffer blocks(packed_size(tensor), "weights");
  const PackedMatrix packed{packing_of(tensor.type), rows, cols, blocks.data()};
  require(packed.packing != Packing::kNone, "the type is not quantized");
  require(int(out.shape(0)) >= tokens && int(out.shape(1)) >= packed.groups() * kGroupRows,
          "out is too small");
  const Tiles tiles(kernels, x, first);
  for (int group = 0; group < packed.groups(); ++group) {
    pack_group(tensor, group, blocks.data());
    kernels.multiply_int8(packed, group, tiles.rows, first, tokens, out.data() + group * kGroupRows,
                          out.shape(1));
  }
}

// weight [32, padded], x [tokens, padded] with zeros behind `cols`.
void multiply_float(const std::string& set, const Matrix& weight, int cols, const Matrix& x, OutMatrix out) {
  const std::size_t padded = round_up(std::size_t(cols), kFloatPad);
  require(weight.shape(0) == kGroupRows && weight.shape(1) == padded && x.shape(1) == padded, "wrong shape");
  require(out.shape(0) >= x.shape(0) && out.shape(1) >= kGroupRows, "out is too small");
  kernels_of(set).multiply_float({const_cast<float*>(weight.data()), padded}, cols,
                                 {const_cast<float*>(x.data()), padded}, 0, int(x.shape(0)), out.data(),
                                 out.shape(1));
}

void rms_norm(const std::string& set, const Vector& x, const Vector& weight, float eps, OutVector out) {
  require(weight.shape(0) == x.shape(0) && out.shape(0) >= x.shape(0), "wrong shape");
  kernels_of(set).rms_norm(x.data(), weight.data(), eps, int(x.shape(0)), out.data());
}

void rope(const std::string& set, OutVector head, const Vector& cos_sin, bool neox) {
  const int pairs = int(cos_sin.shape(0) / 2);
  require(head.shape(0) >= std::size_t(2 * pairs), "wrong shape");
  kernels_of(set).rope(head.data(), cos_sin.data(), pairs, neox ? RopeStyle::kNeox : RopeStyle::kInterleaved);
}

void gated(const std::string& set, const Vector& gate, const Vector& up, bool gelu, OutVector out) {
  require(gate.shape(0) == up.shape(0) && out.shape(0) >= gate.shape(0), "wrong shape");
  kernels_of(set).gated(gate.data(), up.data(), gelu ? Activation::kGelu : Activation::kSilu,
                        int(gate.shape(0)), out.data());
}

double sum_exp(const std::string& set, const Vector& x, float shift) {
  return kernels_of(set).sum_exp(x.data(), shift, int(x.shape(0)));
}

void half_to_float(const std::string& set, const Halves& in, bool bfloat16, OutVector out) {
  require(out.shape(0) >= in.shape(0), "out is too small");
  const Kernels& kernels = kernels_of(set);
  (bfloat16 ? kernels.bfloat16_to_float : kernels.half_to_float)(in.data(), out.data(), int(in.shape(0)));
}

// Causal attention of one group of heads: q [tokens, heads * key_dim] are the last tokens of the keys and
// values [positions, dim]. Tokens [first, first + count) are answered into out [tokens, heads * value_dim].
void attention(const std::string& set, const Matrix& q, const Matrix& keys, const Matrix& values, bool half,
               int window, float scale, int first, int count, OutMatrix out, bool exact) {
  const Kernels& kernels = kernels_of(set);
  const int positions = int(keys.shape(0)), key_dim = int(keys.shape(1)), value_dim = int(values.shape(1));
  const int tokens = int(q.shape(0)), heads = int(q.shape(1)) / key_dim;
  require(tokens <= positions && int(values.shape(0)) == positions && int(q.shape(1)) == heads * key_dim &&
              first >= 0 && first + count <= tokens && out.shape(0) >= q.shape(0) &&
              int(out.shape(1)) == heads * value_dim,
          "wrong shape");
  const std::size_t element = half ? 2 : 4, capacity = round_up(std::size_t(positions), kKeySpan);
  const std::size_t value_stride = round_up(std::size_t(value_dim), kFloatPad);
  const Buffer key_blocks(capacity * std::size_t(key_dim) * element, "keys");
  const Buffer value_rows(capacity * value_stride * element, "values");
  for (int p = 0; p < positions; ++p) {
    const std::size_t row = std::size_t(p);
    kernels.store_key(keys.data() + row * std::size_t(key_dim), key_dim, half,
                      key_blocks.data() + row / kKeyBlock * kKeyBlock * std::size_t(key_dim) * element,
                      p % kKeyBlock);
    kernels.store_value(values.data() + row * std::size_t(value_dim), value_dim, half,
                        value_rows.data() + row * value_stride * element);
  }
  kernels.attention({.q = q.data(),
                     .q_stride = q.shape(1),
                     .out = out.data(),
                     .out_stride = out.shape(1),
                     .keys = key_blocks.data(),
                     .values = value_rows.data(),
                     .half = half,
                     .key_dim = key_dim,
                     .value_dim = value_dim,
                     .value_stride = int(value_stride),
                     .heads = heads,
                     .position = positions - tokens,
                     .window = window,
                     .scale = scale,
                     .exact = exact},
                    first, count);
}

// How often each item of each phase was computed, when a team runs `phases` in each of `jobs` calls; one list
// per phase, its length the number of items. An item of a phase sees the count of the same item of the phase
// before.
std::vector<std::vector<int>> run_team(int threads, const std::vector<int>& phases, int jobs) {
  std::vector<std::vector<int>> counts;
  for (const int items : phases) counts.emplace_back(std::size_t(items));
  nb::gil_scoped_release release;
  Team team(threads);
  for (int job = 0; job < jobs; ++job) {
    std::atomic<bool> in_order{true};
    team.run([&](Worker& worker) {
      for (std::size_t p = 0; p < phases.size(); ++p) {
        worker.for_each(phases[p], [&](int i) {
          ++counts[p][std::size_t(i)];
          if (p > 0 && i < phases[p - 1] && counts[p - 1][std::size_t(i)] != job + 1) in_order = false;
        });
      }
    });
    if (!in_order) throw std::runtime_error("a phase began before the one before it was over");
  }
  return counts;
}

}  // namespace

void bind_cpu_kernels(nb::module_& m) {
  m.def(
      "kernel_sets",
      [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
        return names;
      },
      "Names of the sets that this machine runs, fastest first.");
  m.def("int8_peak", int8_peak, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "8-bit multiply-adds a second that this machine can do; 0 where it is not known.");
  m.def("quantize", quantize, "set"_a, "x"_a, "first"_a = 0,
        "Activations in 8 bits: (q, scale, scaled_sum, start, start_half).");
  m.def("multiply_int8", multiply_int8, "set"_a, "type"_a, "weight"_a, "rows"_a, "x"_a, "first"_a, "out"_a,
        "Product of a packed matrix and quantized activations.");
  m.def("multiply_float", multiply_float, "set"_a, "weight"_a, "cols"_a, "x"_a, "out"_a,
        "Product of 32 rows and activations in float32.");
  m.def("rms_norm", rms_norm, "set"_a, "x"_a, "weight"_a, "eps"_a, "out"_a, "RMSNorm of a row.");
  m.def("rope", rope, "set"_a, "head"_a, "cos_sin"_a, "neox"_a, "Rotation of a head, in place.");
  m.def("gated", gated, "set"_a, "gate"_a, "up"_a, "gelu"_a, "out"_a, "SwiGLU or GeGLU.");
  m.def("sum_exp", sum_exp, "set"_a, "x"_a, "shift"_a, "Sum of exp(x - shift).");
  m.def("half_to_float", half_to_float, "set"_a, "values"_a, "bfloat16"_a, "out"_a,
        "Conversion of 16-bit floats.");
  m.def("attention", attention, "set"_a, "q"_a, "keys"_a, "values"_a, "half"_a, "window"_a, "scale"_a,
        "first"_a, "count"_a, "out"_a, "exact"_a = false, "Causal attention of one group of heads.");
  m.def("run_team", run_team, "threads"_a, "phases"_a, "jobs"_a, "How often a team computes each item.");
}

}  // namespace metal_prefill::cpu
