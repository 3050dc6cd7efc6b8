// Steps of the forward pass, each spread over the team: how the work of a step is cut into items is decided
// here.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "kernels.h"
#include "kv_cache.h"
#include "threads.h"
#include "weights.h"

namespace metal_prefill::cpu {

// One activation per token, in the forms that its readers need.
struct Activations {
  Forms forms;
  FloatRows f32;
  Int8Rows int8;
};

struct Best {
  float value = 0;
  int index = -1;  // -1: nothing but NaN was seen
};

// What a thread needs to itself.
struct alignas(128) Scratch {
  Buffer weights;  // kGroupRows rows in float32
  Best best;
};

struct Context {
  Worker& worker;
  const Kernels& kernels;
  Scratch& scratch;
};

// One matrix of a step: out[t] = weight * x[t] (+ bias), or += with `add`, for tokens from `first` on.
struct Product {
  const Linear& weight;
  float* out;
  std::size_t stride;  // of out, in floats
  const Tensor* bias = nullptr;
  bool add = false;
  int first = 0;
};

void multiply(const Context& c, std::initializer_list<Product> products, const Activations& x, int tokens);
// h = activation(gate * x) * (up * x), in the forms that h asks for. Tokens [first, tokens).
void multiply_gated(const Context& c, const Linear& gate, const Linear& up, Activation activation,
                    const Activations& x, int first, int tokens, const Activations& h);
// Logits of rows [0, tokens) of x, and the best of row 0 in the scratch of each thread.
void multiply_head(const Context& c, const Linear& head, const Activations& x, int tokens, float* logits);
Best best_of(std::span<const Scratch> scratch);

// out = norm(x) in the forms that `out` asks for. Rows [first, tokens) of x become rows [first - shift, ...)
// of out.
void normalize(const Context& c, const FloatRows& x, const Tensor& weight, float eps, int first, int tokens,
               const Activations& out, int shift = 0);
// x += norm(y).
void add_normalized(const Context& c, const FloatRows& y, const Tensor& weight, float eps, int first,
                    int tokens, const FloatRows& x);
// Fills the 8-bit form from the float32 one.
void quantize(const Context& c, const Activations& a, int first, int tokens);

// Rotation of every pair for each token of a chunk: [tokens][rope_dim] cosines, then sines.
void rope_table(const Context& c, std::span<const float> frequencies, float magnitude, int position,
                int tokens, float* table);

struct AttentionInput {
  const Config& config;
  const LayerWeights& weights;
  int layer;
  int position;           // of token 0
  int first, tokens;      // keys and values of all tokens are stored; queries of [first, tokens) are answered
  bool exact;             // products of attention in float32
  const float* rotation;  // from rope_table; null where the layer does not rotate
  FloatRows q, k, v;
};
// Norms and rotates q and k in place, and stores k and v in the cache.
void append_to_cache(const Context& c, const AttentionInput& in, const KvCache& cache);
void attend(const Context& c, const AttentionInput& in, const KvCache& cache, const FloatRows& out);

}  // namespace metal_prefill::cpu
