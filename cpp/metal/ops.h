// One function for each kernel: its inputs and outputs, and, in the source file, its dispatch geometry.
#pragma once

#include "encoder.h"

namespace metal_prefill::metal {

// Weights of one dispatch: up to three matrices whose rows are stacked.
struct Projection {
  View weights;
  StackedWeights stack;
  TensorType type;
  int in_dim;
  int out_dim;     // rows of all matrices
  int column = 0;  // of the output where its rows begin
};

// The weights of an RMSNorm over rows of `dim` values.
struct Norm {
  View weight;
  int dim;
  float eps;
};

// Inputs of rope other than q, k and v. For one that the model does not have, any buffer will do.
struct RopeInputs {
  View bias, q_norm, k_norm, table;
};

// Output of attention_decode: with one split `partial` is not used.
struct AttentionOutput {
  View partial, out;
};

// Rows of float32 that begin `stride` elements apart.
struct StridedRows {
  View view;
  int stride;
};

enum class Precision { kF32, kF16 };       // of a step's output
enum class Write { kStore, kAccumulate };  // y = w x, or y += w x

namespace ops {

void embed(Encoder& e, const Projection& table, const View& ids, const View& x, int tokens, float scale);

void rmsnorm(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens, Precision precision);
void rmsnorm_add(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens);

// Products with the weights. x is float32, except for matmul: float16.
void matvec(Encoder& e, const Projection& w, const View& x, const View& y, Write write);
void matvec_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, u32_t activation);
void rmsnorm_matvec(Encoder& e, const Projection& w, const Norm& norm, const View& x, const View& y);
void silu_matvec_q4_0_accumulate(Encoder& e, const Projection& w, const View& gate_up, const View& y,
                                 u32_t activation);
void multi_token_matvec_q4_0(Encoder& e, const Projection& w, const View& x, const StridedRows& y, int tokens,
                             Write write);
void matmul(Encoder& e, const Projection& w, const View& x, const StridedRows& y, int tokens, Write write);
void matmul_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation);

void rope_append(Encoder& e, const RopeInputs& inputs, const View& qkv, const LayerCache& cache,
                 const RopeArgs& args, int tokens);

// Threadgroups that share the keys of a head in attention_decode, and the bytes that they exchange.
struct DecodeSplits {
  int count;
  int keys;  // of each
};
DecodeSplits decode_splits(const Tuning& tuning, int tokens, int position);
std::size_t decode_partial_bytes(const AttentionArgs& args);
// `args` says how the keys are split.
void attention_decode(Encoder& e, const View& q, const LayerCache& cache, const AttentionOutput& output,
                      const AttentionArgs& args);
// rope_append and attention_decode of one token.
void rope_attention_decode(Encoder& e, const RopeInputs& inputs, const View& qkv, const LayerCache& cache,
                           const AttentionOutput& output, const RopeAttentionArgs& args);
void attention_prefill(Encoder& e, const View& q, const LayerCache& cache, const View& out,
                       const AttentionArgs& args);

void swiglu(Encoder& e, const View& gate_up, const View& out, int ffn_dim, int tokens, u32_t activation,
            Precision precision);

// Both stages; `candidates` holds candidates_bytes.
std::size_t candidates_bytes(const Tuning& tuning);
void argmax(Encoder& e, const View& logits, const View& candidates, const View& result, int n);
void log_prob(Encoder& e, const View& logits, const View& targets, const View& out, int vocab_size,
              int tokens);

}  // namespace ops
}  // namespace metal_prefill::metal
