// The cache of a session whose engine keeps K and V in pages. Engines add what a page looks like inside.
#pragma once

#include <utility>

#include "engine.h"
#include "pages.h"

namespace metal_prefill {

class PagedCache : public Cache {
 public:
  explicit PagedCache(PagePool& pool) : table_(pool) {}

  void reserve(int kept, int end, CallCounters&) override { table_.reserve(kept, end); }
  void truncate(int positions) override { table_.truncate(positions); }
  void share(const Cache& from, int positions) override {
    table_.share(static_cast<const PagedCache&>(from).table_, positions);
  }
  std::span<const PageId> pages() const override { return table_.pages(); }
  void adopt(std::vector<PageId> pages) override { table_.adopt(std::move(pages)); }
  std::size_t bytes() const override { return table_.bytes(); }

 private:
  BlockTable table_;
};

}  // namespace metal_prefill
