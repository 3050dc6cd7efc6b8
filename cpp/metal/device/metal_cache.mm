#include "metal_cache.h"

#include <algorithm>
#include <cstring>

namespace metal_prefill::metal {

namespace {

// Calls read(to) for rows with padding, and copies them to `out` without it.
template <typename Rows, typename Read>
void without_padding(const Rows& rows, std::byte* out, const Read& read) {
  if (rows.bytes == rows.padded_bytes) return read(out);
  std::vector<std::byte> padded(rows.count * rows.padded_bytes);
  read(padded.data());
  for (std::size_t i = 0; i < rows.count; ++i)
    std::memcpy(out + i * rows.bytes, padded.data() + i * rows.padded_bytes, rows.bytes);
}

// Calls write(from) for the rows of `in` with padding of zeros.
template <typename Rows, typename Write>
void with_padding(const Rows& rows, const std::byte* in, const Write& write) {
  if (rows.bytes == rows.padded_bytes) return write(in);
  std::vector<std::byte> padded(rows.count * rows.padded_bytes);
  for (std::size_t i = 0; i < rows.count; ++i)
    std::memcpy(padded.data() + i * rows.padded_bytes, in + i * rows.bytes, rows.bytes);
  write(padded.data());
}

}  // namespace

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
  // Rows from `kept` on are overwritten: a pass sent ahead remains valid if it starts there or later.
  if (ahead_ && kept < ahead_->position) drop_ahead();
  const AutoreleasePool pool;
  metal_.rope_tables_.reserve(metal_.device_.counting(counters), end);
  Cache::reserve(kept, end, counters);
}

// Exported and imported rows do not have the dimensions that padding added.
void MetalEngine::MetalCache::read(int layer, bool values, int positions, std::byte* out) const {
  metal_.require_unforked();
  without_padding(heads_of(layer, values, positions), out,
                  [&](std::byte* to) { metal_.pages_.read(ranges_of(layer, values, positions), to); });
}

void MetalEngine::MetalCache::write(int layer, bool values, int positions, const std::byte* in) {
  metal_.require_unforked();
  drop_ahead();
  with_padding(heads_of(layer, values, positions), in, [&](const std::byte* from) {
    metal_.pages_.write(ranges_of(layer, values, positions), from);
  });
}

void MetalEngine::MetalCache::read_state(const StateRef& state, int layer, float* out) const {
  metal_.require_unforked();
  const PaddedRows rows = rows_of_state(layer);
  const Slots::Range range = range_of(state, layer, rows);
  without_padding(rows, reinterpret_cast<std::byte*>(out),
                  [&](std::byte* to) { metal_.states_.read({&range, 1}, to); });
}

void MetalEngine::MetalCache::write_state(const StateRef& state, int layer, const float* in) {
  metal_.require_unforked();
  const PaddedRows rows = rows_of_state(layer);
  const Slots::Range range = range_of(state, layer, rows);
  with_padding(rows, reinterpret_cast<const std::byte*>(in),
               [&](const std::byte* from) { metal_.states_.write({&range, 1}, from); });
}

std::vector<Slots::Range> MetalEngine::MetalCache::ranges_of(int layer, bool values, int positions) const {
  const PageLayout::Place& place = metal_.forward_.page_layout()[layer];
  const std::size_t start = values ? place.values : place.keys;
  const std::size_t row = values ? place.value_row : place.key_row;
  std::vector<Slots::Range> ranges;
  for (int position = 0; position < positions; position += kPagePositions)
    ranges.push_back({pages()[std::size_t(position / kPagePositions)], start,
                      std::size_t(std::min(kPagePositions, positions - position)) * row});
  return ranges;
}

Slots::Range MetalEngine::MetalCache::range_of(const StateRef& state, int layer,
                                               const PaddedRows& rows) const {
  const std::size_t first = metal_.forward_.state_layout().first[std::size_t(layer)];
  return {state.slot(), first * sizeof(float), rows.count * rows.padded_bytes};
}

// Rows that are heads of K or V.
MetalEngine::MetalCache::PaddedRows MetalEngine::MetalCache::heads_of(int layer, bool values,
                                                                      int positions) const {
  const Config own = metal_.config().of_layer(layer), padded = metal_.padded_.config.of_layer(layer);
  const std::size_t element = metal_.forward_.page_layout().element;
  return {std::size_t(positions) * std::size_t(own.n_kv_heads),
          std::size_t(values ? own.value_dim : own.key_dim) * element,
          std::size_t(values ? padded.value_dim : padded.key_dim) * element};
}

// The state of a short convolution has a row for each token; padding changes no other state.
MetalEngine::MetalCache::PaddedRows MetalEngine::MetalCache::rows_of_state(int layer) const {
  const Config& own = metal_.config();
  const Config& padded = metal_.padded_.config;
  const LayerKind kind = own.kind(layer);
  const std::size_t count = kind == LayerKind::kShortConv ? std::size_t(own.conv_taps - 1) : 1;
  return {count, own.state_values(layer) / count * sizeof(float),
          padded.state_values(layer) / count * sizeof(float)};
}

}  // namespace metal_prefill::metal
