// Memory that the sequences of an engine share: pages of K and V, states of recurrent layers, and prefixes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

#include "pages.h"
#include "prefix_tree.h"
#include "states.h"

namespace metal_prefill {

class CacheMemory {
 public:
  // Pages and states take at most `limit` bytes together, and those kept for later sessions at most
  // `prefixes` bytes. `states` is null for a model without recurrent layers.
  CacheMemory(PageStore& pages, PageStore* states, std::size_t limit, std::size_t prefixes)
      : budget_(std::max(limit, pages.page_bytes() + least_states(states))),
        pages_(pages, budget_.limit() - least_states(states), states ? &budget_ : nullptr),
        prefixes_(
            pages_, std::min(prefixes, pages_.limit_bytes()) / pages_.page_bytes(),
            states ? &states_.emplace(*states, budget_.limit(), pages.page_bytes(), &budget_) : nullptr) {
    const auto reclaim = [this] { return prefixes_.evict() || (states_ && states_->drop_snapshot()); };
    pages_.reclaim = reclaim;
    pages_.forget = [this](PageId page) { return prefixes_.forget(page); };
    if (states_) states_->set_reclaim(reclaim);
  }

  PagePool& pages() { return pages_; }
  StatePool* states() { return states_ ? &*states_ : nullptr; }
  PrefixTree& prefixes() { return prefixes_; }
  const PagePool& pages() const { return pages_; }
  const PrefixTree& prefixes() const { return prefixes_; }
  std::size_t bytes_in_use() const {
    return pages_.pages_in_use() * pages_.page_bytes() + (states_ ? states_->bytes_in_use() : 0);
  }

 private:
  // Bytes of the three states of a sequence that runs ahead: before a pass, after it, and after the next one.
  static std::size_t least_states(const PageStore* states) { return states ? 3 * states->page_bytes() : 0; }

  MemoryBudget budget_;
  PagePool pages_;
  std::optional<StatePool> states_;  // empty if no layer has a state
  PrefixTree prefixes_;
};

}  // namespace metal_prefill
