#include "state_slots.h"

#include <algorithm>
#include <cstring>

#include "../base/release_pages.h"

namespace metal_prefill::cpu {

// Slots of a system page or more are whole pages, so that an idle slot's memory can be returned.
StateSlots::StateSlots(const Config& config, bool poison)
    : layout_(config),
      slot_bytes_(round_up(std::max(layout_.bytes(), std::size_t(64)),
                           std::size_t(layout_.bytes() < 4096 ? 64 : 4096))),
      poison_(poison) {}

void StateSlots::grow(std::size_t slots) {
  const std::scoped_lock lock(mutex_);
  if (slots <= slots_.size()) return;
  const std::size_t added = slots - slots_.size();
  slots_.reserve(slots);
  slabs_.reserve(slabs_.size() + 1);
  slabs_.emplace_back(added * slot_bytes_, "states of recurrent layers");
  for (std::size_t i = 0; i < added; ++i) slots_.push_back(slabs_.back().data() + i * slot_bytes_);
}

std::byte* StateSlots::data(PageId slot) const {
  const std::scoped_lock lock(mutex_);
  return slots_[slot];
}

void StateSlots::copy(PageId from, PageId to, int) {
  std::memcpy(data(to), data(from), slot_bytes_);
}

void StateSlots::taken(PageId slot) {
  if (poison_) std::memset(data(slot), 0xff, slot_bytes_);
}

void StateSlots::idle(PageId slot) {
  release_pages(data(slot), slot_bytes_);
}

}  // namespace metal_prefill::cpu
