// One function for each kernel: its inputs and outputs, and, in the source files, its dispatch geometry.
#pragma once

#include <optional>

#include "encoder.h"

namespace metal_prefill::metal {

// Weights of one dispatch: up to three matrices whose rows are stacked.
struct Projection {
  View weights;
  StackedWeights stack;
  TensorType type;
  int in_dim;
  int out_dim;     // rows of all matrices
  int column = 0;  // first column in the output
};

// Location of token ids.
struct TokenIds {
  View view;
  u32_t stride = 1;
};
// Ids in the Candidates that argmax writes.
inline TokenIds ids_of(const View& candidates) {
  return {candidates.at(offsetof(Candidate, index)), sizeof(Candidate) / sizeof(u32_t)};
}

inline TokenIds positions_of(const View& rows) {
  return {rows.at(offsetof(PassRow, position)), sizeof(PassRow) / sizeof(u32_t)};
}

// A norm of rows of `dim` values; without a weight, it leaves rows unchanged.
struct Norm {
  View weight;
  View bias;  // null if there is none
  int dim;
  int width;  // values without padding, for LayerNorm; RMSNorm has the ratio in its weights
  float eps;
  NormKind kind = NormKind::kRms;
};

// Inputs of rope other than q, k and v. Those that the model lacks may be any buffer.
struct RopeInputs {
  View bias, q_norm, k_norm, table;
};

// Output of attention_decode; `partial` is not used with a single split.
struct AttentionOutput {
  View partial, out;
};

// Some rows of a pass, with the tables by which kernels find the sequence of each row.
struct Sequences {
  const PassPart& part;
  View rows, tiles;                           // of these rows
  std::span<const AttentionTile> tile_table;  // host copy of `tiles`
  View pages;                                 // of the pass
};

// Rows of float32 that start `stride` elements apart.
struct StridedRows {
  View view;
  int stride;
};

enum class Write { kStore, kAccumulate };  // y = w x, or y += w x

namespace ops {

void embed(Encoder& e, const Projection& table, const TokenIds& ids, const View& x, int tokens, float scale,
           Write write);

void norm(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens, Precision precision);
// x = norm(x + addend), a LayerNorm; `copy` receives x in half precision.
void layernorm_stream(Encoder& e, const Norm& norm, const View& addend, const View& x, const View& copy,
                      int tokens);
void add_bias(Encoder& e, const View& bias, const View& x, int dim, int tokens);
// x = second(x + first(x + y + addend)), both LayerNorms; `copy` receives x in half precision. Overwrites y.
void layernorm_twice(Encoder& e, const Norm& first, const View& addend, const Norm& second, const View& y,
                     const View& x, const View& copy, int tokens);
// Normalizes rows in place, plus `addend` if it is given, which only LayerNorm supports.
void norm_in_place(Encoder& e, const Norm& norm, const View& addend, const StridedRows& rows, int tokens);
// y = (y + norm(x)) * scale; without a scale the factor is 1.
void rmsnorm_add(Encoder& e, const Norm& norm, const View& scale, const View& x, const View& y, int tokens);
// y += norm(x), then normed = next(y); bit-identical to separate steps.
void rmsnorm_add_norm(Encoder& e, const Norm& norm, const Norm& next, const View& x, const View& y,
                      const View& normed, int tokens, Precision precision);

// Products with the weights. x is float32, but float16 for matmul. Results of matvec are bit-identical for
// any number of tokens.
void matvec(Encoder& e, const Projection& w, const View& x, const StridedRows& y, int tokens, Write write);
void matvec_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation);
// Products of one token and its norm; bit-identical to norm and matvec.
void rmsnorm_matvec(Encoder& e, const Projection& w, const Norm& norm, const View& x, const StridedRows& y);
void rmsnorm_matvec_swiglu(Encoder& e, const Projection& w, const Norm& norm, const View& x, const View& y,
                           u32_t activation);
// Maximum tokens for which a matmul may split its columns, and maximum tokens that affect the choice of
// tiles: for more, rounding up to whole tiles matters little.
inline constexpr int kMostSplitTokens = 64, kMostTiledTokens = 1024;
void matmul(Encoder& e, const Projection& w, const View& x, const StridedRows& y, int tokens, Write write);
void matmul_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation);

// Routes of rows: experts in order of rows, and rows in order of experts.
struct Routes {
  View routes, rows, tiles;
  int experts, used;  // of the model, and per row

  // Maximum tiles of the routes of this many rows.
  std::size_t most_tiles(int tokens) const;
};
// The router of a layer. `bias` is added to scores for the choice only, `offset` to products; null: none.
struct Router {
  Projection w;
  View bias, offset;
};
// Matrices of all experts of a layer, one stack or gate and up, and the biases of their rows; null: none.
struct ExpertWeights {
  Projection w;
  View bias;

  int matrices() const { return w.stack.rows[1] > 0 ? 2 : 1; }
};
// Without a norm the router reads x itself.
void choose_experts(Encoder& e, const Router& router, const Norm& norm, const View& x, const Routes& routes,
                    int tokens, bool sigmoid, bool normalize, float scale);
// Sorts routes by expert, for matmul_experts.
void sort_routes(Encoder& e, const Routes& routes, int tokens);
// Products of each route with the weights of its expert. With an activation, `x` has rows of tokens, and gate
// and up, or up alone, are activated; otherwise `x` has rows of routes. Results of matvec are bit-identical
// for any number of tokens.
void matvec_experts(Encoder& e, const ExpertWeights& experts, const View& x, const Routes& routes,
                    const View& y, int tokens, std::optional<u32_t> activation = {});
void matmul_experts(Encoder& e, const ExpertWeights& experts, const View& x, const Routes& routes,
                    const View& y, int tokens, std::optional<u32_t> activation = {});
