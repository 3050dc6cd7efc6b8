// Features that an x86 processor has and its system enables.
#pragma once

namespace metal_prefill::cpu {

// Instruction sets of the processor that the system also saves the registers of.
struct ProcessorFeatures {
  bool avx2 = false;        // with FMA and F16C
  bool avxvnni = false;     // likewise
  bool avx512vnni = false;  // with F, BW, DQ and VL
  bool avx512bf16 = false;  // on top of it
  bool amx = false;         // 8-bit tiles on top of both, and the system's permission
};

ProcessorFeatures processor_features();

// Sets the result of pair_speedup() of an earlier process on the same processor; has no effect after a
// measurement, or on a processor without such products.
void use_pair_speedup(double speedup);

}  // namespace metal_prefill::cpu
