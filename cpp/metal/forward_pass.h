// The forward pass over a chunk of tokens: which kernels run, in which order, on which buffers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kv_cache.h"
#include "ops.h"

namespace metal_prefill::metal {

// Which kernels multiply by the weights, by the number of tokens.
enum class Path {
  kOneToken,    // matvec, activations in float32
  kFewTokens,   // multi_token_matvec_q4_0, activations in float32
  kManyTokens,  // matmul, activations in half precision where it reads them
};

// A model, laid out for the kernels: see fits_kernels.
class ForwardPass {
 public:
  ForwardPass(const Device& device, const Model& model, const EngineOptions& options);

  // Every kernel that a chunk of this model can need.
  std::set<KernelKey> kernels() const;
  const CacheShape& cache_shape() const { return cache_shape_; }
  const WeightBuffers& weights() const { return weights_; }

  // Encodes the chunk. The ids are in batch's kIds buffer, the targets in kTargets; the results appear in
  // kResult, kHostLogits or kLogProbs. `rope_tables` are those of the layers.
  void encode(Encoder& e, const Chunk& chunk, Batch& batch, const KvCache& cache,
              const std::vector<id<MTLBuffer>>& rope_tables, CallCounters& counters) const;

  // A buffer as the chunk left it, when debugging: float32, or half precision.
  struct Intermediate {
    Name name;
    std::size_t elements;
    bool half;
  };
  std::vector<Intermediate> intermediates(const Chunk& chunk) const;

 private:
  struct Layer {
    View attn_norm, ffn_norm;
    View post_attn_norm, post_ffn_norm;  // null: the block's output joins the residual stream as it is
    View bias, q_norm, k_norm;           // null: the model has none
    std::vector<Projection> qkv;         // merged as far as the weights allow
    std::vector<Projection> gate_up;     // one, merged, or two
    Projection wo, w_down;
  };
  // The tokens of a chunk that a step works on.
  struct Rows {
    std::size_t first;
    int count;
    Path path;
    bool half() const { return path == Path::kManyTokens; }
  };
  // The chunk's buffers.
  struct Activations {
    View x, normed, qkv, partial, att, block, gate_up, ffn;
  };

  Layer layer_of(const LayerWeights& weights);
  Projection projection(const Tensor& tensor) const;
  std::vector<Projection> merge(std::vector<const Tensor*> tensors) const;
  Path path_of(int tokens) const;
  Rows wanted_rows(const Chunk& chunk) const;
  Activations activations(const Chunk& chunk, Batch& batch, CallCounters& counters) const;
  bool fuses_norm(const std::vector<Projection>& projections) const;
  bool fuses_silu(const Layer& w) const;
  // Whether gate and up are computed before SwiGLU, not together with it.
  bool gate_up_apart(const Layer& w, Path path) const;
  AttentionArgs attention_args(int layer, int position, int tokens) const;

  void encode_layer(Encoder& e, int layer, const Activations& a, const KvCache& cache, const View& rope_table,
                    const Chunk& chunk, const Rows& all, const Rows& wanted) const;
  void normed_projections(Encoder& e, const View& norm, const std::vector<Projection>& projections,
                          const View& x, const View& normed, const View& y, int out_stride,
                          const Rows& rows) const;
  void project(Encoder& e, const Projection& w, const View& x, const View& y, int out_stride,
               const Rows& rows, bool accumulate) const;
  void add_block(Encoder& e, const Projection& w, const View& x, const View& post_norm, const View& block,
                 const View& residual, const Rows& rows) const;
  void feed_forward(Encoder& e, const Layer& w, const Activations& a, const View& x, const Rows& rows) const;
  void head(Encoder& e, const View& x, const Activations& a, const View& logits) const;
  void score(Encoder& e, const Chunk& chunk, Batch& batch, const Activations& a,
             CallCounters& counters) const;

  const Config& config_;
  const Tuning& tuning_;
  const EngineOptions& options_;
  const int few_tokens_;  // most tokens of Path::kFewTokens; 1: there is no such path
  CacheShape cache_shape_;
  WeightBuffers weights_;
  Projection embedding_, output_;
  View output_norm_;
  std::vector<Layer> layers_;
  int qkv_dim_, att_dim_;
  u32_t activation_;
};

}  // namespace metal_prefill::metal
