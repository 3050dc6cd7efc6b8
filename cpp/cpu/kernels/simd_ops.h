// Operations common to all instruction sets, written with the compilers' vector extensions. The Simd of an
// instruction set hides those for which it has a better instruction.
#pragma once

#include <cstdint>
#include <cstring>

namespace metal_prefill::cpu {
namespace {

// `Vectors` provides F, a vector of float; I, a vector of integers of the same size; and set_int().
template <class Vectors>
struct SimdOps : Vectors {
  using F = typename Vectors::F;
  using I = typename Vectors::I;
  static constexpr int kLanes = int(sizeof(F) / sizeof(float));
  // Unsigned, so that lanes wrap around: signed overflow is undefined.
  typedef std::uint32_t Words __attribute__((vector_size(sizeof(F))));

  static Words words(I a) { return reinterpret_cast<Words>(a); }
  static I of_words(Words a) { return reinterpret_cast<I>(a); }

  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  // a * 2^n for normal results.
  static F scale_by_power(F a, I n) {
    return reinterpret_cast<F>(reinterpret_cast<Words>(a) + (words(n) << 23));
  }
  // The bits of |a|: ordered as the magnitudes are, with NaN above all.
  static I magnitude_bits(F a) { return of_words(reinterpret_cast<Words>(a) & 0x7fffffffu); }

  static I broadcast4(const std::int8_t* p) {
    std::int32_t x;
    std::memcpy(&x, p, 4);
    return Vectors::set_int(x);
  }
  static I or_int(I a, I b) { return of_words(words(a) | words(b)); }
  static I sub_int(I a, I b) { return of_words(words(a) - words(b)); }
  static I add_int(I a, I b) { return of_words(words(a) + words(b)); }
  template <int kBits>
  static I shift_left(I a) {
    return of_words(words(a) << kBits);
  }
  template <int kByte>
  static I byte_of(I a) {  // byte kByte of each lane, counted from the lowest
    const Words shifted = words(a) >> 8 * kByte;
    return of_words(kByte == 3 ? shifted : shifted & 255u);
  }
  // Moves kWidth bits of each byte from bit kFrom to bit kTo; other bits are zero.
  template <int kWidth, int kFrom, int kTo>
  static I field(I a) {
    constexpr std::uint32_t kMask = (((1u << kWidth) - 1) << kTo) * 0x01010101u;
    const Words shifted = kFrom > kTo ? words(a) >> (kFrom > kTo ? kFrom - kTo : 0)
                                      : words(a) << (kFrom < kTo ? kTo - kFrom : 0);
    return of_words(shifted & kMask);
  }
  static I low_nibbles(I a) { return field<4, 0, 0>(a); }
  static I high_nibbles(I a) { return field<4, 4, 0>(a); }
};

}  // namespace
}  // namespace metal_prefill::cpu
