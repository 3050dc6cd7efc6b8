// Causal convolution over the last tokens of a sequence, channel by channel: the result is w[0] * u of the
// oldest token + ... + w[taps - 1] * u of the token itself. The terms are added in this order in any pass.
// The state before a token is u of the taps - 1 tokens before it.
//
// With gates, a row of the input is [b | c | x], u is b * x, and the result is multiplied by c. Without them
// a row is u; the result gets a bias, if there is one, and the activation SiLU.
#include <algorithm>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

// Channels whose sums stay in the L1 cache.
constexpr int kChannels = 256;

// Returns u of channels [first, first + n), `back` tokens before a row, from the pass or from the state.
// Products, and zeros before the first token, are written to `made`.
const float* input_of(const ConvStep& step, const Row& row, int back, int first, int n, float* made) {
  if (back <= row.in_chunk) {
    const float* u = step.in.row(row.index - back) + first;
    if (!step.gated) return u;
    const float* x = u + 2 * step.channels;
    for (int d = 0; d < n; ++d) made[d] = u[d] * x[d];
    return made;
  }
  if (row.state) {
    // The last row of the state is that of the token before the chunk.
    const int at = step.taps - 1 - (back - row.in_chunk);
    return row.state + step.first + std::ptrdiff_t(at) * step.channels + first;
  }
  std::fill_n(made, n, 0.0f);
  return made;
}

}  // namespace

void convolve(const Context& c, const ConvStep& step, const Row& row, float* out) {
  float made[kChannels];
  for (int first = 0; first < step.channels; first += kChannels) {
    const int n = std::min(kChannels, step.channels - first);
    float sum[kChannels] = {};
    for (int tap = 0; tap < step.taps; ++tap) {
      const float* u = input_of(step, row, step.taps - 1 - tap, first, n, made);
      const float* w = step.filter + std::ptrdiff_t(tap) * step.channels + first;
      for (int d = 0; d < n; ++d) sum[d] += w[d] * u[d];
    }
    if (step.gated) {
      const float* gate = step.in.row(row.index) + step.channels + first;
      for (int d = 0; d < n; ++d) out[first + d] = gate[d] * sum[d];
      continue;
    }
    if (step.bias)
      for (int d = 0; d < n; ++d) sum[d] += step.bias[first + d];
    c.kernels.activate(sum, 0, Activation::kSilu, 1, n, out + first, 0);
  }
}

void store_conv_state(const ConvStep& step, const Row& row) {
  if (!row.next) return;
  const int kept = step.taps - 1;
  for (int i = 0; i < kept; ++i) {
    float* out = row.next + step.first + std::ptrdiff_t(i) * step.channels;
    const float* u = input_of(step, row, kept - 1 - i, 0, step.channels, out);
    if (u != out) std::copy_n(u, step.channels, out);
  }
}

void causal_conv(const Context& c, const ConvStep& step, std::span<const Row> all,
                 std::span<const Row> wanted, const Activations& out) {
  const int n_wanted = int(wanted.size());
  c.worker.for_each(n_wanted + int(all.size()), [&](int i) {
    if (i >= n_wanted) return store_conv_state(step, all[std::size_t(i - n_wanted)]);
    convolve(c, step, wanted[std::size_t(i)], out.f32.row(i));
    round_row(c, out, i, step.channels);
  });
}

}  // namespace metal_prefill::cpu
