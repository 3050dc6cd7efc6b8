// Sizes of the attention kernels, shared by the host and the shaders.
#pragma once

#define DECODE_SIMDGROUPS 8  // maximum simdgroups of an attention_decode threadgroup
#define PREFILL_KEYS 32      // keys of one step of attention_prefill

// Stacked rows of a tile of attention_tensor, and the head sizes that it supports. Others use
// attention_prefill.
#define ATTENTION_TENSOR_ROWS 64
#define ATTENTION_TENSOR_DIMS(dims) ((dims) == 64 || (dims) == 128)

// Lanes of attention_decode that share a key, by the maximum dimensions of a head, and the chunks of a head,
// each of four values per lane.
#define DECODE_LANES(dims) ((dims) <= 256 ? 8 : 16)
#define DECODE_CHUNKS(dims) ((dims) / (4 * DECODE_LANES(dims)))

// Query heads that a threadgroup of attention_decode processes together, so that they share the reads of K
// and V. Limited by registers: a lane holds 8 * chunks values of query and output per head.
#define DECODE_HEADS(chunks) ((chunks) <= 2 ? 4 : (chunks) <= 4 ? 2 : 1)

// Whether attention_decode loads the keys of the next step before it multiplies the current ones: if both
// steps fit in 32 registers of a lane.
#define DECODE_LOADS_AHEAD(chunks, element_bytes) ((chunks) * (element_bytes) <= 8)

// 8-row blocks of queries that a simdgroup of attention_prefill computes, by the maximum dimensions of a head
// and the bytes of a cached element. Limited by registers: per block, output and query take dims / 8 * 2
// floats and as many cached elements.
#define PREFILL_ROW_BLOCKS(dims, element_bytes) ((dims) * (element_bytes) <= 256 ? 2 : 1)

// Threadgroups of attention_prefill that share the values of a head: 256 output values take 64 registers of a
// lane. Each threadgroup computes all scores.
#define PREFILL_VALUE_PARTS(dims) ((dims) <= 256 ? 1 : 2)

// Whether the queries of attention_prefill are staged in threadgroup memory: if output (two registers of a
// lane per 8x8 block) and queries (two cached elements) would take more than 64 of a lane's 128 registers.
#define PREFILL_STAGES_QUERY(dims, element_bytes) \
  (PREFILL_ROW_BLOCKS(dims, element_bytes) * ((dims) / 8) * (2 + (element_bytes) / 2) > 64)

// Whether attention_prefill loads all keys of a step before it multiplies the first, and then all values: if
// output, queries in registers and four block rows of keys take at most 96 of the 128 registers.
#define PREFILL_LOADS_AHEAD(dims, element_bytes)                                          \
  ((dims) / 8 *                                                                           \
       (PREFILL_ROW_BLOCKS(dims, element_bytes) *                                         \
            (2 + (PREFILL_STAGES_QUERY(dims, element_bytes) ? 0 : (element_bytes) / 2)) + \
        PREFILL_KEYS / 8 * (element_bytes) / 2) <=                                        \
   96)

// Bytes of a query in threadgroup memory: 16 of padding, so that eight rows of a block are in distinct banks.
#define PREFILL_QUERY_BYTES(dims, element_bytes) ((dims) * (element_bytes) + 16)

// Floats of threadgroup memory that a simdgroup uses to find its elements of blocks (block_rows.h).
#define BLOCK_PLACES 64

// Floats of threadgroup memory per simdgroup of attention_prefill: staged queries, or before that the places
// of elements.
#define PREFILL_SCRATCH(dims, element_bytes)                                                    \
  (PREFILL_STAGES_QUERY(dims, element_bytes)                                                    \
       ? PREFILL_ROW_BLOCKS(dims, element_bytes) * 2 * PREFILL_QUERY_BYTES(dims, element_bytes) \
       : BLOCK_PLACES)
