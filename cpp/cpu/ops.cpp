#include "ops.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace metal_prefill::cpu {

namespace {

// Converts columns [first, first + columns) of rows [row, row + rows) of `from` to the other formats.
void round_from(const Context& c, const FloatRows& from, const Activations& a, int row, int rows, int first,
                int columns) {
  const float* x = from.data + first;
  if (a.forms.int8)
    for (int r = 0; r < rows; ++r)
      c.kernels.quantize(x + std::size_t(r) * from.stride, 0, (row + r) % kTileTokens, 1,
                         columns / kBlockCols, a.int8.tile(row + r) + first / kBlockCols);
  if (a.forms.super)
    for (int r = 0; r < rows; ++r)
      c.kernels.quantize_super(x + std::size_t(r) * from.stride, (row + r) % kTileTokens,
                               columns / kSuperCols, a.super.tile(row + r) + first / kSuperCols);
  if (a.forms.bfloat16)
    c.kernels.round_to_bfloat16(x, from.stride, rows, columns, a.bfloat16.row(row) + first,
                                a.bfloat16.stride);
  if (a.forms.rotated)
    for (int r = 0; r < rows; ++r)
      c.kernels.rotate_activations(x + std::size_t(r) * from.stride, columns, a.forms.wide,
                                   c.scratch.weights.as<float>(), a.rotated, row + r);
}

// A row that no step reads in float32 stays in the thread's scratch memory, in its cache.
void normalize_row(const Context& c, const float* x, const Norm& norm, int row, const Activations& out) {
  const FloatRows& rows = out.forms.f32 ? out.f32 : c.scratch.normed.f32;
  const FloatRows normed = {rows.row(out.forms.f32 ? row : 0), rows.stride};
  apply(c.kernels, norm, x, normed.data);
  round_from(c, normed, out, row, 1, 0, norm.dim);
}

// x = norm(x) of a row, also stored in the formats that `out` requests.
void normalize_row_in_place(const Context& c, const Norm& norm, int row, const FloatRows& x,
                            const Activations& out) {
  apply(c.kernels, norm, x.row(row), x.row(row));
  store_row(c, x.row(row), norm.dim, out, row);
}

void add(const float* from, int n, float* to) {
  for (int i = 0; i < n; ++i) to[i] += from[i];
}

// Adds row `row` of a table to `out`.
void add_embedding(const Tensor& table, int row, std::span<float> scratch, float* out) {
  dequantize_row(table.type, table.row(row), scratch.data(), scratch.size());
  add(scratch.data(), int(scratch.size()), out);
}

}  // namespace

void apply(const Kernels& kernels, const Norm& norm, const float* x, float* out) {
  if (!norm.weight) {
    if (x != out) std::copy_n(x, norm.dim, out);
  } else if (norm.kind == NormKind::kRms) {
    kernels.rms_norm(x, floats(norm.weight), norm.eps, norm.dim, out);
  } else {
    kernels.layer_norm(x, floats(norm.weight), norm.bias ? floats(norm.bias) : nullptr, norm.eps, norm.dim,
                       out);
  }
}

void round_rows(const Context& c, const Activations& a, int row, int rows, int first, int columns) {
  round_from(c, {a.f32.row(row), a.f32.stride}, a, row, rows, first, columns);
}

void store_row(const Context& c, float* x, int columns, const Activations& out, int row) {
  round_from(c, {x, 0}, out, row, 1, 0, columns);
  if (out.forms.f32) std::copy_n(x, columns, out.f32.row(row));
}

void embed(const Context& c, const Model& model, std::span<const Row> rows, const FloatRows& x) {
  const Config& config = model.config;
  const std::size_t dim = std::size_t(config.embedding_width());
  const Norm norm = {model.embedding_norm, model.embedding_norm_bias, int(dim), config.stream_eps(),
                     config.norm_kind};
  c.worker.for_each(int(rows.size()), [&](int i) {
    const Row& row = rows[std::size_t(i)];
    float* out = x.row(i);
    dequantize_row(model.token_embedding.type, model.token_embedding.row(row.token), out, dim);
    if (const float scale = config.stream_embedding_scale(); scale != 1.0f)
      for (std::size_t d = 0; d < dim; ++d) out[d] *= scale;
    const std::span scratch(c.scratch.embedded.as<float>(), dim);
    if (model.token_types) add_embedding(model.token_types, row.type, scratch, out);
    if (model.position_embedding) add_embedding(model.position_embedding, row.position, scratch, out);
    apply(c.kernels, norm, out, out);
  });
}

