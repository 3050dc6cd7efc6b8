// Pages of K and V on the GPU.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../plan/page_layout.h"
#include "slots.h"

namespace metal_prefill::metal {

class KvPages final : public Slots {
 public:
  KvPages(const Device& device, Residency& residency, const PageLayout& layout, bool poison)
      : Slots(device, residency, "kv_pages", "the KV cache", layout.bytes, poison), layout_(layout) {}

  const PageLayout& layout() const { return layout_; }

  // Rows of K or V of a layer, [position][kv_head][head_dim] as in the pages, of the first `positions` of a
  // block table.
  void read(std::span<const PageId> pages, int layer, bool values, int positions, std::byte* out);
  void write(std::span<const PageId> pages, int layer, bool values, int positions, const std::byte* in);

 private:
  // Places of the rows, page by page.
  std::vector<Device::Piece> pieces(std::span<const PageId> pages, int layer, bool values,
                                    int positions) const;

  const PageLayout layout_;
};

}  // namespace metal_prefill::metal
