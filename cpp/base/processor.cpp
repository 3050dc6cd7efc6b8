#include "processor.h"

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace metal_prefill {

#if defined(__x86_64__)

namespace {

// Linux grants the large registers of AMX to processes on request.
bool request_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool is_intel() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx &&
         d == signature_INTEL_edx;
}

// Bytes of the L2 cache for each core that shares it; 0 if the processor does not list its caches in leaf 4,
// as AMD's do not.
std::size_t l2_bytes() {
  constexpr unsigned kNone = 0, kInstructions = 2, kSecondLevel = 2, kThreadsOfCore = 2, kMostCaches = 16;
  unsigned a = 0, b = 0, c = 0, d = 0;
  for (unsigned cache = 0; cache < kMostCaches && __get_cpuid_count(4, cache, &a, &b, &c, &d); ++cache) {
    const unsigned type = a & 31, level = a >> 5 & 7;
    if (type == kNone) break;
    if (type != kInstructions && level == kSecondLevel) {
      const std::size_t line = (b & 0xfff) + 1, partitions = (b >> 12 & 0x3ff) + 1, ways = (b >> 22) + 1;
      const unsigned threads = (a >> 14 & 0xfff) + 1, cores = std::max(threads / kThreadsOfCore, 1u);
      return ways * partitions * line * (std::size_t(c) + 1) / cores;
    }
  }
  return 0;
}

}  // namespace

// Replaces __builtin_cpu_supports, which reads a table that zig's runtime library lacks.
ProcessorFeatures processor_features() {
  ProcessorFeatures features;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool fma = c >> 12 & 1, f16c = c >> 29 & 1, xsave = c >> 27 & 1;
  if (!xsave) return features;
  unsigned xcr_low = 0, xcr_high = 0;
  asm("xgetbv" : "=a"(xcr_low), "=d"(xcr_high) : "c"(0));
  const bool ymm = (xcr_low & 0x06) == 0x06, zmm = (xcr_low & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  const unsigned leaf7_b = b, leaf7_c = c, leaf7_d = d, subleaves = a;
  features.avx2 = ymm && fma && f16c && (leaf7_b >> 5 & 1);
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  features.avx512vnni = features.avx2 && zmm && (leaf7_b & avx512) == avx512 && (leaf7_c >> 11 & 1);
  const bool tile_registers = (xcr_low & 0x60000) == 0x60000;
  const unsigned amx = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    features.avxvnni = features.avx2 && (a >> 4 & 1);
    features.avx512bf16 = features.avx512vnni && (a >> 5 & 1);
  }
  features.amx = features.avx512bf16 && tile_registers && (leaf7_d & amx) == amx && request_amx();
  return features;
}

#else

namespace {

bool is_intel() {
  return false;
}
std::size_t l2_bytes() {
  return 0;
}

#if defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
#endif

}  // namespace

ProcessorFeatures processor_features() {
  ProcessorFeatures features;
#if defined(__aarch64__) && defined(__linux__)
  // Bits of the auxiliary vector, as the kernel's documentation (arch/arm64/elf_hwcaps) lists them: the
  // headers of an older system lack the names.
  constexpr unsigned long kDotProd = 1ul << 20;  // HWCAP_ASIMDDP
  constexpr unsigned long kI8mm = 1ul << 13;     // HWCAP2_I8MM
  features.neon_dotprod = (getauxval(AT_HWCAP) & kDotProd) != 0;
  features.neon_i8mm = features.neon_dotprod && (getauxval(AT_HWCAP2) & kI8mm) != 0;
#elif defined(__APPLE__)
  features.neon_dotprod = has("hw.optional.arm.FEAT_DotProd");
  features.neon_i8mm = features.neon_dotprod && has("hw.optional.arm.FEAT_I8MM");
#endif
  return features;
}

#endif

bool prefetches_few_tokens() {
  static const bool prefetches = is_intel();
  return prefetches;
}

std::size_t bytes_at_once() {
  constexpr std::size_t kLeast = 384 << 10;
  static const std::size_t bytes = std::max(kLeast, l2_bytes() / 4 * 3);
  return bytes;
}

}  // namespace metal_prefill
