// Arguments of every kernel, shared by the host and the shaders.
//
// Bindings of a kernel come in the order weights, inputs, outputs, and last one struct of this file. Strides
// count elements, offsets count bytes. A matrix is row-major: [rows][columns].
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
#define ACTIVATION_GELU 1  // the tanh approximation

// Pairs that rope rotates: (2i, 2i + 1), or (i, i + rope_dim / 2).
#define ROPE_INTERLEAVED 0
#define ROPE_NEOX 1

#define MULTI_TOKEN_TILE 8       // tokens that share a dequantized weight in multi_token_matvec_q4_0
#define MULTI_TOKEN_ROWS 8       // rows of a threadgroup there, one for each simdgroup
#define MATMUL_THREADS 128       // four simdgroups, 2 x 2 over the tile
#define MATMUL_K 32              // columns that a matmul stages at a time
#define DECODE_SIMDGROUPS 8      // most simdgroups of an attention_decode threadgroup
#define PREFILL_KEYS 32          // keys of one step of attention_prefill
#define ARGMAX_NONE 0xffffffffu  // index of "no number at all"

// Query heads that one threadgroup of attention_decode takes together, so that they share the reads of K and
// V. Bounded by registers: a lane holds 8 * chunks values of query and output for each.
#define DECODE_HEADS(chunks) ((chunks) <= 2 ? 4 : (chunks) <= 4 ? 2 : 1)

// 8-row blocks of queries that a simdgroup of attention_prefill owns, by the most dimensions of a head and
// the bytes of a cached element. Bounded by registers: output and query take dims / 8 * 2 floats and as many
// cached elements for each.
#define PREFILL_ROW_BLOCKS(dims, element_bytes) ((dims) * (element_bytes) <= 256 ? 2 : 1)

// Floats of threadgroup memory that one simdgroup of attention_prefill needs: scores [rows][PREFILL_KEYS],
// one diagonal 8x8 matrix for each 8 rows, and an 8x8 block of V at the end of the cache.
#define PREFILL_SCRATCH(row_blocks) ((row_blocks) * (8 * PREFILL_KEYS + 64) + 64)

// Up to three matrices of the same type and columns, read as if their rows were stacked: Q, K and V, or gate
// and up.
struct StackedWeights {
  u64_t offset[3];  // from the binding to each matrix
  u32_t rows[3];    // 0 for an absent matrix
  u32_t row_bytes;
};
static_assert(sizeof(StackedWeights) == 40, "StackedWeights");

// x[t] = scale * table[ids[t]]
struct EmbedArgs {
  u32_t dim;
  u32_t row_bytes;  // of the table
  u32_t tokens;
  float scale;
};
static_assert(sizeof(EmbedArgs) == 16, "EmbedArgs");

// y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight
struct RmsnormArgs {
  u32_t dim;
  float eps;
};
static_assert(sizeof(RmsnormArgs) == 8, "RmsnormArgs");

// y[row] (+)= w[row] . x
struct MatvecArgs {
  StackedWeights weights;
  u32_t in_dim;
  u32_t out_dim;        // rows of all stacked matrices; of one of the two for SwiGLU
  u32_t lanes_per_row;  // 8, 16 or 32 lanes share a row
  u32_t accumulate;     // add to y instead of storing
  u32_t activation;     // SwiGLU only
  float eps;            // with RMSNorm only
};
static_assert(sizeof(MatvecArgs) == 64, "MatvecArgs");

// y[t][row] (+)= w[row] . x[t]
struct MultiTokenArgs {
  StackedWeights weights;
  u32_t in_dim;
  u32_t out_dim;
  u32_t batch_size;
  u32_t out_stride;  // from one token of y to the next
};
static_assert(sizeof(MultiTokenArgs) == 56, "MultiTokenArgs");

struct MatmulArgs {
  StackedWeights weights;
  u32_t in_dim;
  u32_t out_dim;  // rows of all stacked matrices; of one of the two for SwiGLU
  u32_t tokens;
  u32_t out_stride;
  u32_t accumulate;
  u32_t activation;  // SwiGLU only
};
static_assert(sizeof(MatmulArgs) == 64, "MatmulArgs");

// Rotates q in place and appends K and V to the cache. A row of qkv is [n_heads * key_dim | n_kv_heads *
// key_dim | n_kv_heads * value_dim].
struct RopeArgs {
  u32_t n_heads;
  u32_t n_kv_heads;
  u32_t key_dim;
  u32_t value_dim;
  u32_t rope_dim;    // 0: no rotation
  u32_t style;       // ROPE_INTERLEAVED or ROPE_NEOX
  u32_t position;    // of the first token
  u32_t has_bias;    // biases of q, k and v are bound
  u32_t has_q_norm;  // RMSNorm of each head before the rotation
  u32_t has_k_norm;
  float eps;
  u32_t skip_queries;  // only K and V are wanted
};
static_assert(sizeof(RopeArgs) == 48, "RopeArgs");

// softmax(scale * q . k) v over the keys at and before each token's position. K and V are
// [position][kv_head][dim].
struct AttentionArgs {
  u32_t n_heads;
  u32_t n_kv_heads;
  u32_t key_dim;
  u32_t value_dim;
  u32_t tokens;
  u32_t position;    // of the first token
  u32_t q_stride;    // from one token of q to the next
  u32_t window;      // positions that a token sees, itself among them; 0: all
  u32_t splits;      // attention_decode: threadgroups that share the keys; 1: no combining pass
  u32_t split_keys;  // attention_decode: keys of each
  float scale;       // of q . k
};
static_assert(sizeof(AttentionArgs) == 44, "AttentionArgs");

// Both, of a single token.
struct RopeAttentionArgs {
  RopeArgs rope;
  AttentionArgs attention;
};
static_assert(sizeof(RopeAttentionArgs) == 92, "RopeAttentionArgs");

// out[t][i] = activation(gate[t][i]) * up[t][i]; a row of the input is [gate | up]
struct SwigluArgs {
  u32_t ffn_dim;
  u32_t tokens;
  u32_t activation;
};
static_assert(sizeof(SwigluArgs) == 12, "SwigluArgs");

struct ArgmaxArgs {
  u32_t n;  // values of the first stage, candidates of the second
};
static_assert(sizeof(ArgmaxArgs) == 4, "ArgmaxArgs");

// What the argmax kernels exchange and return.
struct Candidate {
  float value;
  u32_t index;  // ARGMAX_NONE: there was no number
};
static_assert(sizeof(Candidate) == 8, "Candidate");

// log_probs[t] = logits[t][target[t]] - log(sum(exp(logits[t])))
struct LogProbArgs {
  u32_t vocab_size;
};
static_assert(sizeof(LogProbArgs) == 4, "LogProbArgs");
