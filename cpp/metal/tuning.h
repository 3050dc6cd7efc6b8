// Sizes that depend on the GPU, one row for each family. The reasons are in docs/kernels.md.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace metal_prefill::metal {

struct Tuning {
  int family;              // of Apple's GPUs: 7 is MTLGPUFamilyApple7
  int cores;               // of the chip itself, such as M4; for M4 Pro and others see tuned_for
  int wide_groups;         // wide matmul tiles where there are at least so many threadgroups of them
  int matvec_threads;      // threads that a matvec needs in total: more lanes share a row until it has them
  int matvec_group;        // threads of a matvec threadgroup
  int split_keys;          // fewest keys of a threadgroup of attention_decode
  int max_splits;          // most threadgroups that share the keys of a head
  int prefill_simdgroups;  // simdgroups of an attention_prefill threadgroup
  int argmax_groups;       // threadgroups of the first stage of argmax
  double buffer_work;      // multiply-adds of a command buffer: about 100 ms on the slowest chip
  bool matmul_tensor;      // products of many tokens by matmul_tensor: the GPU has matrix units
};

inline constexpr std::array<Tuning, 4> kTunings = {{
    // family, cores, wide matvec splits prefill argmax work tensor
    {10, 10, 40, 20480, 64, 128, 32, 4, 32, 9e10, true},   // M5
    {9, 10, 40, 16384, 64, 128, 32, 4, 32, 9e10, false},   // M3, M4
    {8, 10, 40, 12288, 64, 128, 32, 4, 32, 7e10, false},   // M2
    {7, 8, 32, 12288, 64, 128, 32, 2, 32, 6.5e10, false},  // M1, and GPUs that are not known
}};

// Chips of a family that have more cores, by a word of their names ("Apple M4 Pro"): about twice as many (14
// to 20), four times (24 to 40), eight times (48 to 80). Metal does not say how many.
struct LargerChip {
  std::string_view word;
  int times;
};
inline constexpr std::array<LargerChip, 3> kLargerChips = {{{"Pro", 2}, {"Max", 4}, {"Ultra", 8}}};

// The row of a family for a GPU of this name.
inline Tuning tuned_for(Tuning tuning, const std::string& name) {
  for (const LargerChip& chip : kLargerChips)
    if ((' ' + name + ' ').find(' ' + std::string(chip.word) + ' ') != std::string::npos)
      tuning.cores *= chip.times;
  return tuning;
}

}  // namespace metal_prefill::metal
