// Features of this processor.
#pragma once

#include <cstddef>

namespace metal_prefill {

// Whether the processor has the instructions of each set of kernels, and the system saves their registers.
// Fields of sets for other architectures are not read.
struct ProcessorFeatures {
  bool scalar = true;
  bool avx2 = false;        // with FMA and F16C
  bool avxvnni = false;     // likewise
  bool avx512vnni = false;  // with F, BW, DQ and VL
  bool avx512bf16 = false;  // in addition to avx512vnni
  bool amx = false;         // tiles of bytes and bfloat16 in addition to both, permitted by the system
  bool neon = true;         // part of all 64-bit Arm processors
  bool neon_dotprod = false;
  bool neon_i8mm = false;  // in addition to dot products
};

ProcessorFeatures processor_features();

// Whether prefetch instructions speed up reading weights for few tokens: true on Intel's processors. On Zen 4
// prefetched lines arrive at 13.5 GB/s at most, a third of the rate of its own prefetcher.
bool prefetches_few_tokens();

// Bytes of activations that a thread processes at a time. More rows share each load of a weight, but must fit
// the L2 cache: on Intel's processors three quarters of it, at least 384 KB; on others 384 KB.
std::size_t bytes_at_once();

}  // namespace metal_prefill
