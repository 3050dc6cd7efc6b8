// Which of the built kernel sets this machine runs, and which one is taken.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../engine.h"
#include "kernels.h"
#include "processor.h"

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

bool runs(const Kernels& kernels) {
  static const ProcessorFeatures features = processor_features();
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
