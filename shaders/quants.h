// Quantized block layouts of GGUF, shared by the host and the shaders.
//
// A quantized row is a sequence of blocks. Simple formats cover 32 values; K-quants cover 256 in a
// super-block. Layouts and names are those of the GGUF specification; no struct has padding.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
typedef half fp16_t;
typedef uchar u8_t;
typedef char i8_t;
typedef ushort u16_t;
#else
#include <cstdint>
typedef std::uint16_t fp16_t;  // IEEE binary16 bits
typedef std::uint8_t u8_t;
typedef std::int8_t i8_t;
typedef std::uint16_t u16_t;
#endif

// Every tensor type that a matrix can have: X(name in shaders, name, number in the GGUF specification). The
// struct of that name reads its values: in dequant.h for the shaders, in cpp/model/formats.h for the host.
#define EACH_TENSOR_TYPE(X) \
  X(f32, F32, 0)            \
  X(f16, F16, 1)            \
  X(bf16, BF16, 30)         \
  X(q8_0, Q8_0, 8)          \
  X(q4_0, Q4_0, 2)          \
  X(q4_1, Q4_1, 3)          \
  X(q5_0, Q5_0, 6)          \
  X(q5_1, Q5_1, 7)          \
  X(q2_k, Q2_K, 10)         \
  X(q3_k, Q3_K, 11)         \
  X(q4_k, Q4_K, 12)         \
  X(q5_k, Q5_K, 13)         \
  X(q6_k, Q6_K, 14)         \
  X(iq2_xxs, IQ2_XXS, 16)   \
  X(iq2_xs, IQ2_XS, 17)     \
  X(iq2_s, IQ2_S, 22)       \
  X(iq3_xxs, IQ3_XXS, 18)   \
  X(iq3_s, IQ3_S, 21)       \
  X(iq4_nl, IQ4_NL, 20)     \
  X(iq4_xs, IQ4_XS, 23)     \
  X(tq1_0, TQ1_0, 34)       \
  X(tq2_0, TQ2_0, 35)       \
  X(mxfp4, MXFP4, 39)       \
  X(nvfp4, NVFP4, 40)

#define QK4_0 32  // values in a Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL or MXFP4 block
#define QK_NVFP4 64
#define QK_K 256  // values in a super-block of all other types

struct block_q4_0 {  // x[j] = d * (q - 8); value j in the low nibble of qs[j], value j + 16 in the high one
  fp16_t d;
  u8_t qs[16];
};

struct block_q4_1 {  // x[j] = d * q + m
  fp16_t d;
  fp16_t m;
  u8_t qs[16];
};

struct block_q5_0 {  // x[j] = d * (q - 16); bit 4 of value j is bit j of qh
  fp16_t d;
  u8_t qh[4];
  u8_t qs[16];
};

struct block_q5_1 {  // x[j] = d * q + m
  fp16_t d;
  fp16_t m;
  u8_t qh[4];
  u8_t qs[16];
};

struct block_q8_0 {  // x[j] = d * q
  fp16_t d;
  i8_t qs[32];
};

struct block_q2_K {  // 16 groups of 16: x = d * scale * q - dmin * min; a scale and a min in the nibbles of a
                     // byte
  u8_t scales[16];
  u8_t qs[64];
  fp16_t d;
  fp16_t dmin;
};

struct block_q3_K {  // 16 groups of 16: x = d * (scale - 32) * (q - 4); 6-bit scales packed in 12 bytes; low
                     // 2 bits in qs, the third in hmask
  u8_t hmask[32];
  u8_t qs[64];
  u8_t scales[12];
  fp16_t d;
};

struct block_q4_K {  // 8 groups of 32: x = d * scale * q - dmin * min; 6-bit scales and mins packed in 12
                     // bytes
  fp16_t d;
  fp16_t dmin;
  u8_t scales[12];
  u8_t qs[128];
};

struct block_q5_K {  // as Q4_K, with the fifth bits in qh
  fp16_t d;
  fp16_t dmin;
  u8_t scales[12];
  u8_t qh[32];
  u8_t qs[128];
};

struct block_q6_K {  // 16 groups of 16: x = d * scale * (q - 32); low 4 bits in ql, high 2 bits in qh
  u8_t ql[128];
  u8_t qh[64];
  i8_t scales[16];
  fp16_t d;
};

// The IQ formats of 2 and 3 bits select magnitudes from the grids in grids.h, eight or four at a time, and
// store signs separately: one bit each, or 7 bits for eight values, of which an even number is negative.

struct block_iq2_xxs {  // 8 groups of 32: x = d * (2 * s + 1) / 8 * g; of a group four bytes of grid indices,
                        // then four times 7 bits of signs and 4 bits of s
  fp16_t d;
  u16_t qs[32];
};

struct block_iq2_xs {  // 16 groups of 16: x = d * (2 * s + 1) / 8 * g; qs: 9 bits of grid index, 7 of signs
  fp16_t d;
  u16_t qs[32];
  u8_t scales[8];
};

struct block_iq2_s {  // as IQ2_XS, with separate low and high bits of the grid indices and signs
  fp16_t d;
  u8_t qs[32];
  u8_t signs[32];
  u8_t qh[8];
  u8_t scales[8];
};

struct block_iq3_xxs {  // 8 groups of 32: x = d * (2 * s + 1) / 4 * g; signs and s as in IQ2_XXS
  fp16_t d;
  u8_t qs[64];
  u8_t signs[32];
};

struct block_iq3_s {  // 8 groups of 32: x = d * (2 * s + 1) * g; s are nibbles, qh has the ninth bits of qs
  fp16_t d;
  u8_t qs[64];
  u8_t qh[8];
  u8_t signs[32];
  u8_t scales[4];
};

struct block_iq4_nl {  // as Q4_0: x = d * value[q]
  fp16_t d;
  u8_t qs[16];
};

struct block_iq4_xs {  // 8 groups of 32: x = d * (scale - 32) * value[q], groups as in IQ4_NL
  fp16_t d;
  u16_t scales_h;
  u8_t scales_l[4];
  u8_t qs[128];
};

struct block_tq1_0 {  // x = d * (q - 1); five base-3 digits in a byte of qs, four in a byte of qh
  u8_t qs[48];
  u8_t qh[4];
  fp16_t d;
};

struct block_tq2_0 {  // x = d * (q - 1)
  u8_t qs[64];
  fp16_t d;
};

struct block_mxfp4 {  // as Q4_0: x = 2^(e - 128) * value[q]. Rows of an odd number of blocks have odd
                      // addresses
  u8_t e;
  u8_t qs[16];
};

struct block_nvfp4 {  // 4 groups of 16: x = d * value[q] / 2; a d has 4 bits of exponent and 3 of mantissa;
                      // value j of a group in the low nibble of its byte j, value j + 8 in the high one
  u8_t d[4];
  u8_t qs[32];
};

// Values of 4-bit codes. IQ4_NL and IQ4_XS have more values near zero; MXFP4 and NVFP4 have the floats of 2
// exponent bits and 1 fraction bit, doubled.
#define IQ4_VALUES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define MXFP4_VALUES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
// Magnitudes of the levels in a grid.
#define IQ2_MAGNITUDES 8, 25, 43
#define IQ3_XXS_MAGNITUDES 4, 12, 20, 28, 36, 44, 52, 62
#define IQ3_S_MAGNITUDES 1, 3, 5, 7, 9, 11, 13, 15
