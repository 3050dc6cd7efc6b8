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

// Every tensor type that a matrix can have: X(its name in shaders, its name, its number in the GGUF
// specification). The struct of that name reads its values: in dequant.h for the shaders, in cpp/formats.h
// for the host.
#define EACH_TENSOR_TYPE(X) \
  X(f32, F32, 0)            \
  X(f16, F16, 1)            \
  X(bf16, BF16, 30)         \
  X(q8_0, Q8_0, 8)          \
  X(q4_0, Q4_0, 2)          \
  X(q4_1, Q4_1, 3)          \
  X(q5_0, Q5_0, 6)          \
  X(q5_1, Q5_1, 7)          \
  X(q4_k, Q4_K, 12)         \
  X(q5_k, Q5_K, 13)         \
  X(q6_k, Q6_K, 14)

#define QK4_0 32  // values in a Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 block
#define QK_K 256  // values in a K-quant super-block

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

static_assert(sizeof(block_q4_0) == 18, "Q4_0 block");
static_assert(sizeof(block_q4_1) == 20, "Q4_1 block");
static_assert(sizeof(block_q5_0) == 22, "Q5_0 block");
static_assert(sizeof(block_q5_1) == 24, "Q5_1 block");
static_assert(sizeof(block_q8_0) == 34, "Q8_0 block");
static_assert(sizeof(block_q4_K) == 144, "Q4_K block");
static_assert(sizeof(block_q5_K) == 176, "Q5_K block");
static_assert(sizeof(block_q6_K) == 210, "Q6_K block");
