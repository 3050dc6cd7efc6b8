#include "pages.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "../base/errors.h"

namespace metal_prefill {

namespace {

// Bytes of free pages that stay in memory, so that new sessions rarely need the system's allocator.
constexpr std::size_t kWarmBytes = std::size_t(16) << 20;

// Minimum bytes of one allocation: several huge pages of the system. Memory that has not been written to
// costs little.
constexpr std::size_t kSlabBytes = std::size_t(8) << 20;

}  // namespace

std::size_t half_of_the_memory() {
  return std::size_t(sysconf(_SC_PHYS_PAGES)) * std::size_t(sysconf(_SC_PAGESIZE)) / 2;
}

bool MemoryBudget::take(std::size_t bytes) {
  std::size_t used = used_;
  do {
    if (bytes > limit_ - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

PagePool::PagePool(PageStore& store, std::size_t limit, MemoryBudget* budget)
    : store_(store),
      page_bytes_(store.page_bytes()),
      max_pages_(
          std::max(std::min(limit > 0 ? limit : half_of_the_memory(), store.most_bytes()) / page_bytes_,
                   std::size_t(1))),
      budget_(budget) {}

std::string PagePool::beyond_limit(std::size_t bytes) const {
  const std::string needs = std::to_string(bytes) + " bytes, which exceeds kv_memory of ";
  if (budget_)
    return "the KV cache and the states of recurrent layers need " + needs +
           std::to_string(budget_->limit()) + " bytes";
  return "the KV cache needs " + needs + std::to_string(limit_bytes()) + " bytes (" +
         std::to_string(max_pages_) + " pages of " + std::to_string(kPagePositions) + " positions)";
}

void PagePool::check_fits(int positions) const {
  if (pages_of(positions) <= max_pages_) return;
  const std::size_t reserved = budget_ ? budget_->limit() - limit_bytes() : 0;  // for memory other than pages
  throw KvMemoryError(std::to_string(positions) +
                      " tokens do not fit: " + beyond_limit(pages_of(positions) * page_bytes_ + reserved) +
                      "; shorten the text or raise the limit");
}

std::vector<PageId> PagePool::take(std::size_t n) {
  std::unique_lock lock(mutex_);
  const auto reserve = [&] {
    return n <= free_.size() + max_pages_ - holders_.size() && (!budget_ || budget_->take(n * page_bytes_));
  };
  bool reserved = reserve();
  while (!reserved && reclaim) {
    lock.unlock();  // reclaimed pages are released
    const bool reclaimed = reclaim();
    lock.lock();
    reserved = reserve();
    if (!reclaimed) break;
  }
  if (!reserved)
    throw KvMemoryError(beyond_limit(budget_ ? budget_->used() + n * page_bytes_
                                             : (holders_.size() + n - free_.size()) * page_bytes_) +
                        "; close sessions, rewind them or raise the limit");
  try {
    return take_reserved(n);
  } catch (...) {
    if (budget_) budget_->give_back(n * page_bytes_);
    throw;
  }
}

// Requires that the mutex is locked and that there is room.
std::vector<PageId> PagePool::take_reserved(std::size_t n) {
  if (n > free_.size()) {
    const std::size_t missing = n - free_.size(), existing = holders_.size();
    // Grows by half, so that growth token by token rarely allocates.
    const std::size_t slab = std::max(existing / 2, kSlabBytes / page_bytes_);
    const std::size_t wanted = std::min(existing + std::max(missing, slab), max_pages_);
    store_.grow(wanted);
    holders_.reserve(wanted);
    free_.reserve(wanted);
    std::vector<PageId> added(wanted - existing);
    std::iota(added.rbegin(), added.rend(), PageId(existing));  // lowest first
    free_.insert(free_.begin(), added.begin(), added.end());
    n_idle_ += added.size();
    holders_.resize(wanted, 0);
  }
  std::vector<PageId> taken(free_.rbegin(), free_.rbegin() + std::ptrdiff_t(n));
  free_.resize(free_.size() - n);
  n_idle_ = std::min(n_idle_, free_.size());
  for (const PageId page : taken) {
    holders_[page] = 1;
    store_.taken(page);
  }
  return taken;
}

void PagePool::retain(std::span<const PageId> pages) {
  const std::scoped_lock lock(mutex_);
  for (const PageId page : pages) ++holders_[page];
}

void PagePool::release(std::span<const PageId> pages) {
  const std::scoped_lock lock(mutex_);
  // Releases the last page first, so that the next text takes them in order: adjacent pages are read faster.
  std::for_each(pages.rbegin(), pages.rend(), [&](PageId page) {
    if (--holders_[page] > 0) return;
    free_.push_back(page);  // cannot fail: free_ has capacity for all pages
    if (budget_) budget_->give_back(page_bytes_);
  });
  while ((free_.size() - n_idle_) * page_bytes_ > kWarmBytes) store_.idle(free_[n_idle_++]);
}

bool PagePool::is_shared(PageId page) const {
  const std::scoped_lock lock(mutex_);
  return holders_[page] > 1;
}

void PagePool::copy(PageId from, PageId to, int positions) {
  store_.copy(from, to, positions);
}

std::size_t PagePool::pages_in_use() const {
  const std::scoped_lock lock(mutex_);
  return holders_.size() - free_.size();
}

void BlockTable::reserve(int kept, int end) {
  if (end <= kept) return;
  const std::size_t held = pages_.size(), wanted = std::max(pages_of(end), held);
  const std::size_t first = std::size_t(kept) / kPagePositions;  // first page that is written to
  const int kept_in_first = kept % kPagePositions;
  const auto shared_pages = [&] {
    std::vector<std::size_t> shared;
    for (std::size_t i = first; i < std::min(pages_of(end), held); ++i)
      if (pool_.is_shared(pages_[i])) shared.push_back(i);
    return shared;
  };
  std::vector<std::size_t> replaced = shared_pages();
  if (wanted == held && replaced.empty()) return;
  pages_.reserve(wanted);
  std::vector<PageId> taken;
  try {
    taken = pool_.take(wanted - held + replaced.size());
  } catch (const KvMemoryError&) {
    // Only pages of this table that are also kept for later prompts can be reclaimed. Forgets the last one
    // first, as a page with successors cannot be forgotten.
    for (auto i = replaced.rbegin(); pool_.forget && i != replaced.rend(); ++i) pool_.forget(pages_[*i]);
    std::vector<std::size_t> still_shared = shared_pages();
    if (still_shared.size() == replaced.size()) throw;
    replaced = std::move(still_shared);
    taken = pool_.take(wanted - held + replaced.size());
  }
  if (!replaced.empty() && replaced.front() == first && kept_in_first > 0) try {
      pool_.copy(pages_[first], taken.back(), kept_in_first);
    } catch (...) {
      pool_.release(taken);
      throw;
    }
  for (const std::size_t i : replaced) {
    const PageId own = taken.back();
    taken.pop_back();
    pool_.release({&pages_[i], 1});
    pages_[i] = own;
  }
  pages_.insert(pages_.end(), taken.begin(), taken.end());
}

void BlockTable::truncate(int positions) {
  const std::size_t kept = pages_of(positions);
  if (kept >= pages_.size()) return;
  pool_.release(std::span(pages_).subspan(kept));
  pages_.resize(kept);
}

void BlockTable::share(const BlockTable& from, int positions) {
  std::vector<PageId> pages(from.pages_.begin(), from.pages_.begin() + std::ptrdiff_t(pages_of(positions)));
  pool_.retain(pages);
  adopt(std::move(pages));
}

void BlockTable::adopt(std::vector<PageId> pages) {
  pool_.release(pages_);
  pages_ = std::move(pages);
}

}  // namespace metal_prefill
