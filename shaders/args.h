// Arguments of every kernel, shared by the host and the shaders.
//
// Bindings of a kernel are in the order weights, inputs, outputs, and last one struct of args_fields.h.
// Strides count elements, offsets count bytes. A matrix is row-major: [rows][columns].
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
typedef uint u32_t;
typedef ulong u64_t;
#else
#include <cstdint>
typedef std::uint32_t u32_t;
typedef std::uint64_t u64_t;
#endif

// Activation of the feed-forward block.
#define ACTIVATION_SILU 0
#define ACTIVATION_GELU 1      // the tanh approximation
#define ACTIVATION_GELU_ERF 2  // exact
#define ACTIVATION_RELU 3
#define ACTIVATION_CLAMPED 4  // clamped_silu.h

// Pairs that rope rotates: (2i, 2i + 1), or (i, i + rope_dim / 2).
#define ROPE_INTERLEAVED 0
#define ROPE_NEOX 1

#define STACKED_MATRICES 4     // maximum number of matrices that a product reads as one
#define PAGE_POSITIONS 64      // positions of a page of K and V
#define MULTI_TOKEN_TILE 8     // maximum tokens that share a dequantized weight in multi_token_matvec
#define NORMED_MATVEC_ROWS 2   // rows per group of lanes in rmsnorm_matvec: the norm costs as much as a row
#define MATMUL_THREADS 128     // four simdgroups, 2 x 2 over the tile
#define MATMUL_K 32            // columns that a matmul stages at a time
#define MATMUL_NARROW_TILE 32  // tokens and rows of a matmul's tile
#define MATMUL_WIDE_TILE 64
#define MATMUL_TALL_TOKENS 128   // tokens of a tall tile of matmul_tensor, which has MATMUL_WIDE_TILE rows
#define MATMUL_PARTS 4           // parts of the columns in matmul_split, with MATMUL_THREADS threads each
#define ARGMAX_NONE 0xffffffffu  // index if every value is NaN
#define SCAN_COLUMNS 8           // columns of a head's state in the registers of a simdgroup
#define MOST_EXPERTS 512         // maximum per layer
#define STATE_NONE 0xffffffffu   // slot of a sequence without a state, or of a state that is not written

// clang-format off
#define ARGS_STRUCT(name) struct name {
#define ARGS_FIELD(type, name) type name;
#define ARGS_ARRAY(type, name, count) type name[count];
#define ARGS_END(name, bytes) }; static_assert(sizeof(name) == bytes, #name);
// clang-format on
#include "args_fields.h"
#undef ARGS_STRUCT
#undef ARGS_FIELD
#undef ARGS_ARRAY
#undef ARGS_END
