// Intermediate results of a pass. One workspace serves all sessions of an engine.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "buffer.h"
#include "kernels/kernels.h"
#include "weights.h"

namespace metal_prefill::cpu {

// Rows of an activation, in the formats that its readers need.
struct Activations {
  Forms forms;
  FloatRows f32;
  Int8Rows int8;
  SuperRows super;
  PairRows bfloat16;
  RotatedRows rotated;

  // The same memory for narrower rows of `columns`.
  Activations of_width(int columns) const {
    Activations narrow = *this;
    if (forms.int8) narrow.int8.blocks = columns / kBlockCols;
    if (forms.super) narrow.super.blocks = columns / kSuperCols;
    return narrow;
  }
  // The same rows without the first ones, a multiple of kTileTokens.
  Activations rows_from(int row) const {
    return {.forms = forms,
            .f32 = f32.rows_from(row),
            .int8 = {int8.tile(row), int8.blocks},
            .super = {super.tile(row), super.blocks},
            .bfloat16 = {bfloat16.row(row), bfloat16.stride},
            .rotated = {rotated.row(row), rotated.stride, rotated.terms ? rotated.terms + row : nullptr}};
  }
};

// Rows of the residual stream, and the memory of the steps after attention, which treat each row
// independently. Named as in Workspace.
struct StreamRows {
  int count;
  FloatRows x, block;
  Activations normed, ffn;
  FloatRows inputs;
  Activations gated_input;
};

// Consecutive rows of a pass.
struct RowRange {
  int first, count;
};

// Routing of a step's rows to experts. Pairs of a row and one of its experts are sorted by expert, then by
// row, and have a place each. The places of an expert begin with a tile.
struct Routes {
  int rows = 0;
  int experts = 0, used = 0;  // experts of the model, and experts per row
  FloatRows scores;           // [rows][experts]: products of the router
  int* chosen = nullptr;      // [rows][used], ascending
  float* factors = nullptr;   // [rows][used]
  int* places = nullptr;      // [rows][used]
  int* first = nullptr;       // [experts + 1]: the first place of an expert, a multiple of kTileTokens
  int* counts = nullptr;      // [experts]: rows of an expert
  struct Pair {
    int row;
    float factor;
  };
  Pair* at_place = nullptr;  // [most_tiles() * kTileTokens]

  // The same memory for fewer rows.
  Routes of(int count) const {
    Routes routes = *this;
    routes.rows = count;
    return routes;
  }
  int pairs() const { return rows * used; }
  int tiles() const { return first[experts] / kTileTokens; }
  // Maximum for any routing of the rows, so that all threads divide a step into the same items.
  int most_tiles() const {
    const int started = std::min(experts, pairs());
    return started + (pairs() - started) / kTileTokens;
  }
  // Calls body(expert, range) for the rows in tiles [begin, end), at most `most` at a time.
  template <typename Body>
  void for_each_block(int begin, int end, int most, Body&& body) const {
    for (int expert = 0; expert < experts; ++expert) {
      const int last = std::min(first[expert] + counts[expert], end * kTileTokens);
      for (int place = std::max(first[expert], begin * kTileTokens); place < last; place += most)
        body(expert, RowRange{place, std::min(most, last - place)});
    }
  }
};

// Attention over splits of positions, which threads share, before the splits are combined.
struct AttentionSplits {
  FloatRows q;                       // [splits][rows][n_heads * query_step]
  FloatRows out;                     // [splits][rows][n_heads * value_dim]
  SoftmaxSum* sums = nullptr;        // [splits][rows][n_heads]
  std::atomic<int>* done = nullptr;  // [items]: finished splits of a tile and its heads; 0 between layers
};

// Maximum rows that each thread normalizes itself. With more threads, a separate phase takes longer.
inline int rows_of_own(int threads) {
  return std::clamp(threads / 4, 1, kTileTokens);
}
// Allocates memory for rows in float32 and in the formats of `forms`, which `out` then refers to.
Buffer reserve_rows(int columns, const Forms& forms, int rows, Activations& out);

// Memory for `rows` rows. Named as in the forward pass.
struct Workspace {
  FloatRows x;                 // [rows][dim]: the residual stream
  Activations embedded;        // [rows][embedding_dim]: before the projection
  FloatRows block;             // [rows][dim]: a block's output if a norm follows it
  FloatRows q;                 // [rows][n_heads * query_step]
  FloatRows k;                 // [rows][n_kv_heads * key_dim]
  FloatRows v;                 // [rows][n_kv_heads * value_dim]
  Activations normed;          // [rows][dim]
  Activations att;             // [rows][n_heads * value_dim]
  Activations ffn;             // [rows, a tile more for each thread][ffn_dim], or [...][shared_dim]
  FloatRows inputs;            // [rows][n_layers][per_layer_dim]: inputs of each layer from the token itself
  Activations gated_input;     // [rows][per_layer_dim]: of a layer
  Routes routes;               // of a feed-forward with experts
  Activations routed;          // [places][dim]: its input
  Activations expert_ffn;      // [places][expert_dim]
  FloatRows recurrent_in;      // [rows][recurrent_in_dim()]: of a layer with a state, its projections
  Activations conv;            // [rows][dim]: output of a short convolution
  Activations convolved;       // [rows][scan_channels()]: keys, queries and values of a recurrence
  FloatRows scanned;           // [rows][scan_dim()]: its output
  Activations scan;            // [rows][scan_dim()]: gated and normalized
  float* rotations = nullptr;  // [tables][rows][rope_dim] cosines and sines
  float* logits = nullptr;     // [logit_rows][vocab_size]
  AttentionSplits splits;      // if threads share positions
  // [2][n_kv_heads]: finished products of heads of keys and values; 0 between layers.
  std::atomic<int>* cache_done = nullptr;

  // Rows [first, first + count) of the stream. `first_ffn` is the first row of `ffn` that the feed-forward
  // block uses, with ffn_dim columns.
  StreamRows stream(int first, int count, int first_ffn, int ffn_dim) const {
    return {count,
            x.rows_from(first),
            block.rows_from(first),
            normed.rows_from(first),
            ffn.of_width(ffn_dim).rows_from(first_ffn),
            inputs.rows_from(first),
            gated_input.rows_from(first)};
  }

  // Reserves memory, in one allocation for the rows and one for the logits; does nothing if there is enough.
  // Throws DeviceError without a change.
  void reserve(const Config& config, const Weights& weights, std::size_t rope_tables, int rows,
               int logit_rows, int threads);
  void reserve_splits(const Config& config, int n_splits, int rows);
  std::size_t bytes() const { return memory_.bytes() + logits_memory_.bytes() + splits_memory_.bytes(); }

 private:
  int rows_ = 0;
  Buffer memory_, logits_memory_, splits_memory_;
};

}  // namespace metal_prefill::cpu
