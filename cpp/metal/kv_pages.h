// Pages of K and V on the GPU.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "../pages.h"
#include "device.h"
#include "page_layout.h"
#include "residency.h"

namespace metal_prefill::metal {

// All pages are in one buffer, so that a kernel finds a page by its number. When more are needed, a larger
// buffer takes the place of the old one, with its contents.
class KvPages final : public PageStore {
 public:
  // With `poison`, pages are filled with NaN whenever they are taken anew: a kernel that reads a row before
  // it was written shows it. `device` and `residency` must outlive the
  // pages.
  KvPages(const Device& device, Residency& residency, const PageLayout& layout, bool poison);

  std::size_t page_bytes() const override { return layout_.bytes; }
  std::size_t most_bytes() const override { return device_.mtl().maxBufferLength; }
  void grow(std::size_t pages) override;
  void copy(PageId from, PageId to, int positions) override;
  void taken(PageId page) override;

  // The holder owns the buffer: it does not move, and only the holder and command buffers that an earlier
  // holder left on the GPU read or write it. Passes over the pages of one engine thus run one after another.
  class Hold {
   public:
    explicit Hold(KvPages& pages);
    // Whether there are such command buffers. Encoders of passes wait for them by the fence.
    bool is_in_use() const { return pages_.left_; }
    // Waits for them.
    void settle() { pages_.settle(); }
    // `last` was sent to the GPU after all others, and may use the pages after the hold.
    void sent(id<MTLCommandBuffer> last) { pages_.left_ = last; }
    // The GPU has finished it, and with it what was sent before.
    void finished(id<MTLCommandBuffer> sent) {
      if (pages_.left_ == sent) pages_.left_ = nil;
    }
    // From the keys, and from the values, of a layer in the first page on.
    LayerCache layer(int layer) const;

   private:
    KvPages& pages_;
    const std::scoped_lock<std::mutex> lock_;
  };

  // Rows of K or V of a layer, [position][kv_head][head_dim] as in the pages, of the first `positions` of a
  // block table.
  void read(std::span<const PageId> pages, int layer, bool values, int positions, std::byte* out);
  void write(std::span<const PageId> pages, int layer, bool values, int positions, const std::byte* in);

 private:
  // Waits for what was left on the GPU: blits do not wait for the fence.
  void settle();
  // Where the rows are, page by page.
  std::vector<Device::Piece> pieces(std::span<const PageId> pages, int layer, bool values,
                                    int positions) const;

  const Device& device_;
  Residency& residency_;
  const PageLayout layout_;
  const bool poison_;
  std::mutex mutex_;  // guards the buffer and its contents
  id<MTLBuffer> buffer_;
  id<MTLCommandBuffer> left_;  // on the GPU by a holder: the last one; null: none
};

}  // namespace metal_prefill::metal
