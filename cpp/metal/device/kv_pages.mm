#include "kv_pages.h"

#include <algorithm>

namespace metal_prefill::metal {

std::vector<Device::Piece> KvPages::pieces(std::span<const PageId> pages, int layer, bool values,
                                           int positions) const {
  const PageLayout::Place& place = layout_[layer];
  const std::size_t start = values ? place.values : place.keys;
  const std::size_t row = values ? place.value_row : place.key_row;
  std::vector<Device::Piece> pieces;
  for (int position = 0; position < positions; position += kPagePositions) {
    const PageId page = pages[std::size_t(position / kPagePositions)];
    pieces.push_back({view_in(page, values ? BufferName::kValues : BufferName::kKeys, start),
                      std::size_t(std::min(kPagePositions, positions - position)) * row});
  }
  return pieces;
}

void KvPages::read(std::span<const PageId> pages, int layer, bool values, int positions, std::byte* out) {
  Slots::read([&] { return pieces(pages, layer, values, positions); }, out);
}

void KvPages::write(std::span<const PageId> pages, int layer, bool values, int positions,
                    const std::byte* in) {
  Slots::write([&] { return pieces(pages, layer, values, positions); }, in);
}

}  // namespace metal_prefill::metal
