// The scan of a state-space layer.
//
// An item is a head of a sequence: its tokens are scanned in order, so that results do not depend on how a
// text was divided. Each stored state is computed in place, from a copy of the previously stored one, first
// that before the chunk.
#include <algorithm>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

// Rows [first, first + count) of one sequence, for a head.
ScanHead head_of(const ScanStep& step, int first, int head) {
  const Config& c = step.config;
  const int dim = c.scan_value_dim, group = head / (c.scan_heads / c.scan_groups);
  const float *x = step.convolved.row(first), *b = x + c.scan_dim() + group * c.scan_key_dim;
  return {.x = x + head * dim,
          .b = b,
          .c = b + c.scan_groups * c.scan_key_dim,
          .dt = step.projected.row(first) + c.scan_dim() + c.scan_channels() + head,
          .y = step.out.row(first) + head * dim,
          .x_stride = step.convolved.stride,
          .dt_stride = step.projected.stride,
          .y_stride = step.out.stride,
          .dim = dim,
          .rows = c.scan_key_dim,
          .a = floats(step.weights.scan_rates)[head],
          .dt_bias = floats(step.weights.scan_step)[head],
          .skip = floats(step.weights.scan_skip)[head],
          .state = nullptr};
}

void scan_head(const Kernels& kernels, const ScanStep& step, std::span<const Row> rows, int head) {
  const std::size_t values = std::size_t(step.config.scan_key_dim) * std::size_t(step.config.scan_value_dim);
  const std::size_t place = step.first + std::size_t(head) * values;
  const float* before = rows.front().state ? rows.front().state + place : nullptr;
  for (std::size_t done = 0; done < rows.size();) {
    std::size_t end = done;
    while (!rows[end].next) ++end;  // the last row of a chunk stores its state
    ++end;
    ScanHead scanned = head_of(step, rows[done].index, head);
    scanned.state = rows[end - 1].next + place;
    if (before)
      std::copy_n(before, values, scanned.state);
    else
      std::fill_n(scanned.state, values, 0.0f);
    kernels.scan(scanned, int(end - done));
    before = scanned.state;
    done = end;
  }
}

}  // namespace

void scan(const Context& c, const ScanStep& step, std::span<const Row> all,
          std::span<const RowRange> sequences) {
  const int heads = step.config.scan_heads;
  c.worker.for_each(int(sequences.size()) * heads, [&](int i) {
    const RowRange& sequence = sequences[std::size_t(i / heads)];
    scan_head(c.kernels, step, all.subspan(std::size_t(sequence.first), std::size_t(sequence.count)),
              i % heads);
  });
}

void gate_scan(const Context& c, const ScanStep& step, std::span<const Row> wanted, const Activations& out) {
  const Config& config = step.config;
  const Tensor& norm = step.weights.scan_group_norm;
  const int size = config.scan_dim() / config.scan_groups;
  c.worker.for_each(int(wanted.size()), [&](int i) {
    const int row = wanted[std::size_t(i)].index;
    float* to = out.f32.row(i);
    c.kernels.gated(step.projected.row(row), step.out.row(row), Activation::kSilu, config.scan_dim(), to);
    for (int first = 0; norm && first < config.scan_dim(); first += size)
      c.kernels.rms_norm(to + first, floats(norm) + first, config.norm_eps, size, to + first);
    round_row(c, out, i, config.scan_dim());
  });
}

}  // namespace metal_prefill::cpu
