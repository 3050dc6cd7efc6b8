// Sizes that depend on the GPU, one row for each family. The reasons are in docs/kernels.md.
#pragma once

#include <array>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "../../engine/engine.h"

namespace metal_prefill::metal {

// Cost of a step of MATMUL_K columns of a tile in a matmul with Q4_0, in cycles of a core. `work`: of the
// schedulers or of threadgroup memory, whichever is more. `alone`: of a threadgroup that has a core for
// itself. Other types need more cycles of both, so that the same tiles suit them.
struct TileCost {
  int work, alone;
  int resident;  // threadgroups that are resident on a core at the same time
};
struct TileCosts {
  TileCost narrow, wide, split;
  TileCost tensor_narrow, tensor_wide, tensor_tall;  // with matrix units
};

struct Tuning {
  int family;              // of Apple's GPUs: 7 is MTLGPUFamilyApple7
  int cores;               // of the base chip, such as M4; for M4 Pro and others see tuned_for
  int matvec_threads;      // total threads that a matvec needs, for the base chip
  int matvec_group;        // threads per matvec threadgroup
  int split_keys;          // minimum keys of a threadgroup of attention_decode
  int max_splits;          // maximum threadgroups that share the keys of a head
  int prefill_simdgroups;  // simdgroups per attention_prefill threadgroup
  int argmax_groups;       // threadgroups of the first stage of argmax
  double buffer_work;      // multiply-adds per command buffer: about 100 ms on the slowest chip
  bool matmul_tensor;      // whether many tokens use matmul_tensor: the GPU has matrix units
  TileCosts tiles;
  bool tall_tiles = true;        // if matmul_tensor is used
  bool attention_tensor = true;  // if matmul_tensor is used
  bool fused_norm = false;       // whether the norm before a product of one token is fused with it
  int matvec_rows = 1;           // rows of a matvec per simdgroup whose lanes share a row: 1, 2 or 4
};

inline constexpr TileCosts kTilesOfApple7 = {{390, 930, 6}, {1410, 1870, 3}, {450, 300, 3}, {}, {}, {}};
inline constexpr TileCosts kTilesOfApple9 = {{340, 1000, 6}, {1210, 1670, 3}, {390, 330, 3}, {}, {}, {}};
inline constexpr TileCosts kTilesOfApple10 = {{340, 1000, 6}, {1210, 1670, 3}, {390, 330, 3},
                                              {240, 830, 6},  {490, 1010, 3},  {620, 1640, 6}};

inline constexpr std::array<Tuning, 4> kTunings = {{
    // family, cores, matvec splits prefill argmax work tensor tiles
    {10, 10, 20480, 64, 128, 32, 4, 32, 9e10, true, kTilesOfApple10},  // M5
    {9, 10, 16384, 64, 128, 32, 4, 32, 9e10, false, kTilesOfApple9},   // M3, M4
    {8, 10, 12288, 64, 128, 32, 4, 32, 7e10, false, kTilesOfApple7},   // M2
    {7, 8, 12288, 64, 128, 32, 2, 32, 6.5e10, false, kTilesOfApple7},  // M1 and unknown GPUs
}};

// Larger chips of a family, by the word after the chip's name ("Apple M4 Pro"): about twice as many cores (14
// to 20), four times (24 to 40), eight times (48 to 80), and the bandwidth of memory in proportion. Chips of
// phones ("Apple A18 Pro") have half of both: 5 or 6 cores. Metal does not report the number.
inline constexpr std::pair<std::string_view, int> kLargerChips[] = {{"Pro", 2}, {"Max", 4}, {"Ultra", 8}};

// Applies the options that override choices for the GPU.
inline Tuning tuned_by(const MetalOptions& options, Tuning tuning) {
  if (options.buffer_work > 0) tuning.buffer_work = options.buffer_work;
  tuning.fused_norm = options.fused_norm.value_or(tuning.fused_norm);
  if (options.matvec_rows > 0) tuning.matvec_rows = options.matvec_rows;
  tuning.matmul_tensor = tuning.matmul_tensor && options.no_matmul_tensor.empty();
  tuning.tall_tiles = options.tall_tiles;
  tuning.attention_tensor = options.attention_tensor;
  return tuning;
}

// Adapts the row of a family to a GPU of this name.
inline Tuning tuned_for(Tuning tuning, const std::string& name) {
  std::istringstream words(name);
  std::string maker, chip, word;
  words >> maker >> chip >> word;
  if (chip.find_first_of("0123456789") != 1) return tuning;
  if (chip[0] == 'A') tuning.cores /= 2, tuning.matvec_threads /= 2;
  for (const auto& [larger, times] : kLargerChips)
    if (chip[0] == 'M' && word == larger) tuning.cores *= times, tuning.matvec_threads *= times;
  return tuning;
}

}  // namespace metal_prefill::metal
