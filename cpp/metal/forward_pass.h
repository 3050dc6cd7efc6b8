// The forward pass over a chunk of tokens: which kernels run, in which order, on which buffers.
#pragma once

#include <set>
#include <span>
#include <utility>
#include <vector>

#include "ops.h"

namespace metal_prefill::metal {

// The dispatches of a pass depend on this, and not on the ids of its tokens.
struct PassShape {
  int tokens;
  int position;  // of the first one
  Output output;
};

// Where a model's weights are.
class WeightViews {
 public:
  virtual ~WeightViews() = default;
  virtual View view(const Tensor& tensor) const = 0;
  // A new buffer with float32 vectors one after another; an absent one counts as `n` zeros.
  virtual View concatenate(BufferName name, std::span<const std::pair<const Tensor*, int>> vectors) = 0;
};

// The buffers of one pass.
class PassBuffers {
 public:
  virtual ~PassBuffers() = default;
  // A buffer of activations, at least `bytes` long. Its contents are lost when it grows.
  virtual View get(BufferName name, std::size_t bytes) = 0;
  virtual LayerCache cache(int layer) = 0;
  virtual View rope_table(int layer) = 0;
};

// The kernels that multiply by the weights; the number of tokens decides.
enum class Path {
  kOneToken,    // matvec, activations in float32
  kFewTokens,   // multi_token_matvec_q4_0, activations in float32
  kManyTokens,  // matmul, activations in half precision where it reads them
};

// A model whose dimensions suit the kernels (see fits_kernels). The model must outlive it.
class ForwardPass {
 public:
  ForwardPass(const Tuning& tuning, const Model& model, const EngineOptions& options, WeightViews& weights);

  // Sends the dispatches of the pass to `e`. The ids are in the buffer kIds, the targets in kTargets; the
  // results appear in kResult, kHostLogits or kLogProbs.
  void encode(Encoder& e, const PassShape& pass, PassBuffers& buffers) const;

  // Every kernel that a pass can need.
  std::set<KernelKey> kernels() const;
  const Tuning& tuning() const { return tuning_; }
  const CacheShape& cache_shape() const { return cache_shape_; }
  int chunk_tokens() const { return options_.chunk_tokens; }

  // A buffer as the pass left it, when debugging.
  struct Intermediate {
    BufferName name;
    std::size_t elements;
    Precision precision;
  };
  std::vector<Intermediate> intermediates(const PassShape& pass) const;

 private:
  struct Layer {
    Norm attn_norm, ffn_norm;
    Norm post_attn_norm, post_ffn_norm;  // no weight: the block's output joins the residual stream as it is
    View bias, q_norm, k_norm;           // null: the model has none
    std::vector<Projection> qkv;         // merged as far as the weights allow
    std::vector<Projection> gate_up;     // one, merged, or two
    Projection wo, w_down;
  };
  // The tokens of a pass that a step works on.
  struct Rows {
    std::size_t first;
    int count;
    Path path;
    Precision precision() const { return path == Path::kManyTokens ? Precision::kF16 : Precision::kF32; }
  };
  struct Activations {
    View x, normed, qkv, partial, att, block, gate_up, ffn;
  };
  // A pass in progress.
  struct Pass {
    Encoder& e;
    const PassShape& shape;
    PassBuffers& buffers;
    Rows all;
    Rows wanted;  // those whose output is asked for
    Activations a;
  };

  Layer layer_of(const LayerWeights& w, WeightViews& weights) const;
  Path path_of(int tokens) const;
  Rows wanted_rows(const PassShape& pass) const;
  Activations activations(const PassShape& pass, PassBuffers& buffers) const;
  bool fuses_norm(const std::vector<Projection>& projections) const;
  bool fuses_silu(const Layer& w) const;
  // True if gate and up are computed before SwiGLU, in dispatches of their own.
  bool gate_up_apart(const Layer& w, Path path) const;
  RopeArgs rope_args(int layer, const Pass& pass, const Rows& queries) const;
  AttentionArgs attention_args(int layer, int position, int tokens) const;

  void encode_layer(Pass& pass, int layer, const Rows& wanted) const;
  void normed_projections(Encoder& e, const Norm& norm, const std::vector<Projection>& projections,
                          const View& x, const View& normed, const StridedRows& y, const Rows& rows) const;
  void project(Encoder& e, const Projection& w, const View& x, const StridedRows& y, const Rows& rows,
               Write write) const;
  // Adds a block's output, w x, to the residual stream.
  void add_block(const Pass& pass, const Projection& w, const View& x, const Norm& post_norm,
                 const View& residual, const Rows& rows) const;
  void feed_forward(const Pass& pass, const Layer& w, const View& x, const Rows& rows) const;
  void head(const Pass& pass, const View& logits) const;
  void score(const Pass& pass) const;

  const Config& config_;
  const Tuning tuning_;
  const EngineOptions options_;
  const int few_tokens_;  // most tokens of Path::kFewTokens; 1: there is no such path
  const CacheShape cache_shape_;
  Projection embedding_;
  std::vector<Projection> output_;  // one
  Norm output_norm_;
  std::vector<Layer> layers_;
  int qkv_dim_, att_dim_;
  u32_t activation_;
};

}  // namespace metal_prefill::metal
