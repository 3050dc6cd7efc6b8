// The cache of one session: K and V of its tokens in pages, and the states of recurrent layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cache_memory.h"
#include "pages.h"
#include "states.h"

namespace metal_prefill {

// Counts of one call, for Session::stats().
struct CallCounters {
  std::uint64_t passes = 0;
  double multiply_adds = 0;  // of products and attention, if the engine counts them
  double seconds = 0;        // host time spent in passes
  std::uint64_t dispatches = 0, command_buffers = 0, allocations = 0;
  double gpu_seconds = 0;

  CallCounters& operator+=(const CallCounters& other);
};

// Base class of the engines' caches, which add the layout of pages and states.
class Cache {
 public:
  explicit Cache(CacheMemory& memory) : table_(memory.pages()) {
    if (StatePool* states = memory.states()) states_.emplace(*states);
  }
  virtual ~Cache() = default;

  // Makes positions [kept, end) writable and keeps earlier ones. Changes nothing if it throws.
  virtual void reserve(int kept, int end, CallCounters&) { table_.reserve(kept, end); }
  // Releases the pages that only later positions need.
  virtual void truncate(int positions) { table_.truncate(positions); }
  // Replaces the contents by the first `positions` of another cache of the same engine.
  virtual void share(const Cache& from, int positions) { table_.share(from.table_, positions); }
  std::span<const PageId> pages() const { return table_.pages(); }
  // Replaces the pages by these, and takes over the caller's reference to each.
  virtual void adopt(std::vector<PageId> pages) { table_.adopt(std::move(pages)); }
  // Copies K or V in the canonical layout [position][kv_head][head_dim], as elements or blocks of kv_type.
  virtual void read(int layer, bool values, int positions, std::byte* out) const = 0;
  virtual void write(int layer, bool values, int positions, const std::byte* in) = 0;
  // Null if no layer of the model has a state.
  SequenceStates* states() { return states_ ? &*states_ : nullptr; }
  // Copies a layer's state of Config::state_values() values.
  virtual void read_state(const StateRef& state, int layer, float* out) const = 0;
  virtual void write_state(const StateRef& state, int layer, const float* in) = 0;
  std::size_t bytes() const { return table_.bytes() + (states_ ? states_->bytes() : 0); }

 private:
  BlockTable table_;
  std::optional<SequenceStates> states_;
};

}  // namespace metal_prefill
