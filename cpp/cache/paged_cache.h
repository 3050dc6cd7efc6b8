// The cache of a session whose engine keeps K and V in pages. Engines add the layout of pages and states.
#pragma once

#include <optional>
#include <utility>

#include "cache.h"
#include "cache_memory.h"
#include "pages.h"

namespace metal_prefill {

class PagedCache : public Cache {
 public:
  explicit PagedCache(CacheMemory& memory) : table_(memory.pages()) {
    if (StatePool* states = memory.states()) states_.emplace(*states);
  }

  void reserve(int kept, int end, CallCounters&) override { table_.reserve(kept, end); }
  void truncate(int positions) override { table_.truncate(positions); }
  void share(const Cache& from, int positions) override {
    table_.share(static_cast<const PagedCache&>(from).table_, positions);
  }
  std::span<const PageId> pages() const override { return table_.pages(); }
  void adopt(std::vector<PageId> pages) override { table_.adopt(std::move(pages)); }
  SequenceStates* states() override { return states_ ? &*states_ : nullptr; }
  std::size_t bytes() const override { return table_.bytes() + (states_ ? states_->bytes() : 0); }

 private:
  BlockTable table_;
  std::optional<SequenceStates> states_;
};

}  // namespace metal_prefill
