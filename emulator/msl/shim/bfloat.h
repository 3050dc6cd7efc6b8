// clang calls a library function to round to bfloat; not every system's compiler library has it.
#pragma once

#if MSL_CPU && __METAL_VERSION__ >= 310
extern "C" __attribute__((weak, visibility("hidden"))) __bf16 __truncsfbf2(float value) {
  unsigned bits = __builtin_bit_cast(unsigned, value);
  if (value != value) {
    bits |= 0x400000;  // a quiet NaN
  } else {
    bits += 0x7fff + (bits >> 16 & 1);  // to the nearest, ties to even
  }
  return __builtin_bit_cast(__bf16, static_cast<unsigned short>(bits >> 16));
}
#endif
