#include "kv_pages.h"

#include <algorithm>

namespace metal_prefill::metal {

std::vector<Device::Piece> KvPages::pieces(std::span<const PageId> pages, int layer, bool values,
                                           int positions) const {
  const std::size_t start = values ? layout_.values(layer) : layout_.keys(layer);
  const std::size_t row = values ? layout_.value_row : layout_.key_row;
  std::vector<Device::Piece> pieces;
  for (int position = 0; position < positions; position += kPagePositions) {
    const std::size_t page = pages[std::size_t(position / kPagePositions)];
    pieces.push_back(
        {view_of(buffer_, values ? BufferName::kValues : BufferName::kKeys, page * layout_.bytes + start),
         std::size_t(std::min(kPagePositions, positions - position)) * row});
  }
  return pieces;
}

void KvPages::read(std::span<const PageId> pages, int layer, bool values, int positions, std::byte* out) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  device_.download(pieces(pages, layer, values, positions), out);
}

void KvPages::write(std::span<const PageId> pages, int layer, bool values, int positions,
                    const std::byte* in) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  device_.upload(pieces(pages, layer, values, positions), in);
}

}  // namespace metal_prefill::metal
