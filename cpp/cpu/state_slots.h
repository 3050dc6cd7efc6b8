// Slots for the states of recurrent layers (../cache/states.h).
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "../base/fork_handler.h"
#include "../cache/states.h"
#include "buffer.h"

namespace metal_prefill::cpu {

class StateSlots final : public PageStore {
 public:
  // With `poison`, slots are filled with NaN whenever they are taken.
  StateSlots(const Config& config, bool poison);

  const StateLayout& layout() const { return layout_; }
  std::size_t page_bytes() const override { return slot_bytes_; }
  void grow(std::size_t slots) override;
  void copy(PageId from, PageId to, int positions) override;
  void taken(PageId slot) override;
  void idle(PageId slot) override;

  // The values of a slot; null for the state before the first token. Stays valid as long as the slot exists.
  float* values(const StateRef& state) const {
    return state ? reinterpret_cast<float*>(data(state.slot())) : nullptr;
  }

 private:
  std::byte* data(PageId slot) const;

  const StateLayout layout_;
  const std::size_t slot_bytes_;
  const bool poison_;
  mutable std::mutex mutex_;
  std::vector<Buffer> slabs_;
  std::vector<std::byte*> slots_;
  const ForkHandler fork_handler_{[this] { mutex_.lock(); }, [this](bool) { mutex_.unlock(); }};
};

}  // namespace metal_prefill::cpu