void per_layer_inputs(const Context& c, const Model& model, std::span<const Row> rows,
                      const FloatRows& inputs) {
  const Config& config = model.config;
  const std::size_t dim = std::size_t(config.per_layer_dim), columns = dim * std::size_t(config.n_layers);
  // The norm of projection / sqrt(dim) is that of the projection with a larger epsilon.
  const Norm norm = {model.per_layer_norm, kNoTensor, config.per_layer_dim,
                     config.norm_eps * float(config.dim), NormKind::kRms};
  const float table_scale = std::sqrt(float(dim)), half = std::numbers::sqrt2_v<float> / 2;
  const Tensor& table = model.per_layer_embedding;
  c.worker.for_each(int(rows.size()), [&](int i) {
    auto* own = c.scratch.embedded.as<float>();
    dequantize_row(table.type, table.row(rows[std::size_t(i)].token), own, columns);
    for (int layer = 0; layer < config.n_layers; ++layer) {
      float *out = inputs.row(i) + std::size_t(layer) * dim, *added = own + std::size_t(layer) * dim;
      apply(c.kernels, norm, out, out);
      for (std::size_t d = 0; d < dim; ++d) out[d] = (out[d] + table_scale * added[d]) * half;
    }
  });
}

void activate_and_multiply(const Context& c, Activation activation, const FloatRows& factors, int columns,
                           int rows, const Activations& x) {
  c.worker.for_each(rows, [&](int i) {
    c.kernels.gated(x.f32.row(i), factors.row(i), activation, columns, x.f32.row(i));
    round_row(c, x, i, columns);
  });
}

void scale_rows(const Context& c, float scale, int columns, int rows, const FloatRows& x) {
  c.worker.for_each(rows, [&](int i) {
    for (int d = 0; d < columns; ++d) x.row(i)[d] *= scale;
  });
}

void fill_up(const Context& c, const Activations& x, int columns, int rows) {
  if (columns % kPairPad == 0) return;
  c.worker.for_each(rows, [&](int i) {
    if (x.f32.data) std::fill_n(x.f32.row(i) + columns, round_up(columns, kFloatPad) - columns, 0.0f);
    if (x.forms.bfloat16)
      std::fill_n(x.bfloat16.row(i) + columns, round_up(columns, kPairPad) - columns, std::uint16_t(0));
  });
}

void NormedRows::prepare(const Context& c) const {
  if (!pending_) return;
  const auto& [x, norm, first, count] = *pending_;
  for (int i = 0; i < count; ++i) normalize_row(c, x->row(first + i), norm, i, rows_);
}

NormedRows normalize(const Context& c, const FloatRows& x, const Norm& norm, int first, int rows,
                     const Activations& out) {
  if (rows <= rows_of_own(c.worker.count())) return {x, norm, first, rows, c.scratch.normed};
  c.worker.for_each(rows, [&](int i) { normalize_row(c, x.row(first + i), norm, i, out); });
  return NormedRows(out);
}

void add_normalized(const Context& c, const FloatRows& y, const Norm& norm, int rows, const FloatRows& x) {
  c.worker.for_each(rows, [&](int i) {
    float* from = y.row(i);
    apply(c.kernels, norm, from, from);
    add(from, norm.dim, x.row(i));
  });
}

void normalize_in_place(const Context& c, const Norm& norm, int rows, const FloatRows& x,
                        const Activations& out) {
  c.worker.for_each(rows, [&](int i) { normalize_row_in_place(c, norm, i, x, out); });
}

void normalize_twice(const Context& c, const FloatRows& y, const Norm& first, const Norm& second, int rows,
                     const FloatRows& x, const Activations& out) {
  c.worker.for_each(rows, [&](int i) {
    float* attended = y.row(i);
    add(x.row(i), first.dim, attended);
    apply(c.kernels, first, attended, attended);
    add(attended, first.dim, x.row(i));
    normalize_row_in_place(c, second, i, x, out);
  });
}

void keep_rows(const Context& c, const FloatRows& x, int columns, std::span<const Row> kept) {
  if (kept.empty() || kept.back().index + 1 == int(kept.size())) return;  // no row moves
  // Each item moves its columns of all rows, first rows first: none is overwritten before it is read.
  constexpr int kColumns = 64;
  c.worker.for_each(ceil_div(columns, kColumns), [&](int item) {
    const int column = item * kColumns, n = std::min(kColumns, columns - column);
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const float* from = x.row(kept[i].index) + column;
      if (kept[i].index != int(i)) std::copy_n(from, n, x.row(int(i)) + column);
    }
  });
}

void rope_table(const Context& c, const Rope& rope, std::span<const Row> rows, float* table) {
  const std::size_t pairs = rope.frequencies.size();
  c.worker.for_each(int(rows.size()), [&](int i) {
    float* row = table + std::size_t(i) * 2 * pairs;
    for (std::size_t p = 0; p < pairs; ++p) {
      const Rotation turn = rope.at(std::size_t(rows[std::size_t(i)].position), p);
      row[p] = turn.cos;
      row[pairs + p] = turn.sin;
    }
  });
}

}  // namespace metal_prefill::cpu
