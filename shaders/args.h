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

// Pairs that rope rotates: (2i, 2i + 1), or (i, i + rope_dim / 2).
#define ROPE_INTERLEAVED 0
#define ROPE_NEOX 1

#define PAGE_POSITIONS 64      // positions of a page of K and V
#define MULTI_TOKEN_TILE 8     // most tokens that share a dequantized weight in multi_token_matvec
#define MATMUL_THREADS 128     // four simdgroups, 2 x 2 over the tile
#define MATMUL_K 32            // columns that a matmul stages at a time
#define MATMUL_NARROW_TILE 32  // tokens and rows of a matmul's tile
#define MATMUL_WIDE_TILE 64
#define MATMUL_PARTS 4           // of the columns, in matmul_split: each multiplied by MATMUL_THREADS threads
#define DECODE_SIMDGROUPS 8      // most simdgroups of an attention_decode threadgroup
#define PREFILL_KEYS 32          // keys of one step of attention_prefill
#define ARGMAX_NONE 0xffffffffu  // index where every value was NaN

// Query heads that one threadgroup of attention_decode takes together, so that they share the reads of K and
// V. Limited by registers: a lane holds 8 * chunks values of query and output for each head.
#define DECODE_HEADS(chunks) ((chunks) <= 2 ? 4 : (chunks) <= 4 ? 2 : 1)

// 8-row blocks of queries that a simdgroup of attention_prefill owns, by the most dimensions of a head and
// the bytes of a cached element. Limited by registers: output and query take dims / 8 * 2 floats and as many
// cached elements for each block.
#define PREFILL_ROW_BLOCKS(dims, element_bytes) ((dims) * (element_bytes) <= 256 ? 2 : 1)

// Whether the queries of attention_prefill stay in threadgroup memory: where output (two registers of a lane
// for each 8x8 block) and queries (two cached elements) would take more than 64 of the 128 registers of a
// lane.
#define PREFILL_STAGES_QUERY(dims, element_bytes) \
  (PREFILL_ROW_BLOCKS(dims, element_bytes) * ((dims) / 8) * (2 + (element_bytes) / 2) > 64)

// Bytes of a query there: 16 more than it has, so that eight rows of a block fall in distinct banks.
#define PREFILL_QUERY_BYTES(dims, element_bytes) ((dims) * (element_bytes) + 16)

// Floats of threadgroup memory that one simdgroup of attention_prefill needs: scores [rows][PREFILL_KEYS],
// one diagonal 8x8 matrix for each 8 rows, an 8x8 block of V at the end of the cache, and staged queries.
#define PREFILL_SCRATCH(dims, element_bytes)                                                     \
  (PREFILL_ROW_BLOCKS(dims, element_bytes) * (8 * PREFILL_KEYS + 64) + 64 +                      \
   (PREFILL_STAGES_QUERY(dims, element_bytes)                                                    \
        ? PREFILL_ROW_BLOCKS(dims, element_bytes) * 2 * PREFILL_QUERY_BYTES(dims, element_bytes) \
        : 0))

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
