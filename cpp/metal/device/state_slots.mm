#include "state_slots.h"

namespace metal_prefill::metal {

std::array<Device::Piece, 1> StateSlots::piece(PageId slot, int layer, std::size_t count) const {
  const std::size_t first = layout_.first[std::size_t(layer)] * sizeof(float);
  return {{{view_in(slot, BufferName::kStates, first), count * sizeof(float)}}};
}

void StateSlots::read(PageId slot, int layer, std::size_t count, void* out) {
  Slots::read([&] { return piece(slot, layer, count); }, out);
}

void StateSlots::write(PageId slot, int layer, std::size_t count, const void* in) {
  Slots::write([&] { return piece(slot, layer, count); }, in);
}

}  // namespace metal_prefill::metal
