// Ownership of the pages of K and V. The engine defines the layout of a page.
//
// A page holds K and V of every layer for kPagePositions positions. A session is a block table: the pages of
// its positions in order. Sessions with a common prefix share pages. A session copies a shared page before it
// writes to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "../base/fork_handler.h"

namespace metal_prefill {

using PageId = std::uint32_t;

// A multiple of the tiles of both engines' attention kernels, so that no tile straddles two pages.
inline constexpr int kPagePositions = 64;

inline std::size_t pages_of(int positions) {
  return (std::size_t(positions) + kPagePositions - 1) / kPagePositions;
}

// The memory of an engine's pages.
class PageStore {
 public:
  // Bytes of a page if no layer has attention. Such a page has no K and V and only counts positions.
  static constexpr std::size_t kLeastPage = 64;
  virtual ~PageStore() = default;
  virtual std::size_t page_bytes() const = 0;
  // Maximum bytes of all pages together.
  virtual std::size_t most_bytes() const { return std::numeric_limits<std::size_t>::max(); }
  // Makes room for `pages` in total and keeps existing ones. Throws DeviceError without a change.
  virtual void grow(std::size_t pages) = 0;
  // Copies the first `positions` of a page in every layer.
  virtual void copy(PageId from, PageId to, int positions) = 0;
  // Called before a page is written to.
  virtual void taken(PageId) {}
  // Called when a page has no holder: its memory may be returned to the system until the page is taken again.
  virtual void idle(PageId) {}
};

// Half of the machine's memory in bytes, the default limit. Weights and other programs use the rest.
std::size_t half_of_the_memory();

// Bytes that several pools may hold together. Safe to call from several threads.
class MemoryBudget {
 public:
  explicit MemoryBudget(std::size_t limit) : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Returns false, without a change, if the limit would be exceeded.
  bool take(std::size_t bytes);
  void give_back(std::size_t bytes) { used_ -= bytes; }
  std::size_t limit() const { return limit_; }
  std::size_t used() const { return used_; }

 private:
  const std::size_t limit_;
  std::atomic<std::size_t> used_{0};
};

// Allocates pages and counts the block tables that hold each. Safe to call from several threads.
class PagePool {
 public:
  // Limits pages to `limit` bytes, but to at least one page; 0 selects half of the machine's memory. Pages in
  // use also count against `budget`, if it is not null.
  PagePool(PageStore& store, std::size_t limit, MemoryBudget* budget = nullptr);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Takes free pages. Throws KvMemoryError naming the limit, or DeviceError, without a change.
  std::vector<PageId> take(std::size_t n);
  // Throws KvMemoryError if this many positions of one session would not fit even if all pages were free.
  void check_fits(int positions) const;
  // Called to free unneeded pages when there is no room; returns false if there are none. Set before the
  // first take.
  std::function<bool()> reclaim;
  // Called to release a page kept for later prompts, so that its only user need not copy it; returns false if
  // it is not kept, or has successors. Set before the first take.
  std::function<bool(PageId)> forget;
  void retain(std::span<const PageId> pages);
  void release(std::span<const PageId> pages);
  bool is_shared(PageId page) const;
  void copy(PageId from, PageId to, int positions);

  std::size_t page_bytes() const { return page_bytes_; }
  std::size_t pages_in_use() const;
  std::size_t limit_bytes() const { return max_pages_ * page_bytes_; }

 private:
  std::string beyond_limit(std::size_t bytes) const;  // start of an error message
  std::vector<PageId> take_reserved(std::size_t n);

  PageStore& store_;
  const std::size_t page_bytes_, max_pages_;
  MemoryBudget* const budget_;
  mutable std::mutex mutex_;
  std::vector<std::uint32_t> holders_;  // of each page
  std::vector<PageId> free_;            // a stack: the last page is taken first, as its memory is resident
  std::size_t n_idle_ = 0;              // number of pages at the start of free_ whose memory was returned
  const ForkHandler fork_handler_{[this] { mutex_.lock(); }, [this](bool) { mutex_.unlock(); }};
};

// The pages of one session, in the order of its positions.
class BlockTable {
 public:
  explicit BlockTable(PagePool& pool) : pool_(pool) {}
  ~BlockTable() { truncate(0); }
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // Makes positions [kept, end) writable and keeps earlier ones. Throws as PagePool::take, without a change.
  void reserve(int kept, int end);
  // Releases the pages that hold none of the first `positions`.
  void truncate(int positions);
  // Replaces the pages by those of another table's first `positions`; both tables then hold them.
  void share(const BlockTable& from, int positions);
  // Replaces the pages by these, and takes over the caller's reference to each.
  void adopt(std::vector<PageId> pages);

  std::span<const PageId> pages() const { return pages_; }
  std::size_t bytes() const { return pages_.size() * pool_.page_bytes(); }

 private:
  PagePool& pool_;
  std::vector<PageId> pages_;
};

}  // namespace metal_prefill
