// Features of this processor.
#pragma once

#include <cstddef>

namespace metal_prefill {

// Instruction sets of the processor whose registers the system also saves.
struct ProcessorFeatures {
  bool avx2 = false;        // with FMA and F16C
  bool avxvnni = false;     // likewise
  bool avx512vnni = false;  // with F, BW, DQ and VL
  bool avx512bf16 = false;  // on top of it
  bool amx = false;         // 8-bit tiles on top of both, and the system's permission
};

ProcessorFeatures processor_features();

// Whether weights for few tokens arrive sooner with prefetch instructions: on Intel's processors. On Zen 4
// such lines arrive at 13.5 GB/s at most, a third of the rate of its own prefetcher.
bool prefetches_few_tokens();

// Bytes of activations that a thread computes at a time, a part of the L2 cache: with more rows, each weight
// serves more products. On Intel's processors three quarters of the cache, at least 384 KB; on others 384 KB.
std::size_t bytes_at_once();

}  // namespace metal_prefill
