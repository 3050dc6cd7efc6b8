#include "ops.h"

#include <algorithm>
#include <cmath>

namespace metal_prefill::cpu {

namespace {

const float* floats(const Tensor& tensor) {
  return reinterpret_cast<const float*>(tensor.data);
}

void quantize_row(const Context& c, const Activations& a, int token) {
  c.kernels.quantize(a.f32.row(token), 0, token % kTileTokens, 1, a.int8.blocks, a.int8.tile(token));
}

}  // namespace

void normalize(const Context& c, const FloatRows& x, const Tensor& weight, float eps, int first, int tokens,
               const Activations& out, int shift) {
  c.worker.for_each(tokens - first, [&](int i) {
    const int token = first + i;
    c.kernels.rms_norm(x.row(token), floats(weight), eps, weight.cols, out.f32.row(token - shift));
    if (out.forms.int8) quantize_row(c, out, token - shift);
  });
}

void add_normalized(const Context& c, const FloatRows& y, const Tensor& weight, float eps, int first,
                    int tokens, const FloatRows& x) {
  c.worker.for_each(tokens - first, [&](int i) {
    float* from = y.row(first + i);
    float* to = x.row(first + i);
    c.kernels.rms_norm(from, floats(weight), eps, weight.cols, from);
    for (int d = 0; d < weight.cols; ++d) to[d] += from[d];
  });
}

void quantize(const Context& c, const Activations& a, int first, int tokens) {
  if (!a.forms.int8) return;
  c.worker.for_each(tokens - first, [&](int i) { quantize_row(c, a, first + i); });
}

void rope_table(const Context& c, std::span<const float> frequencies, float magnitude, int position,
                int tokens, float* table) {
  const std::size_t pairs = frequencies.size();
  c.worker.for_each(tokens, [&](int t) {
    float* row = table + std::size_t(t) * 2 * pairs;
    for (std::size_t i = 0; i < pairs; ++i) {
      const double angle = double(position + t) * double(frequencies[i]);
      row[i] = float(std::cos(angle)) * magnitude;
      row[pairs + i] = float(std::sin(angle)) * magnitude;
    }
  });
}

void append_to_cache(const Context& c, const AttentionInput& in, const KvCache& cache) {
  const Config& config = in.config;
  const int pairs = config.rope_dim / 2;
  const auto prepare = [&](float* head, const Tensor& norm, int token) {
    if (norm) c.kernels.rms_norm(head, floats(norm), config.norm_eps, config.key_dim, head);
    if (in.rotation)
      c.kernels.rope(head, in.rotation + std::size_t(token) * 2 * std::size_t(pairs), pairs,
                     config.rope_style);
  };
  c.worker.for_each(in.tokens, [&](int t) {
    const int position = in.position + t;
    if (t >= in.first) {
      for (int h = 0; h < config.n_heads; ++h)
        prepare(in.q.row(t) + std::size_t(h) * std::size_t(config.key_dim), in.weights.q_norm, t);
    }
    for (int h = 0; h < config.n_kv_heads; ++h) {
      float* key = in.k.row(t) + std::size_t(h) * std::size_t(config.key_dim);
      prepare(key, in.weights.k_norm, t);
      c.kernels.store_key(key, config.key_dim, cache.half(), cache.key_block(in.layer, h, position),
                          position % kKeyBlock);
      c.kernels.store_value(in.v.row(t) + std::size_t(h) * std::size_t(config.value_dim), config.value_dim,
                            cache.half(), cache.value_row(in.layer, h, position));
    }
  });
}

void attend(const Context& c, const AttentionInput& in, const KvCache& cache, const FloatRows& out) {
  const Config& config = in.config;
  const int group = config.n_heads / config.n_kv_heads;
  const int tokens = in.tokens - in.first;
  // A short prompt is cut finer, so that all threads have a part.
  const int tile_tokens = tokens >= 4 * kQueryTile ? kQueryTile : kQueryTile / 2;
  const int tiles = (tokens + tile_tokens - 1) / tile_tokens;
  const auto heads_at = [&](int first_head, int n_heads) {
    const int kv_head = first_head / group;
    return AttentionHead{
        .q = in.q.data + std::size_t(first_head) * std::size_t(config.key_dim),
        .q_stride = in.q.stride,
        .out = out.data + std::size_t(first_head) * std::size_t(config.value_dim),
        .out_stride = out.stride,
        .keys = cache.keys(in.layer, kv_head),
        .values = cache.values(in.layer, kv_head),
        .half = cache.half(),
        .key_dim = config.key_dim,
        .value_dim = config.value_dim,
        .value_stride = cache.value_stride(),
        .heads = n_heads,
        .position = in.position,
        .window = config.window(in.layer),
        .scale =
            config.attention_scale != 0 ? config.attention_scale : 1.0f / std::sqrt(float(config.key_dim)),
        .exact = in.exact,
    };
  };
  // Where a single token has too few groups to share among threads, its heads go one by one.
  const int heads = tokens == 1 && config.n_kv_heads < c.worker.count() ? 1 : group;
  const int n_groups = config.n_heads / heads;
  // The last tokens see the most: they go first, so that what is left at the end is short.
  c.worker.for_each(tiles * n_groups, [&](int item) {
    const int tile = tiles - 1 - item / n_groups;
    const int first = in.first + tile * tile_tokens;
    c.kernels.attention(heads_at(item % n_groups * heads, heads), first,
                        std::min(tile_tokens, in.tokens - first));
  });
}

}  // namespace metal_prefill::cpu
