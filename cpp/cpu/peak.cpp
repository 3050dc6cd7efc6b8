#include "peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

namespace metal_prefill::cpu {

namespace {

// A step is some multiply-adds that do not wait for each other.
struct Loop {
  void (*run)(int steps) = nullptr;
  double products = 0;  // multiply-adds of a step
};

#if defined(__x86_64__) || defined(_M_X64)

// Two a cycle, each of four or five cycles' latency, take ten sums in flight. What the registers hold is of
// no matter. Assembly, because compilers keep arrays of sums in memory.
constexpr int kSums = 12;
#define METAL_PREFILL_SUMS(step) \
  step(0) step(1) step(2) step(3) step(4) step(5) step(6) step(7) step(8) step(9) step(10) step(11)
#define METAL_PREFILL_CLOBBERED \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14"

#if METAL_PREFILL_BUILDS_avx512vnni
void avx512vnni(int steps) {
#define METAL_PREFILL_STEP(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n\t"
  for (int step = 0; step < steps; ++step)
    asm volatile(METAL_PREFILL_SUMS(METAL_PREFILL_STEP) : : : METAL_PREFILL_CLOBBERED);
  asm volatile("vzeroupper");
#undef METAL_PREFILL_STEP
}
#endif

#if METAL_PREFILL_BUILDS_avxvnni
void avxvnni(int steps) {
#define METAL_PREFILL_STEP(i) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" #i "\n\t"
  for (int step = 0; step < steps; ++step)
    asm volatile(METAL_PREFILL_SUMS(METAL_PREFILL_STEP) : : : METAL_PREFILL_CLOBBERED);
  asm volatile("vzeroupper");
#undef METAL_PREFILL_STEP
}
#endif

#if METAL_PREFILL_BUILDS_avx2
// Products of bytes are added in pairs to 16 bits, those in pairs to 32.
void avx2(int steps) {
#define METAL_PREFILL_STEP(i)                \
  "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n\t" \
  "vpmaddwd %%ymm13, %%ymm14, %%ymm14\n\t"   \
  "vpaddd %%ymm14, %%ymm" #i ", %%ymm" #i "\n\t"
  for (int step = 0; step < steps; ++step)
    asm volatile(METAL_PREFILL_SUMS(METAL_PREFILL_STEP) : : : METAL_PREFILL_CLOBBERED);
  asm volatile("vzeroupper");
#undef METAL_PREFILL_STEP
}
#endif

#if METAL_PREFILL_BUILDS_amx
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles 0 to 3 are sums of 16 x 16; 4 and 5 are 16 rows of 64 bytes, 6 and 7 the same the other way.
void amx(int steps) {
  const TileConfig config;
  asm volatile("ldtilecfg %0" : : "m"(config));
  for (int step = 0; step < steps; ++step) {
    asm volatile(
        "tdpbusd %tmm6, %tmm4, %tmm0\n\ttdpbusd %tmm7, %tmm4, %tmm1\n\t"
        "tdpbusd %tmm6, %tmm5, %tmm2\n\ttdpbusd %tmm7, %tmm5, %tmm3");
  }
  asm volatile("tilerelease");
}
#endif

Loop widest() {
  for (const Kernels* kernels : available_kernels()) {
    const std::string name = kernels->name;
#if METAL_PREFILL_BUILDS_amx
    if (name == "amx") return {amx, 4 * 16 * 16 * 64};
#endif
#if METAL_PREFILL_BUILDS_avx512vnni
    if (name == "avx512vnni") return {avx512vnni, kSums * 64};
#endif
#if METAL_PREFILL_BUILDS_avxvnni
    if (name == "avxvnni") return {avxvnni, kSums * 32};
#endif
#if METAL_PREFILL_BUILDS_avx2
    if (name == "avx2") return {avx2, kSums * 32};
#endif
  }
  return {};
}

#else

Loop widest() {
  return {};
}

#endif

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Products a second of all threads, each over its own time: they begin within a small part of it.
double rate(const Loop& loop, int threads, int steps) {
  std::vector<double> rates(std::size_t(threads), 0.0);
  std::vector<std::thread> workers;
  workers.reserve(rates.size());
  for (double& rate : rates) {
    workers.emplace_back([&loop, &rate, steps] {
      const Clock::time_point begin = Clock::now();
      loop.run(steps);
      rate = loop.products * steps / seconds(begin);
    });
  }
  double sum = 0;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    workers[i].join();
    sum += rates[i];
  }
  return sum;
}

}  // namespace

double int8_peak(int threads) {
  constexpr double kRunSeconds = 4e-3;  // long beside the start of a thread, short beside a time slice
  constexpr int kRuns = 40;
  const Loop loop = widest();
  if (!loop.run) return 0;
  int steps = 1 << 12;
  for (double probe = rate(loop, 1, steps); steps < 1 << 28; steps *= 2) {
    if (loop.products * steps / probe >= kRunSeconds) break;
    probe = std::max(probe, rate(loop, 1, steps));
  }
  double best = 0;
  for (int run = 0; run < kRuns; ++run) best = std::max(best, rate(loop, threads, steps));
  return best;
}

}  // namespace metal_prefill::cpu
