#include "checksum.h"

#include <array>
#include <bit>
#include <cstring>

namespace metal_prefill {

namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr std::size_t kStripe = 32;  // bytes: one word for each of four accumulators

template <typename Word>
Word load(const std::byte* p) {
  static_assert(std::endian::native == std::endian::little);
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

std::uint64_t round(std::uint64_t acc, std::uint64_t word) {
  return std::rotl(acc + word * kPrime2, 31) * kPrime1;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> data, std::uint64_t seed) {
  const std::byte* p = data.data();
  std::size_t left = data.size();
  std::uint64_t hash = seed + kPrime5;

  if (left >= kStripe) {
    std::array<std::uint64_t, 4> acc = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= kStripe; left -= kStripe, p += kStripe)
      for (std::size_t i = 0; i < acc.size(); ++i) acc[i] = round(acc[i], load<std::uint64_t>(p + 8 * i));
    hash = std::rotl(acc[0], 1) + std::rotl(acc[1], 7) + std::rotl(acc[2], 12) + std::rotl(acc[3], 18);
    for (const std::uint64_t a : acc) hash = (hash ^ round(0, a)) * kPrime1 + kPrime4;
  }
  hash += data.size();

  for (; left >= 8; left -= 8, p += 8)
    hash = std::rotl(hash ^ round(0, load<std::uint64_t>(p)), 27) * kPrime1 + kPrime4;
  for (; left >= 4; left -= 4, p += 4)
    hash = std::rotl(hash ^ (load<std::uint32_t>(p) * kPrime1), 23) * kPrime2 + kPrime3;
  for (; left > 0; --left, ++p) hash = std::rotl(hash ^ (load<std::uint8_t>(p) * kPrime5), 11) * kPrime1;

  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace metal_prefill
