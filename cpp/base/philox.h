// Random numbers that are a function of a key and a counter: Philox 4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", 2011). There is no state, so a number does not depend on earlier ones.
#pragma once

#include <array>
#include <cstdint>

namespace metal_prefill {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  constexpr int kRounds = 10;
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;  // golden ratio, sqrt(3) - 1
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t a = kMultiplier0 * counter[0], b = kMultiplier1 * counter[2];
    counter = {std::uint32_t(b >> 32) ^ counter[1] ^ key[0], std::uint32_t(b),
               std::uint32_t(a >> 32) ^ counter[3] ^ key[1], std::uint32_t(a)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

// Returns a number in [0, 1) with 53 random bits.
inline double uniform(const PhiloxCounter& random) {
  const std::uint64_t bits = std::uint64_t(random[0] >> 5) << 26 | random[1] >> 6;
  return double(bits) * 0x1p-53;
}

}  // namespace metal_prefill
