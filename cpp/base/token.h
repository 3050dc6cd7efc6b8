#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace metal_prefill {

using TokenId = std::int32_t;

// Length of the longest common prefix of two lists.
inline int common_prefix(std::span<const TokenId> a, std::span<const TokenId> b) {
  const auto end = a.begin() + std::ptrdiff_t(std::min(a.size(), b.size()));
  return int(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
}

}  // namespace metal_prefill
