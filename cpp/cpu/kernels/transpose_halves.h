// Transposes tiles of two-byte elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace metal_prefill::cpu {
namespace {

using Halves = std::uint16_t __attribute__((vector_size(16)));

// Elements of the concatenation of a and b with these indices. GCC has the builtin of clang since version 12.
template <int... kNumbers>
inline Halves shuffled(Halves a, Halves b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kNumbers...);
#else
  return __builtin_shuffle(a, b, Halves{kNumbers...});
#endif
}

// Interleave a and b, their first or second halves, and reverse it.
inline Halves zip_low(Halves a, Halves b) {
  return shuffled<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
}
inline Halves zip_high(Halves a, Halves b) {
  return shuffled<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
}
inline Halves evens(Halves a, Halves b) {
  return shuffled<0, 2, 4, 6, 8, 10, 12, 14>(a, b);
}

constexpr int kHalvesTile = 8;  // rows and columns of a tile

// Transposes a tile by three perfect shuffles. `from_row` and `to_column` are in bytes.
inline void transpose_halves(const void* from, std::size_t from_row, void* to, std::size_t to_column) {
  std::array<Halves, kHalvesTile> rows, zipped;
  for (std::size_t r = 0; r < kHalvesTile; ++r)
    std::memcpy(&rows[r], static_cast<const std::byte*>(from) + r * from_row, sizeof(Halves));
  for (int shuffle = 0; shuffle < 3; ++shuffle) {
    for (std::size_t r = 0; r < kHalvesTile / 2; ++r) {
      zipped[2 * r] = zip_low(rows[r], rows[r + kHalvesTile / 2]);
      zipped[2 * r + 1] = zip_high(rows[r], rows[r + kHalvesTile / 2]);
    }
    rows = zipped;
  }
  for (std::size_t c = 0; c < kHalvesTile; ++c)
    std::memcpy(static_cast<std::byte*>(to) + c * to_column, &rows[c], sizeof(Halves));
}

}  // namespace
}  // namespace metal_prefill::cpu
