#pragma metal_emulator include simd/simd.h
