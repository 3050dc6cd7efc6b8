// Operations common to all instruction sets, written with the compilers' vector extensions. The Simd of an
// instruction set hides those for which it has a better instruction.
#pragma once

#include <cstdint>
#include <cstring>

namespace metal_prefill::cpu {
namespace {

template <typename Element, int kLanes>
struct VectorType {
  typedef Element Type __attribute__((vector_size(kLanes * sizeof(Element))));
};
template <typename Element, int kLanes>
using VectorOf = typename VectorType<Element, kLanes>::Type;

// `Vectors` provides F, a vector of float; I, a vector of integers of the same size; and set_int().
template <class Vectors>
struct SimdOps : Vectors {
  using F = typename Vectors::F;
  using I = typename Vectors::I;
  static constexpr int kLanes = int(sizeof(F) / sizeof(float));
  using Ints = VectorOf<std::int32_t, kLanes>;
  // Unsigned, so that lanes wrap around: signed overflow is undefined.
  using Words = VectorOf<std::uint32_t, kLanes>;

  static Ints ints(I a) { return reinterpret_cast<Ints>(a); }
  static I of_ints(Ints a) { return reinterpret_cast<I>(a); }
  static Words words(I a) { return reinterpret_cast<Words>(a); }
  static I of_words(Words a) { return reinterpret_cast<I>(a); }

  template <typename Vector>
  static Vector read(const void* p) {
    Vector a;
    std::memcpy(&a, p, sizeof a);
    return a;
  }
  static F load(const float* p) { return read<F>(p); }
  static void store(float* p, F a) { std::memcpy(p, &a, sizeof a); }
  static I load_codes(const std::uint8_t* p) { return read<I>(p); }
  static void store_codes(std::uint8_t* p, I a) { std::memcpy(p, &a, sizeof a); }
  // Floats of rows with four lanes each, `stride` apart.
  static F load_quads(const float* p, std::size_t) { return load(p); }
  static void store_quads(float* p, std::size_t, F a) { store(p, a); }
  static F load_bfloat16(const std::uint16_t* p) {
    return reinterpret_cast<F>(__builtin_convertvector(read<VectorOf<std::uint16_t, kLanes>>(p), Words)
                               << 16);
  }
  static F to_float(I a) { return __builtin_convertvector(ints(a), F); }
  // a if x >= limit or x is NaN, else 0.
  static F zero_below(F a, F x, F limit) {
    return reinterpret_cast<F>(reinterpret_cast<Ints>(a) & ~reinterpret_cast<Ints>(x < limit));
  }
  // a * 2^n for normal results.
  static F scale_by_power(F a, I n) {
    return reinterpret_cast<F>(reinterpret_cast<Words>(a) + (words(n) << 23));
  }
  // The bits of |a|: ordered as the magnitudes are, with NaN above all.
  static I magnitude_bits(F a) { return of_words(reinterpret_cast<Words>(a) & 0x7fffffffu); }

  static I broadcast4(const std::int8_t* p) { return Vectors::set_int(read<std::int32_t>(p)); }
  static I or_int(I a, I b) { return of_words(words(a) | words(b)); }
  static I sub_int(I a, I b) { return of_words(words(a) - words(b)); }
  static I add_int(I a, I b) { return of_words(words(a) + words(b)); }
  static I max_int(I a, I b) {
    const Ints x = ints(a), y = ints(b);
    return of_ints(x > y ? x : y);
  }
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
