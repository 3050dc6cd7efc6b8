// Gated short convolution over the last tokens of a sequence.
//
// A row of the input projection is [b | c | x]. With u = b * x of each token, the result is
// c * (w[0] * u of the oldest token + ... + w[taps - 1] * u of the token itself), channel by channel. The
// terms are added in this order whatever pass a token is in. The state before a token is u of the taps - 1
// tokens before it.
#include <algorithm>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

// Channels whose sums stay in the L1 cache.
constexpr int kChannels = 256;

// u of the token `back` tokens before a row, from channel `first` on: a product of the pass, or in the state.
struct Input {
  const float* b;
  const float* x;
  const float* state;

  Input(const ShortConvStep& step, const Row& row, int back, int first)
      : b(nullptr), x(nullptr), state(nullptr) {
    const int channels = step.config.dim;
    if (back <= row.in_chunk) {
      b = step.gated.row(row.index - back) + first;
      x = b + 2 * channels;
    } else if (row.state) {
      // The state has that of the token before the chunk last.
      const int at = step.config.conv_taps - 1 - (back - row.in_chunk);
      state = row.state + step.first + std::ptrdiff_t(at) * channels + first;
    }
  }

  void store(int n, float* out) const {
    if (b)
      for (int d = 0; d < n; ++d) out[d] = b[d] * x[d];
    else if (state)
      std::copy_n(state, n, out);
    else
      std::fill_n(out, n, 0.0f);
  }
};

void convolve(const ShortConvStep& step, const Row& row, float* out) {
  const int channels = step.config.dim, taps = step.config.conv_taps;
  const float* c = step.gated.row(row.index) + channels;
  for (int first = 0; first < channels; first += kChannels) {
    const int n = std::min(kChannels, channels - first);
    float sum[kChannels] = {}, u[kChannels];
    for (int tap = 0; tap < taps; ++tap) {
      Input(step, row, taps - 1 - tap, first).store(n, u);
      const float* w = step.filter + std::ptrdiff_t(tap) * channels + first;
      for (int d = 0; d < n; ++d) sum[d] += w[d] * u[d];
    }
    for (int d = 0; d < n; ++d) out[first + d] = c[first + d] * sum[d];
  }
}

// The state after a row.
void store_state(const ShortConvStep& step, const Row& row) {
  const int channels = step.config.dim, kept = step.config.conv_taps - 1;
  for (int i = 0; i < kept; ++i)
    Input(step, row, kept - 1 - i, 0).store(channels, row.next + step.first + std::ptrdiff_t(i) * channels);
}

}  // namespace

void short_conv(const Context& c, const ShortConvStep& step, std::span<const Row> all,
                std::span<const Row> wanted, const Activations& out) {
  const int n_wanted = int(wanted.size());
  c.worker.for_each(n_wanted + int(all.size()), [&](int i) {
    if (i >= n_wanted) {
      const Row& row = all[std::size_t(i - n_wanted)];
      if (row.next) store_state(step, row);
      return;
    }
    convolve(step, wanted[std::size_t(i)], out.f32.row(i));
    round_row(c, out, i, 0, step.config.dim);
  });
}

}  // namespace metal_prefill::cpu
