// The forward pass over rows of sequences: the order of kernels and their buffers.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ops.h"
#include "page_layout.h"

namespace metal_prefill::metal {

// The views of a model's weights.
class WeightViews {
 public:
  virtual ~WeightViews() = default;
  virtual View view(const Tensor& tensor) const = 0;
  // Creates a buffer of concatenated vectors as float32, all multiplied by `factor`; an absent one counts as
  // `n` zeros.
  virtual View concatenate(BufferName name, std::span<const std::pair<const Tensor*, int>> vectors,
                           float factor) = 0;
};

class PassBuffers {
 public:
  virtual ~PassBuffers() = default;
  // A buffer of activations, at least `bytes` long. Its contents are lost when it grows.
  virtual View get(BufferName name, std::size_t bytes) = 0;
  virtual LayerCache cache(int layer) = 0;
  virtual View rope_table(int layer) = 0;
  // The states of a recurrent layer, from its offset in the first slot on.
  virtual View states(int layer) = 0;
  // Candidates of an earlier pass, used as tokens of this one. Null if the host writes the tokens.
  virtual View choices() { return {}; }
};

// Maximum threads of a threadgroup of a kernel.
using ThreadLimit = std::function<std::size_t(const KernelKey&)>;

// Selects the kernels of products with the weights.
enum class Path {
  kFewTokens,   // matvec, activations in float32; the results of a token do not depend on the others
  kManyTokens,  // matmul, whose input activations are float16
};

// Tables that the host writes for a pass; null if the list is empty.
struct PassTables {
  View ids;         // [rows] int32
  View types;       // [rows] int32, if the model has types of tokens
  View rows;        // as PassRows::rows
  View tiles;       // as PassRows::tiles
  View pages;       // block tables of the chunks, int32
  View states;      // as PassRows::states
  View targets;     // [rows with scored targets] int32
  View layer_rows;  // [rows][n_layers][per_layer_dim] f32, if layers have inputs
};

// Maximum rows whose logits are on the GPU at the same time, unless the host reads them.
inline constexpr int kHeadRows = 64;

// Plans passes of a model whose dimensions suit the kernels (see fits_kernels). The model must outlive it.
class ForwardPass {
 public:
  ForwardPass(const Tuning& tuning, const Model& model, const EngineOptions& options, WeightViews& weights);

  // The rows of a pass over these chunks. Results of chunks with few tokens are bit-identical to those of the
  // chunk alone if no chunk of the pass has more tokens.
  PassRows rows_of(std::span<const PassChunk> chunks) const;
  // Allocates the tables of the pass, which the host then writes.
  PassTables tables(const PassRows& rows, PassBuffers& buffers) const;
  // Encodes the dispatches of the pass. The results are in kResult, kHostLogits, kLogProbs and kHidden, in
  // the order of the rows with outputs.
  void encode(Encoder& e, const PassRows& rows, PassBuffers& buffers) const;

  // Returns every kernel that a pass can need, with the threads of its largest threadgroup, within `limit`.
  KernelThreads kernels(const ThreadLimit& limit = {}) const;
  const Tuning& tuning() const { return tuning_; }
  KvType cache_type() const { return options_.kv_type; }
  const PageLayout& page_layout() const { return page_layout_; }
  const StateLayout& state_layout() const { return state_layout_; }
  // Maximum rows of one pass; see Engine::pass_rows.
  int pass_rows() const { return config_.causal ? options_.chunk_tokens : config_.context_length; }

 private:
  // Last steps of a block.
  struct BlockOutput {
    Projection w;
    View bias;           // null if there is none
    Norm norm;           // of the block's output; no weight: none
    Norm residual_norm;  // of the residual stream after the addition; no weight: none
    Norm second_norm{};  // after residual_norm, of its result plus the layer's input; no weight: none
    View scale{};        // of the stream after the block, in models with `norm`; null: none
    // Norm before the layer's next products, in models with `norm`: see leaves_normed.
    std::optional<Norm> next{};
  };
  struct Dense {
    std::vector<Projection> gate_up;  // one, merged, or two; without a gate only up; empty: no feed-forward
    bool gated = false;
    View bias{};  // of gate and up; null: none
    BlockOutput output{};
    int dim = 0;  // inner width

