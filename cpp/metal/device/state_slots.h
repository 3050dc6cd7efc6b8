// States of recurrent layers on the GPU (../states.h).
#pragma once

#include <algorithm>
#include <array>

#include "../../cache/states.h"
#include "slots.h"

namespace metal_prefill::metal {

class StateSlots final : public Slots {
 public:
  StateSlots(const Device& device, Residency& residency, const StateLayout& layout, bool poison)
      : Slots(device, residency, "states", "states of recurrent layers",
              std::max(layout.bytes(), std::size_t(16)), poison),
        layout_(layout) {}

  const StateLayout& layout() const { return layout_; }

  // `count` values of a layer's state in a slot.
  void read(PageId slot, int layer, std::size_t count, void* out);
  void write(PageId slot, int layer, std::size_t count, const void* in);

 private:
  std::array<Device::Piece, 1> piece(PageId slot, int layer, std::size_t count) const;

  const StateLayout layout_;
};

}  // namespace metal_prefill::metal
