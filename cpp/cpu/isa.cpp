// Which of the built kernel sets this machine runs, and which one is taken.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../engine.h"
#include "kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace metal_prefill::cpu {

#define METAL_PREFILL_KERNELS(isa) extern const Kernels kKernels_##isa;
#include "kernel_sets.inc"
#undef METAL_PREFILL_KERNELS

namespace {

#if defined(__x86_64__) || defined(_M_X64)

// Instruction sets of the processor that the system also saves the registers of.
struct Features {
  bool avx2 = false;        // with FMA and F16C
  bool avxvnni = false;     // likewise
  bool avx512vnni = false;  // with F, BW, DQ and VL
  bool avx512bf16 = false;  // on top of it
  bool amx = false;         // 8-bit tiles on top of both, and the system's permission
};

// Linux grants the large registers of AMX to a process that asks for them.
bool request_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features features;
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

bool runs(const Kernels& kernels) {
  static const Features features = detect();
  const std::string name = kernels.name;
  if (name == "amx") return features.amx;
  if (name == "avx512bf16") return features.avx512bf16;
  if (name == "avx512vnni") return features.avx512vnni;
  if (name == "avxvnni") return features.avxvnni;
  if (name == "avx2") return features.avx2;
  return true;
}

#elif defined(__aarch64__)

struct Features {
  bool dotprod = false;
  bool i8mm = false;
};

#if defined(__linux__)
// Bits of the auxiliary vector, as the kernel's documentation (arch/arm64/elf_hwcaps) lists them: the headers
// of an older system lack the names.
constexpr unsigned long kDotProd = 1ul << 20;  // HWCAP_ASIMDDP
constexpr unsigned long kI8mm = 1ul << 13;     // HWCAP2_I8MM

Features detect() {
  return {(getauxval(AT_HWCAP) & kDotProd) != 0, (getauxval(AT_HWCAP2) & kI8mm) != 0};
}
#elif defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

Features detect() {
  return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM")};
}
#else
Features detect() {
  return {};
}
#endif

bool runs(const Kernels& kernels) {
  static const Features features = detect();
  const std::string name = kernels.name;
  if (name == "neon_i8mm") return features.dotprod && features.i8mm;
  if (name == "neon_dotprod") return features.dotprod;
  return true;
}

#else

bool runs(const Kernels&) {
  return true;
}

#endif

// Everything that was built, fastest first.
const Kernels* const kBuilt[] = {
#define METAL_PREFILL_KERNELS(isa) &kKernels_##isa,
#include "kernel_sets.inc"
#undef METAL_PREFILL_KERNELS
};

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> available;
  for (const Kernels* kernels : kBuilt) {
    if (runs(*kernels)) available.push_back(kernels);
  }
  return available;
}

std::vector<std::string> built_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : kBuilt) names.emplace_back(kernels->name);
  return names;
}

const Kernels& kernels_named(const std::string& set) {
  for (const Kernels* kernels : available_kernels())
    if (set == kernels->name) return *kernels;
  throw std::invalid_argument("no kernel set '" + set + "'");
}

const Kernels& select_kernels() {
  const std::vector<const Kernels*> available = available_kernels();
  const char* wanted = std::getenv("METAL_PREFILL_CPU_ISA");
  if (!wanted || !*wanted) return *available.front();
  std::string names;
  for (const Kernels* kernels : available) {
    if (std::string(kernels->name) == wanted) return *kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  }
  throw DeviceError("METAL_PREFILL_CPU_ISA is '" + std::string(wanted) +
                    "', but this machine runs: " + names);
}

}  // namespace metal_prefill::cpu