    // Whether gate and up are computed in separate dispatches, before SwiGLU.
    bool separate() const { return !gate_up.empty() && (gate_up.size() > 1 || !gated || bias); }
  };
  struct Layer {
    Norm attn_norm, ffn_norm;              // no weight: the block reads the residual stream
    Norm q_norm, k_norm;                   // of a head, or of all heads together
    View q_bias, k_bias;                   // added before q_norm and k_norm; null: they are in `bias`
    View bias;                             // of q, k and v; null: the model has none
    std::vector<Projection> in;            // rows of ProjectedRow, merged as far as the weights allow
    View relative_keys, relative_queries;  // of relative positions; null: none
    View sinks;                            // of heads; null: none
    View conv, conv_bias;                  // filter and bias of its convolution; null: none
    ops::ScanWeights scan;                 // of a state-space layer
    ops::GatedDeltaWeights gated_delta;    // of a layer with the rule
    Dense dense;                           // the feed-forward, or the expert for all rows
    ops::Router router;
    ops::ExpertWeights experts_up, experts_down;  // of gate and up, or of up alone
    BlockOutput experts_output;                   // without weights, which are experts_down
    BlockOutput attn_output;                      // also of a short convolution
    BlockOutput scan_output;                      // of a layer whose state has matrices
    std::optional<Projection> input_gate;         // of its input from the token itself, if it has one
    BlockOutput input_output;
  };
  // The rows of a pass that a step works on.
  struct Rows {
    int first;
    int count;
    Path path;
    Precision precision() const { return path == Path::kManyTokens ? Precision::kF16 : Precision::kF32; }
    Rows in_float32() const { return {first, count, Path::kFewTokens}; }
  };
  // Rows that pass through a layer, and their sequences.
  struct Part {
    Rows rows;
    const PassPart& part;
  };
  struct Activations {
    View x, embedded, normed, projected, relative, partial, att, block, gate_up, ffn, conv, convolved,
        scanned, scan_out, inputs, logits;
    ops::Routes routes;
    View expert_ffn, expert_out;
  };
  // A row of the layer's first projections.
  struct ProjectedRow {
    int stride;          // between rows
    int qkv, recurrent;  // first columns of q, and of Config::recurrent_in_dim()
    int conv;            // first column of the input of the convolution
  };
  // A pass in progress.
  struct Pass {
    Encoder& e;
    const PassRows& rows;
    PassBuffers& buffers;
    PassTables tables;
    Part all;
    Part wanted;  // the rows with an output
    Activations a;
  };

  Norm norm_of(const Tensor& weight, const Tensor& bias, float eps, const WeightViews& weights) const;
  // A norm of the residual stream.
  Norm stream_norm(const Tensor& weight, const Tensor& bias, const WeightViews& weights) const;
  // Copies rows of the stream unchanged.
  Norm no_norm() const {
    return {.weight = {}, .bias = {}, .dim = config_.dim, .width = config_.dim, .eps = 0.0f};
  }
  Layer layer_of(int layer, const LayerWeights& w, WeightViews& weights) const;
  ProjectedRow projected_row(int layer) const;
  // Maximum columns of a layer's projections.
  int projected_columns() const;
  Rows all_rows(const PassRows& rows) const;
  Rows wanted_rows(const PassRows& rows) const;
  Activations activations(const PassRows& rows, PassBuffers& buffers) const;
  // Whether the norm is fused with the products after it.
  bool fuses_norm(const Norm& norm, const Rows& rows) const;
  RopeArgs rope_args(int layer, bool skip_queries) const;
  AttentionArgs attention_args(int layer) const;
  RelativeScoresArgs relative_args(const AttentionArgs& attention, const PassRows& rows) const;

  // The tables of rows for the kernels of a layer.
  Sequences sequences(const Pass& pass, const Part& part, int layer) const;

