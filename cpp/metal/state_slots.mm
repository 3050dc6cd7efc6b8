#include "state_slots.h"

namespace metal_prefill::metal {

Device::Piece StateSlots::piece(PageId slot, int layer, std::size_t count) const {
  const std::size_t first = layout_.first[std::size_t(layer)] * sizeof(float);
  return {view_of(buffer_, BufferName::kStates, slot * page_bytes() + first), count * sizeof(float)};
}

void StateSlots::read(PageId slot, int layer, std::size_t count, float* out) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  const Device::Piece from = piece(slot, layer, count);
  device_.download({&from, 1}, out);
}

void StateSlots::write(PageId slot, int layer, std::size_t count, const float* in) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  const Device::Piece to = piece(slot, layer, count);
  device_.upload({&to, 1}, in);
}

}  // namespace metal_prefill::metal
