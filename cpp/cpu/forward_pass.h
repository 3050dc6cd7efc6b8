// The forward pass: the order of steps, and the rows of each.
//
// All threads of the team run the same pass; each step divides its work among them and ends with a barrier. A
// step is one call for all rows of the pass, layer by layer.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "../engine/engine.h"
#include "kv_pages.h"
#include "ops.h"
#include "state_slots.h"
#include "threads.h"
#include "weights.h"
#include "workspace.h"

namespace metal_prefill::cpu {

class ForwardPass {
 public:
  ForwardPass(const Model& model, const EngineOptions& options, const Kernels& kernels, const KvPages& cache,
              const StateSlots& states, Team& team);

  // Maximum rows that pass through the layers together. With more, weights are read less often, but a step's
  // output is no longer cached for the next step. The limit grows with the threads and their caches, and if
  // weights are widened, which takes as long as computing many rows. A text whose tokens attend to later ones
  // is not divided.
  int max_rows() const {
    const int threads = team_.size();
    if (!config_.causal) return std::max(config_.context_length, std::min(128 * threads, 2048));
    return std::clamp(64 * threads, weights_.widens ? 512 : 256, 1024);
  }

  // Appends the chunks' rows to their caches and delivers their outputs. One call at a time. Throws before
  // anything is written. Returns the number of multiply-adds in products and attention.
  double run(std::span<Chunk> chunks);

  std::size_t weight_bytes() const { return weights_.packed_bytes(); }
  std::span<const std::byte> packed_weights() const { return weights_.packed_here(); }
  bool weights_were_packed() const { return weights_.were_packed(); }
  std::size_t workspace_bytes() const { return work_.bytes(); }

 private:
  // The rows that a layer computes, and their tiles in attention.
  struct Rows {
    std::vector<Row> rows;
    std::vector<QueryTile> tiles;
    int count() const { return int(rows.size()); }
  };
  // A row of the last layer whose output is wanted, or the first row of a pooled text.
  struct Wanted {
    Chunk* chunk;
    int row;    // index among the chunk's rows with an output
    int index;  // index among the last layer's rows
  };

  // The projection with which a block ends, its bias, and the norm of the block's output.
  struct BlockOutput {
    const Linear& weight;
    const Tensor& bias;
    const Tensor& norm;
    Activations in;
    bool separate = false;  // left in Workspace::block, for norms that read it and the stream
  };

  Norm norm(const Tensor& weight, const Tensor& bias, float eps) const {
    return {weight, bias, config_.dim, eps, config_.norm_kind};
  }
  Norm stream_norm(const Tensor& weight, const Tensor& bias) const {
    return norm(weight, bias, config_.stream_eps());
  }

  void plan(std::span<Chunk> chunks);
  void run_layers(const Context& c);
  void embed(const Context& c);
  NormedRows attention_input(const Context& c, const LayerWeights& m, int rows);
  void run_layer(const Context& c, int layer, const Rows& all, const Rows& wanted);
  StreamRows stream(int layer, int first, int count, int first_ffn) const;
  BlockOutput mix(const Context& c, int layer, const Rows& all, const Rows& wanted);
  void finish_layer(const Context& c, int layer, const BlockOutput& mixed, const StreamRows& rows);
  int rows_at_once(const CpuLayer& w, const BlockOutput& mixed, int rows) const;
  BlockOutput attention(const Context& c, int layer, const Rows& all, const Rows& wanted);
  BlockOutput short_convolution(const Context& c, int layer, const Rows& wanted);
  ConvStep conv_step(int layer, const FloatRows& in) const;
  BlockOutput scan(const Context& c, int layer, const Rows& wanted);
  BlockOutput gated_delta(const Context& c, int layer, const Rows& wanted);
  AttentionStep attention_step(int layer) const;
  void project_qkv(const Context& c, const CpuLayer& w, const AttentionStep& step,
                   const AttentionItems& items, const Rows& all, const Rows& wanted);
  void add_residual(const Context& c, const BlockOutput& w, const StreamRows& rows);
  void normalize_attended(const Context& c, const LayerWeights& m, const StreamRows& rows);
  void normalize_stream(const Context& c, const Tensor& weight, const Tensor& bias, const StreamRows& rows);
  void feed_forward(const Context& c, int layer, const StreamRows& rows);
  NormedRows feed_forward_input(const Context& c, const LayerWeights& m, const StreamRows& rows);
  void add_layer_input(const Context& c, int layer, const StreamRows& rows);
  void experts(const Context& c, const CpuLayer& w, const LayerWeights& m, const StreamRows& rows);
  void head(const Context& c);
  void deliver_hidden(const Context& c);
  void use_logits(const Context& c, std::span<const Wanted> wanted);
  void deliver();

  const Model& model_;
  const Config& config_;
  const LayerConfigs layer_configs_;
  int last_stored_ = 0;            // the last layer with keys, values or a state of its own
  const std::vector<float> ones_;  // AttentionStep::ones
  const Kernels& kernels_;
  const KvPages& cache_;
  const StateSlots& states_;
  Team& team_;
  Weights weights_;
  std::vector<float> scaled_norm_;     // the output norm, times the scale of the logits
  Tensor head_norm_, head_norm_bias_;  // views of scaled_norm_
  const Ropes ropes_;
  const std::vector<float> slopes_;  // of ALiBi
  const std::vector<float> bias_;    // [n_heads][kBiasRow] of relative positions
  std::vector<float> lengths_;       // GatedDeltaStep::q_norm, then k_norm
  std::vector<Scratch> scratch_;

  // Data of the current pass. The next one reuses the memory.
  Workspace work_;
  std::vector<std::byte*> pages_;
  Rows all_, wanted_;                 // of every layer, and of the last one
  std::vector<RowRange> sequences_;   // of all rows
  std::vector<RowRange> key_blocks_;  // likewise
  std::vector<Wanted> outputs_;       // those of logits first, after them hidden states
  std::vector<float*> logits_;        // destination of each output's logits; null: only the largest is needed
};

}  // namespace metal_prefill::cpu
