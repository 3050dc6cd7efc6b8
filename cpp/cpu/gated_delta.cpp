// Gated delta rule (arXiv:2412.06464): the state of a head is a matrix S [key_dim][value_dim]. For each
// token, in order,
//
//   S = exp(decay * softplus(alpha + step)) S;   S += k sigmoid(beta) (v - k S);   out = q S / sqrt(key_dim)
//
// where q and k, outputs of a convolution, are divided by their lengths. Each head is then normalized and
// multiplied by SiLU of its gate. Tokens are computed one by one, in any pass.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

constexpr float kLengthEps = 1e-6f;  // added to the square of a length

// Divides the heads of q and k by their lengths, and q by sqrt(key_dim). Turns alpha and beta into factors.
void prepare_row(const Context& c, const GatedDeltaStep& step, int row) {
  const Config& config = step.config;
  const int n = config.scan_key_dim;
  float* head = step.convolved.row(row);
  for (int i = 0; i < 2 * config.scan_groups; ++i, head += n)
    c.kernels.rms_norm(head, i < config.scan_groups ? step.q_norm : step.k_norm, kLengthEps / float(n), n,
                       head);
  float* alpha = step.rates.row(row);
  float* beta = alpha + config.scan_heads;
  const float* decay = floats(step.weights.gated_delta_decay);
  const float* bias = floats(step.weights.scan_step);
  for (int h = 0; h < config.scan_heads; ++h) {
    alpha[h] = std::exp(decay[h] * softplus(alpha[h] + bias[h]));
    beta[h] = 1.0f / (1.0f + std::exp(-beta[h]));
  }
}

// Updates the columns of a head's matrix from `column` on, over the rows of a sequence.
void scan_columns(const Context& c, const GatedDeltaStep& step, std::span<const Row> rows, int head,
                  int column) {
  const Config& config = step.config;
  const int n = config.scan_key_dim, width = config.scan_value_dim;
  const int columns = std::min(kGatedDeltaColumns, width - column);
  float* state = c.scratch.matrix.as<float>();
  const std::size_t first =
      step.first + std::size_t(head) * std::size_t(n) * std::size_t(width) + std::size_t(column);
  for (int i = 0; i < n; ++i) {
    float* to = state + i * kGatedDeltaColumns;
    std::fill_n(to, kGatedDeltaColumns, 0.0f);
    if (rows[0].state) std::copy_n(rows[0].state + first + std::ptrdiff_t(i) * width, columns, to);
  }
  const std::ptrdiff_t keys = std::ptrdiff_t(config.scan_groups) * n,
                       q = std::ptrdiff_t(head % config.scan_groups) * n;
  const std::ptrdiff_t place = std::ptrdiff_t(head) * width + column;  // offset in v and in the output
  for (const Row& row : rows) {
    const float* qkv = step.convolved.row(row.index);
    const float* rates = step.rates.row(row.index) + head;
    const GatedDeltaToken token = {.q = qkv + q,
                                   .k = qkv + keys + q,
                                   .v = qkv + 2 * keys + place,
                                   .decay = rates[0],
                                   .beta = rates[config.scan_heads],
                                   .key_dim = n,
                                   .columns = columns};
    c.kernels.gated_delta(token, state, step.out.row(row.index) + place);
    if (row.next)
      for (int i = 0; i < n; ++i)
        std::copy_n(state + i * kGatedDeltaColumns, columns, row.next + first + std::ptrdiff_t(i) * width);
  }
  c.scratch.multiply_adds += 3.0 * n * columns * double(rows.size());
}

}  // namespace

void gated_delta(const Context& c, const GatedDeltaStep& step, std::span<const Row> all,
                 std::span<const RowRange> sequences) {
  const int n = int(all.size());
  c.worker.for_each(2 * n, [&](int i) {
    if (i >= n) return store_conv_state(step.conv, all[std::size_t(i - n)]);
    convolve(c, step.conv, all[std::size_t(i)], step.convolved.row(i));
    prepare_row(c, step, i);
  });
  const int heads = step.config.scan_heads, blocks = ceil_div(step.config.scan_value_dim, kGatedDeltaColumns);
  c.worker.for_each(int(sequences.size()) * heads * blocks, [&](int item) {
    const RowRange& sequence = sequences[std::size_t(item / (heads * blocks))];
    scan_columns(c, step, all.subspan(std::size_t(sequence.first), std::size_t(sequence.count)),
                 item / blocks % heads, item % blocks * kGatedDeltaColumns);
  });
}

void gated_norm(const Context& c, const Norm& norm, const FloatRows& x, const FloatRows& gate,
                std::span<const Row> wanted, int heads, const Activations& out) {
  c.worker.for_each(int(wanted.size()), [&](int i) {
    const int index = wanted[std::size_t(i)].index;
    float* to = out.f32.row(i);
    for (int h = 0; h < heads; ++h) {
      const std::ptrdiff_t head = std::ptrdiff_t(h) * norm.dim;
      apply(c.kernels, norm, x.row(index) + head, to + head);
    }
    c.kernels.gated(gate.row(index), to, Activation::kSilu, heads * norm.dim, to);
    round_row(c, out, i, heads * norm.dim);
  });
}

}  // namespace metal_prefill::cpu
