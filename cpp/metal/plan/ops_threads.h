// Dispatches over rows and values, and their numbers of threads, for the sources of ops.h.
#pragma once

#include <algorithm>

#include "../../base/rounding.h"
#include "ops.h"

namespace metal_prefill::metal::ops {

inline constexpr std::size_t kSimd = 32;

// Limits `threads` to what the kernel's pipeline allows, in whole simdgroups, if the kernel supports it.
inline std::size_t allowed_threads(const Encoder& e, const KernelKey& kernel, std::size_t threads) {
  return std::min(threads, std::max(kSimd, e.max_threads(kernel) / kSimd * kSimd));
}

// Four values per thread, so that a row is read at once.
inline std::size_t norm_threads(const Encoder& e, const KernelKey& kernel, int dim) {
  return allowed_threads(e, kernel, round_up(std::size_t(dim) / 4, kSimd));
}

// Dispatches one threadgroup per row.
template <typename Args>
void dispatch_rows(Encoder& e, const KernelKey& kernel, std::initializer_list<View> buffers, const Args& args,
                   int dim, int rows) {
  e.dispatch(kernel, buffers, args, {.x = std::size_t(rows), .threads = norm_threads(e, kernel, dim)});
}

// Dispatches one thread for each of `columns` of each row.
template <typename Args>
void dispatch_values(Encoder& e, const KernelKey& kernel, std::initializer_list<View> buffers,
                     const Args& args, std::size_t columns, int rows, std::span<const RowRun> runs = {}) {
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(kernel, buffers, args,
             {.x = ceil_div(columns, threads), .y = std::size_t(rows), .threads = threads}, runs);
}

}  // namespace metal_prefill::metal::ops
