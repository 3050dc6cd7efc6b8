// The limit that products of 8-bit integers set: what a benchmark compares the engine with.
#pragma once

namespace metal_prefill::cpu {

// 8-bit multiply-adds a second on `threads` threads at once, with the widest instruction for them that this
// machine has: operands in registers, enough sums in flight, nothing else. The best of several short runs; 0
// where no such instruction is known.
double int8_peak(int threads);

}  // namespace metal_prefill::cpu
