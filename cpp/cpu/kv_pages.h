// Pages of K and V in the layouts that the attention kernels read.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "../base/fork_handler.h"
#include "../cache/pages.h"
#include "../engine/engine.h"
#include "buffer.h"
#include "kernels/kernels.h"

namespace metal_prefill::cpu {

// A page holds, for each layer and key-value head, its keys, then its values. Pages are allocated in slabs,
// which can be huge pages of the system, and in groups: the parts of a head in the pages of a group are
// contiguous. A token reads head by head, and the processor prefetches contiguous memory only:
//
//   group  | layer 0, head 0: page 0, page 1, ... | layer 0, head 1: page 0, page 1, ... | ...
//
// If heads differ between layers, groups have one page.
class KvPages final : public PageStore {
 public:
  // With `poison`, pages are filled with NaN whenever they are taken, which reveals reads of unwritten rows.
  KvPages(const Config& config, KvLayout layout, int key_multiple, int max_context, bool poison);

  std::size_t page_bytes() const override { return page_bytes_; }
  void grow(std::size_t pages) override;
  void copy(PageId from, PageId to, int positions) override;
  void taken(PageId page) override;
  void idle(PageId page) override;

  KvLayout layout() const { return layout_; }
  int key_stride(int layer) const { return of(layer).key_stride; }
  int value_stride(int layer) const { return of(layer).value_stride; }
  // Byte offsets of a head's keys and values in a page.
  std::size_t keys(int layer, int head) const { return head_at(of(layer), head); }
  std::size_t values(int layer, int head) const { return keys(layer, head) + of(layer).key_bytes; }

  // Prefetches the keys and values of the first positions of a page.
  void fetch(const std::byte* page, int layer, int head, int positions) const;

  // Writes the address of each page; valid as long as the page exists.
  void addresses(std::span<const PageId> pages, std::byte** out) const;

  struct Matrix;
  enum class Direction { kRead, kWrite };  // of the pages

  // Copies the first `positions` of a block table from or to canonical layout [position][head][dim] of f16,
  // float32 or blocks of Q8_0.
  void read(std::span<const PageId> pages, int layer, bool values, int positions, std::byte* out) const;
  void write(std::span<const PageId> pages, int layer, bool values, int positions, const std::byte* in);

 private:
  // On Zen 4, a token reads at 0.56 of the speed of plain reading with contiguous stretches of 16 KB, 0.8
  // with 64 KB, 0.9 with 128 KB and 0.93 with 256 KB. Longer ones would leave more of a group unused.
  static constexpr std::size_t kStretchBytes = 128 << 10, kMostGrouped = 8;
  // Positions of a session per page of a group: short sessions gain nothing, and would hold idle memory.
  static constexpr std::size_t kPositionsOfGrouped = 8 * kPagePositions;
  struct Page {
    std::byte* data;  // of layer 0 and head 0
    std::size_t group;
    bool taken;
  };
  struct Group {
    std::byte* data;
    std::size_t taken;  // pages whose memory may be in use
  };
  // The heads of a layer.
  struct Heads {
    int count, key_dim, value_dim, key_stride, value_stride;
    std::size_t key_bytes, head_bytes;  // of one head's keys, and of keys and values
    std::size_t first = 0;              // byte offset of the first head in a page
  };

  const Heads& of(int layer) const { return heads_[std::size_t(place_[std::size_t(layer)])]; }
  // Byte offset of a head in a page.
  std::size_t head_at(const Heads& heads, int head) const {
    return heads.first + std::size_t(head) * group_ * heads.head_bytes;
  }
  std::size_t element() const { return element_bytes(layout_); }  // not in kQ8
  // In the other layouts, byte offsets from there to the block with a position's key (in lane position % 16),
  // and to its first value.
  std::size_t key_block(const Heads& heads, int position) const;
  std::size_t value_row(const Heads& heads, int position) const;
  // Bytes of the keys, and of the values, of a head in the first positions of a page.
  std::pair<std::size_t, std::size_t> bytes_of_first(const Heads& heads, int positions) const;
  Matrix matrix(const Heads& heads, std::byte* own, bool values) const;
  template <Direction kDirection>
  void move(std::span<const PageId> pages, int layer, bool values, int positions, std::byte* canonical) const;
  // Copies at most a block of positions, from `first` of a page on, of the head at `head` in the page. Rows
  // of `canonical` are `row_bytes` apart.
  template <Direction kDirection>
  void move_rows(const Heads& heads, int first, int rows, bool values, std::byte* canonical,
                 std::size_t row_bytes, std::byte* head) const;

  const KvLayout layout_;
  const bool poison_;
  const std::vector<int> place_;  // of each layer: see attention_places
  std::vector<Heads> heads_;      // by place
  std::size_t head_bytes_;        // distance between the pages of a group
  std::size_t group_ = 1;         // pages in a group
  std::size_t page_bytes_;
  mutable std::mutex mutex_;
  std::vector<Buffer> slabs_;
  std::vector<Group> groups_;
  std::vector<Page> pages_;
  const ForkHandler fork_handler_{[this] { mutex_.lock(); }, [this](bool) { mutex_.unlock(); }};
};

}  // namespace metal_prefill::cpu
