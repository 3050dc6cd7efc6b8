// Selection among the kernel sets that were built and that this machine runs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../../base/errors.h"
#include "../../base/processor.h"
#include "kernels.h"

namespace metal_prefill::cpu {

#define METAL_PREFILL_KERNELS(isa) const Kernels& kernels_##isa();
#include "kernel_sets.inc"
#undef METAL_PREFILL_KERNELS

namespace {

struct Built {
  const char* name;
  const Kernels& (*kernels)();  // callable only on processors with its instructions
  bool ProcessorFeatures::* feature;
};
// Everything that was built, fastest first.
constexpr Built kBuilt[] = {
#define METAL_PREFILL_KERNELS(isa) {#isa, kernels_##isa, &ProcessorFeatures::isa},
#include "kernel_sets.inc"
#undef METAL_PREFILL_KERNELS
};

bool runs(const Built& set) {
  static const ProcessorFeatures features = processor_features();
  return features.*set.feature;
}

// On some processors, products of bfloat16 pairs (the first set) are no faster than in float32 (the second):
// they issue one pair instruction a cycle, but two FMAs with half as many products each.
constexpr const char* kPairSet = "avx512bf16";
constexpr const char* kFloatSet = "avx512vnni";
constexpr double kMinPairSpeedup = 1.5;  // measured speedups are near 1 or near 2

std::atomic<double> known_speedup{0};  // of use_pair_speedup()

// Uses the shortest of several alternating runs, a tenth of a millisecond in total.
double measured_speedup(const Kernels& kernels) {
  constexpr int kTimes = 8, kRounds = 500;
  const auto rate = [](double (*loop)(int)) {
    const auto begin = std::chrono::steady_clock::now();
    const double products = loop(kRounds);
    return products / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  double pairs = 0, floats = 0;
  for (int i = 0; i < kTimes; ++i) {
    pairs = std::max(pairs, rate(kernels.run_bfloat16));
    floats = std::max(floats, rate(kernels.run_fmas));
  }
  return pairs / floats;
}

}  // namespace

double pair_speedup() {
  static const double speedup = [] {
    for (const Built& set : kBuilt) {
      if (std::string(set.name) != kPairSet || !runs(set)) continue;
      const double known = known_speedup.load();
      return known > 0 ? known : measured_speedup(set.kernels());
    }
    return 0.0;
  }();
  return speedup;
}

void use_pair_speedup(double speedup) {
  known_speedup.store(speedup);
}

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> available;
  for (const Built& set : kBuilt) {
    if (runs(set)) available.push_back(&set.kernels());
  }
  const auto named = [&](const char* name) {
    return std::find_if(available.begin(), available.end(),
                        [&](const Kernels* kernels) { return std::string(kernels->name) == name; });
  };
  const auto pairs = named(kPairSet), floats = named(kFloatSet);
  if (pairs < floats && floats != available.end() && pair_speedup() < kMinPairSpeedup)
    std::swap(*pairs, *floats);
  return available;
}

std::vector<std::string> kernel_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
  return names;
}

std::vector<std::string> built_sets() {
  std::vector<std::string> names;
  for (const Built& set : kBuilt) names.emplace_back(set.name);
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
