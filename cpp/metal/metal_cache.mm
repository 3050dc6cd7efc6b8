#include "metal_cache.h"

#include <algorithm>
#include <cstring>

namespace metal_prefill::metal {

std::unique_ptr<MetalEngine::Ahead> MetalEngine::MetalCache::take_ahead(Chunk& chunk) {
  if (!ahead_) return nullptr;
  const std::span<const PageId> held = pages();
  const bool same_pages = held.size() >= ahead_->pages.size() &&
                          std::equal(ahead_->pages.begin(), ahead_->pages.end(), held.begin());
  const bool is_it = chunk.tokens.size() == 1 && chunk.tokens[0] == ahead_->token &&
                     chunk.position == ahead_->position &&
                     std::holds_alternative<GreedyOutput>(chunk.output) && rows_of(chunk.output) == 1 &&
                     same_pages && chunk.states.before == ahead_->states.before &&
                     chunk.states.writes.size() == ahead_->states.writes.size();
  if (!is_it)
    drop_ahead();
  else if (!chunk.states.writes.empty())
    chunk.states.writes[0].state = ahead_->states.writes[0].state;
  return std::move(ahead_);
}

void MetalEngine::MetalCache::reserve(int kept, int end, CallCounters& counters) {
  metal_.require_unforked();
  // Rows from `kept` on are overwritten: work sent ahead remains valid if it starts there, or later.
  if (ahead_ && kept < ahead_->position) drop_ahead();
  const AutoreleasePool pool;
  metal_.rope_tables_.reserve(metal_.device_.counting(counters), end);
  PagedCache::reserve(kept, end, counters);
}

// Rows are exported and imported without the dimensions that padding added to the heads.
void MetalEngine::MetalCache::read(int layer, bool values, int positions, std::byte* out) const {
  metal_.require_unforked();
  const Heads heads = heads_of(values);
  if (heads.bytes == heads.padded_bytes) return metal_.store_.read(pages(), layer, values, positions, out);
  const std::size_t n = std::size_t(positions) * heads.count;
  std::vector<std::byte> padded(n * heads.padded_bytes);
  metal_.store_.read(pages(), layer, values, positions, padded.data());
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(out + i * heads.bytes, padded.data() + i * heads.padded_bytes, heads.bytes);
}

void MetalEngine::MetalCache::write(int layer, bool values, int positions, const std::byte* in) {
  metal_.require_unforked();
  drop_ahead();
  const Heads heads = heads_of(values);
  if (heads.bytes == heads.padded_bytes) return metal_.store_.write(pages(), layer, values, positions, in);
  const std::size_t n = std::size_t(positions) * heads.count;
  std::vector<std::byte> padded(n * heads.padded_bytes);
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(padded.data() + i * heads.padded_bytes, in + i * heads.bytes, heads.bytes);
  metal_.store_.write(pages(), layer, values, positions, padded.data());
}

// The values of a short convolution's state are [token][channel].
void MetalEngine::MetalCache::read_state(const StateRef& state, int layer, float* out) const {
  metal_.require_unforked();
  const std::size_t n = metal_.config().state_values(layer),
                    padded_n = metal_.padded_.config.state_values(layer);
  if (n == padded_n) return metal_.states_.read(state.slot(), layer, n, out);
  std::vector<float> padded(padded_n);
  metal_.states_.read(state.slot(), layer, padded_n, padded.data());
  const std::size_t channels = std::size_t(metal_.config().dim),
                    padded_channels = std::size_t(metal_.padded_.config.dim);
  for (std::size_t i = 0; i < n / channels; ++i)
    std::copy_n(padded.data() + i * padded_channels, channels, out + i * channels);
}

void MetalEngine::MetalCache::write_state(const StateRef& state, int layer, const float* in) {
  metal_.require_unforked();
  const std::size_t n = metal_.config().state_values(layer),
                    padded_n = metal_.padded_.config.state_values(layer);
  if (n == padded_n) return metal_.states_.write(state.slot(), layer, n, in);
  std::vector<float> padded(padded_n);
  const std::size_t channels = std::size_t(metal_.config().dim),
                    padded_channels = std::size_t(metal_.padded_.config.dim);
  for (std::size_t i = 0; i < n / channels; ++i)
    std::copy_n(in + i * channels, channels, padded.data() + i * padded_channels);
  metal_.states_.write(state.slot(), layer, padded_n, padded.data());
}

MetalEngine::MetalCache::Heads MetalEngine::MetalCache::heads_of(bool values) const {
  const Config& own = metal_.config();
  const Config& padded = metal_.padded_.config;
  const std::size_t element = metal_.forward_.page_layout().element;
  return {std::size_t(own.n_kv_heads), std::size_t(values ? own.value_dim : own.key_dim) * element,
          std::size_t(values ? padded.value_dim : padded.key_dim) * element};
}

}  // namespace metal_prefill::metal