// x += the sum of the results y of each row's experts.
void add_experts(Encoder& e, const Routes& routes, const View& y, const View& x, int dim, int tokens);

void rope_append(Encoder& e, const RopeInputs& inputs, const View& qkv, const Sequences& sequences,
                 const LayerCache& cache, const RopeArgs& args);

// Bytes of the partial results of attention_decode if threadgroups share the keys of a head.
std::size_t decode_partial_bytes(const AttentionArgs& args, int tokens);
// Uses the number of splits, or of tiles, in `sequences` rather than in `args`.
void attention_decode(Encoder& e, const View& q, const Sequences& sequences, const LayerCache& cache,
                      const AttentionOutput& output, AttentionArgs args);
// rope_append and attention_decode of sequences with one token each.
void rope_attention_decode(Encoder& e, const RopeInputs& inputs, const View& qkv, const Sequences& sequences,
                           const LayerCache& cache, const AttentionOutput& output, RopeAttentionArgs args);
// Splits dispatches that have more work than a command buffer should (see Tuning). `additions` is a position
// bias or the result of relative_scores. Unused `additions` and `sinks` may be any buffer.
void attention_prefill(Encoder& e, const View& q, const Sequences& sequences, const LayerCache& cache,
                       const View& additions, const View& sinks, const View& out, AttentionArgs args);
// Keys and queries of relative positions, and the row of each distance.
struct RelativePositions {
  View keys, queries, row_of;
};
// Computes the contribution of relative positions to the scores of the rows of tiles.
void relative_scores(Encoder& e, const RelativePositions& positions, const View& q,
                     const Sequences& sequences, const LayerCache& cache, const View& out,
                     const RelativeScoresArgs& args);
// Shape of the tiles of attention_prefill, or of attention_tensor if the GPU has matrix units and the kernel
// suits the heads.
TileShape tile_shape(const Tuning& tuning, KvType cache, const AttentionArgs& args);

// Input of swiglu: the projections of gate and up.
struct GateUp {
  View bias;  // null if there is none
  View rows;
  int ffn_dim;
  bool gated;
  u32_t activation;
};
void swiglu(Encoder& e, const GateUp& gate_up, const View& out, int tokens, Precision precision);

// x = (norm(x) + added) / sqrt(2), for the inputs of `layers` of each token. `filled` is the fraction of
// norm.dim that is not padding.
void layer_inputs(Encoder& e, const Norm& norm, float filled, const View& added, const View& x, int layers,
                  int tokens);
// out = activation(gate) * input, `dim` values per token.
void gate_input(Encoder& e, const View& gate, const StridedRows& input, const View& out, int dim, int tokens,
                u32_t activation, Precision precision);

// A convolution and the states of its layer. If there is no bias, it may be any buffer.
struct ConvInputs {
  View filter, bias, rows, states;
};
// Convolves the rows of the pass from args.first_out on, which become the first rows of `out`, and writes the
// states of all rows with a slot for one.
void causal_conv(Encoder& e, const ConvInputs& inputs, const View& in, const View& out,
                 const CausalConvArgs& args, Precision precision, std::span<const RowRun> runs);

// rope_append, and causal_conv to float32, for rows of `projected`, which have columns of both.
void rope_append_conv(Encoder& e, const RopeInputs& rope, const ConvInputs& conv, const View& projected,
                      const Sequences& sequences, const LayerCache& cache, const View& out,
                      RopeConvArgs args);

// Weights of a state-space layer other than its projections; `norm` is null if there is none.
struct ScanWeights {
  View a, bias, skip, norm;
};
// Maximum rows of the state of a head.
inline constexpr int kMostScanRows = 256;
// Scans the tokens of each of `sequences` and writes the states of all rows with a slot for one. `states` are
// the matrices of the layer. Rows from args.first_out on become the first rows of `out`.
void scan(Encoder& e, const ScanWeights& w, const View& projected, const View& convolved, const View& rows,
          const View& states, const View& out, const ScanArgs& args, int sequences, Precision precision,
          std::span<const RowRun> runs);
// Gates and normalizes the result of a scan.
void scan_norm(Encoder& e, const ScanWeights& w, const View& gates, const View& y, const View& out,
               const ScanNormArgs& args, int tokens, Precision precision);
// Parameters of a gated delta rule, and the norm of the heads of its output.
struct GatedDeltaWeights {
  View decay, step;
  Norm norm;
};
// Scans the tokens of each of `sequences` and writes the states of all rows with a slot for one. `states` are
// the matrices of the layer.
void gated_delta(Encoder& e, const GatedDeltaWeights& w, const View& qkv, const View& rates, const View& rows,
                 const View& states, const View& out, const GatedDeltaArgs& args, int sequences,
                 std::span<const RowRun> runs);
// Normalizes each head and multiplies it by its gate.
void gated_norm(Encoder& e, const Norm& norm, const View& x, const StridedRows& gate, const View& y,
                int heads, int tokens, Precision precision);
// Multiplies the output of attention by the gates stored after the queries.
void gate_heads(Encoder& e, const View& q, const View& y, const GateHeadsArgs& args, Precision precision);

// x = cap * tanh(x / cap) for `n` values.
void soft_cap(Encoder& e, const View& x, std::size_t n, float cap);

// Both stages of argmax, for each row of `n` logits; `candidates` has candidates_bytes.
std::size_t candidates_bytes(const Tuning& tuning, int rows);
void argmax(Encoder& e, const View& logits, const View& candidates, const View& result, int n, int rows);
void log_prob(Encoder& e, const View& logits, const View& targets, const View& out, int vocab_size,
              int tokens);

}  // namespace ops
}  // namespace metal_prefill::metal
