#include "kv_pages.h"

#include <algorithm>

namespace metal_prefill::metal {

KvPages::KvPages(const Device& device, Residency& residency, const PageLayout& layout, bool poison)
    : device_(device), residency_(residency), layout_(layout), poison_(poison) {}

void KvPages::settle() {
  [left_ waitUntilCompleted];  // whether it failed is said by the pass whose it is
  left_ = nil;
}

void KvPages::grow(std::size_t pages) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  id<MTLBuffer> grown = device_.allocate("kv_pages", pages * layout_.bytes, Access::kGpu);
  if (buffer_) {
    id<MTLCommandBuffer> commands =
        device_.command_buffer("the growth of the KV cache", References::kRetained);
    id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
    [blit copyFromBuffer:buffer_ sourceOffset:0 toBuffer:grown destinationOffset:0 size:buffer_.length];
    [blit endEncoding];
    device_.run(commands);
  }
  residency_.remove(buffer_);
  residency_.add(grown);
  buffer_ = grown;
}

void KvPages::copy(PageId from, PageId to, int) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  // The whole page: what the rows after the kept ones hold is meaningless in either page.
  id<MTLCommandBuffer> commands =
      device_.command_buffer("a copy of a page of the KV cache", References::kRetained);
  id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
  [blit copyFromBuffer:buffer_
           sourceOffset:from * layout_.bytes
               toBuffer:buffer_
      destinationOffset:to * layout_.bytes
                   size:layout_.bytes];
  [blit endEncoding];
  device_.run(commands);
}

void KvPages::taken(PageId page) {
  if (!poison_) return;
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  id<MTLCommandBuffer> commands =
      device_.command_buffer("the poison of a page of the KV cache", References::kRetained);
  id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
  [blit fillBuffer:buffer_ range:NSMakeRange(page * layout_.bytes, layout_.bytes) value:0xff];
  [blit endEncoding];
  device_.run(commands);
}

KvPages::Hold::Hold(KvPages& pages) : pages_(pages), lock_(pages.mutex_) {}

LayerCache KvPages::Hold::layer(int layer) const {
  return {view_of(pages_.buffer_, BufferName::kKeys, pages_.layout_.keys(layer)),
          view_of(pages_.buffer_, BufferName::kValues, pages_.layout_.values(layer))};
}

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
