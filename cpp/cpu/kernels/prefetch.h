// Software prefetch.
#pragma once

#include <cstddef>

#include "kernels.h"
#include "unroll.h"

namespace metal_prefill::cpu {
namespace {

// Innermost cache to prefetch into. A core can have only a few lines in flight to L1, and further ones delay
// its loads: prefetching the weights of Q8_0 for 3 to 8 tokens into L1 doubled the time on Zen 4.
enum class CacheLevel { kL2 = 2, kL1 = 3 };

template <CacheLevel kLevel>
inline ALWAYS_INLINE void prefetch(const void* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const std::byte*>(from) + at, 0, int(kLevel));
}

// Prefetches without a loop, for use between products.
template <CacheLevel kLevel, std::size_t kBytes>
inline ALWAYS_INLINE void prefetch(const void* from) {
#pragma GCC unroll 20
  for (std::size_t at = 0; at < kBytes; at += 64)
    __builtin_prefetch(static_cast<const std::byte*>(from) + at, 0, int(kLevel));
}

// Spreads the prefetch of cache lines evenly over the tiles of a product.
class NextLines {
 public:
  NextLines(const PrefetchRange& next, int tiles)
      : at_(next.begin), lines_(int(next.bytes / 64)), tiles_(tiles) {}

  // Begins the share of the next tile, which has `steps` steps.
  void begin_tile(int steps) {
    share_ = ceil_div(lines_, tiles_--);
    lines_ -= share_;
    of_step_ = ceil_div(share_, steps);
  }
  void step() {
    for (int i = 0; i < of_step_ && share_ > 0; ++i, --share_, at_ += 64) prefetch<CacheLevel::kL2, 64>(at_);
  }
  // Prefetches all lines at once.
  void all() {
    begin_tile(1);
    step();
  }

 private:
  const std::byte* at_;
  int lines_, tiles_;  // remaining
  int share_ = 0, of_step_ = 0;
};

}  // namespace
}  // namespace metal_prefill::cpu