  // Encodes a layer, which begins with the rows `in` and continues with `wanted`.
  void encode_layer(Pass& pass, int layer, const Part& in, const Part& wanted) const;
  void embed(const Pass& pass) const;
  void project_embedding(const Pass& pass) const;
  void project_layer_inputs(const Pass& pass) const;
  void attention(Pass& pass, int layer, const Part& in, const Part& wanted) const;
  void short_convolution(Pass& pass, int layer, const Rows& wanted) const;
  void project_in(const Pass& pass, int layer, const Rows& rows) const;
  ops::ConvInputs conv_inputs(const Pass& pass, int layer) const;
  CausalConvArgs conv_args(const Pass& pass, int layer, const Rows& wanted) const;
  void convolve(const Pass& pass, int layer, const View& out, const Rows& wanted) const;
  // Whether the rotation of queries and keys is part of attention.
  static bool rotates_in_attention(const Pass& pass, const Part& in, const Part& wanted);
  void scan(Pass& pass, int layer, const Part& wanted) const;
  void gated_delta(Pass& pass, int layer, const Rows& wanted) const;
  // The states of a layer, from its matrices in the first slot on.
  View matrices(const Pass& pass, int layer) const;
  // Normalizes x into `normed` and returns the view of the result: x if there is no norm.
  View normalized(Encoder& e, const Norm& norm, const View& x, const View& normed, const Rows& rows) const;
  // Whether a block writes the input of the next products to `normed`, which saves a dispatch.
  bool leaves_normed(const BlockOutput& output, const Rows& rows) const;
  // The same as `normalized`, after a block.
  View normalized_after(const Pass& pass, const BlockOutput& output, const Norm& norm, const View& x,
                        const Rows& rows) const;
  // Normalizes all heads of q together, and all heads of k, for each token.
  void norm_rows_of_qk(const Pass& pass, int layer) const;
  // `input` is x itself if the norm is fused with the products.
  void normed_projections(Encoder& e, const Norm& norm, const std::vector<Projection>& projections,
                          const View& input, const StridedRows& y, const Rows& rows) const;
  void project(Encoder& e, const Projection& w, const View& x, const StridedRows& y, const Rows& rows,
               Write write) const;
  // Encodes the steps after the addition of a block's output: its bias and the norm of the stream.
  void end_block(const Pass& pass, const BlockOutput& output, const View& residual, const Rows& rows) const;
  // Adds a block's output to the residual stream.
  void add_residual(const Pass& pass, const BlockOutput& output, const View& x, const View& residual,
                    const Rows& rows) const;
  void feed_forward(const Pass& pass, int layer, const Rows& rows) const;
  void add_layer_input(const Pass& pass, int layer, const Rows& rows) const;
  // `input` is x if the norm is fused with the products.
  void dense(const Pass& pass, const Dense& w, const Norm& norm, const View& input, const View& x,
             const Rows& rows) const;
  // `input` is x after its norm.
  void experts(const Pass& pass, const Layer& w, const View& input, const View& x, const Rows& rows) const;
  void head(const Pass& pass, const Rows& rows, const View& logits) const;
  void score(const Pass& pass) const;
  void find_largest(const Pass& pass) const;
  void deliver_logits(const Pass& pass) const;
  void deliver_hidden(const Pass& pass) const;

  const Config& config_;
  const LayerConfigs layer_configs_;
  const Tuning tuning_;
  const EngineOptions options_;
  const PageLayout page_layout_;
  const StateLayout state_layout_;
  Projection embedding_;
  std::optional<Projection> position_embedding_, token_types_;
  View position_bias_, relative_row_of_;
  Norm embedding_norm_;
  std::optional<Projection> embedding_projection_;
  View embedding_projection_bias_;
  std::optional<Projection> inputs_projection_;  // to the inputs of layers
  Norm inputs_norm_;                             // of a layer's input
  float inputs_filled_ = 1.0f;                   // fraction of the inputs that is not padding
  std::vector<Projection> output_;               // one; none in an encoder
  View output_bias_;                             // null if there is none
  Norm output_norm_;
  Norm head_norm_;  // output_norm_ with the scale of the logits
  std::vector<Layer> layers_;
  int last_stored_ = -1;  // the last layer with its own keys, values or state
  std::vector<TileShape> tile_shapes_;
  std::vector<std::size_t> tile_shape_of_;  // of each layer, in tile_shapes_
  bool norms_stream_;                       // whether layernorm_stream leaves a copy in `normed` for products
  int att_dim_;                             // width of the widest layer
  u32_t activation_;
};

}  // namespace metal_prefill::metal
