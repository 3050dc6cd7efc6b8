// Register-only products at peak rate, in terms of the vectors of one instruction set (Simd, included
// before): the limit that kernels are compared with.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "unroll.h"

namespace metal_prefill::cpu {
namespace {

// Independent chains of products: more than latency x pipes, but few enough for the registers.
constexpr int kPeakChains = Simd::kLanes == 16 ? 12 : Simd::kLanes == 8 ? 10 : 20;

// Hides the value of a register from the compiler: without sums inside the instruction (AVX2), all chains
// would share one product.
template <typename T>
inline ALWAYS_INLINE void forget(T& x) {
  if constexpr (std::is_class_v<T>) {
    asm volatile("" : "+m"(x));
  } else {
#if defined(__aarch64__)
    asm volatile("" : "+w"(x));
#elif defined(__x86_64__)
    asm volatile("" : "+v"(x));
#endif
  }
}

// acc = step(acc, x) for every chain in each round. Initial values and x come from opaque memory, so that the
// compiler can neither omit a round nor merge two chains.
template <typename Start, typename Load, typename Step>
inline void run_chains(int rounds, Start start, Load load, Step step) {
  alignas(64) std::uint8_t memory[kPeakChains + 1][64] = {};
  asm volatile("" : : "r"(memory) : "memory");
  decltype(start(memory[0])) acc[kPeakChains];
#pragma GCC unroll 32
  for (int i = 0; i < kPeakChains; ++i) acc[i] = start(memory[i]);
  for (int round = 0; round < rounds; ++round) {
    asm volatile("" : : : "memory");
    auto x = load(memory[kPeakChains]);
    // NOLINTBEGIN(modernize-loop-convert): a reference would give acc an address
#pragma GCC unroll 32
    for (int i = 0; i < kPeakChains; ++i) {
      forget(x);
      acc[i] = step(acc[i], x);
    }
    // NOLINTEND(modernize-loop-convert)
  }
  decltype(start(
      memory[0])) results[kPeakChains];  // acc itself must have no address, or it would be in memory
#pragma GCC unroll 32
  for (int i = 0; i < kPeakChains; ++i) results[i] = acc[i];
  asm volatile("" : : "r"(results) : "memory");
}

double run_dots(int rounds) {
  const auto load = [](const std::uint8_t* p) { return Simd::load_codes(p); };
  run_chains(rounds, load, load,
             [](Simd::I acc, Simd::I x) ALWAYS_INLINE { return Simd::template dot<0>(acc, x, x); });
  return double(rounds) * kPeakChains * Simd::kLanes * 4;
}

double run_fmas(int rounds) {
  const auto load = [](const std::uint8_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); };
  run_chains(rounds, load, load, [](Simd::F acc, Simd::F x) ALWAYS_INLINE { return Simd::fma(x, x, acc); });
  return double(rounds) * kPeakChains * Simd::kLanes;
}

}  // namespace
}  // namespace metal_prefill::cpu
