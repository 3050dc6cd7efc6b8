// Steps of the forward pass. Each divides its work into items for the team.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../model/rope.h"
#include "kernels/kernels.h"
#include "kv_pages.h"
#include "threads.h"
#include "weights.h"
#include "workspace.h"

namespace metal_prefill::cpu {

struct Best {
  float value = 0;
  int index = -1;  // -1: all were NaN
};

// Memory that each thread needs for itself.
struct alignas(128) Scratch {
  Buffer weights;      // scratch_bytes_of() a matrix, or a row while it is rotated
  Buffer rows;         // memory of `normed`
  Buffer matrix;       // of a gated delta rule: columns of a state, [scan_key_dim][kGatedDeltaColumns]
  Activations normed;  // few rows after a norm, for NormedRows
  Buffer embedded;     // a row of an embedding
  // Addends of the scores of a tile: [kQueryTile][added_stride], a whole number of spans.
  Buffer added;
  std::size_t added_stride = 0;
  void reserve_added(std::size_t positions) {
    const std::size_t stride = round_up(positions, std::size_t(kKeySpan));
    if (stride <= added_stride) return;
    added = Buffer(std::size_t(kQueryTile) * stride * sizeof(float), "scores of relative positions");
    added_stride = stride;
  }
  std::vector<Best> best;  // of each row that needs its largest logit, among those that this thread computed
  double multiply_adds = 0;  // of this thread's products and attention
};

struct Context {
  Worker& worker;
  const Kernels& kernels;
  Scratch& scratch;

  // Runs a phase whose items call kernels that keep state in registers.
  template <typename F>
  void for_each(int items, F&& body) const {
    worker.for_each(items, std::forward<F>(body));
    if (kernels.end_phase) kernels.end_phase();
  }
};

inline const Tensor kNoTensor;

// A norm of rows of `dim` values; without a weight, it leaves rows unchanged.
struct Norm {
  const Tensor& weight;
  const Tensor& bias;  // of a LayerNorm
  int dim;
  float eps;
  NormKind kind;
};
// out = norm(x). out may be x.
void apply(const Kernels& kernels, const Norm& norm, const float* x, float* out);

// Rows that a step multiplies: activations, or the norm of few rows of x. Each thread computes that norm
// itself, which takes less time than waiting for other threads.
class NormedRows {
 public:
  explicit NormedRows(const Activations& rows) : rows_(rows) {}
  NormedRows(const FloatRows& x, const Norm& norm, int first, int count, const Activations& own)
      : rows_(own), pending_({&x, norm, first, count}) {}

  // Computes the norm, within an item of the step: until the item is done, no later step changes x.
  void prepare(const Context& c) const;
  const Activations& rows() const { return rows_; }

 private:
  struct Pending {
    const FloatRows* x;
    Norm norm;
    int first, count;
  };
  const Activations& rows_;
  const std::optional<Pending> pending_;
};

// Runs a phase of items that multiply rows of x.
template <typename F>
void for_each_of(const Context& c, int items, const NormedRows& x, F&& body) {
  bool prepared = false;
  c.for_each(items, [&](int item) {
    if (!prepared) x.prepare(c);
    prepared = true;
    body(item);
  });
}

// A row of a pass: one token of one sequence.
struct Row {
  TokenId token;
  int type;                      // Config::token_types
  int position;                  // in its sequence
  int index;                     // among all rows of the pass: its row in the rotation tables
  std::byte* const* pages;       // of the sequence, by position / kPagePositions
  int in_chunk = 0;              // index in the chunk of its sequence, whose rows are adjacent
  const float* state = nullptr;  // of recurrent layers, before the chunk; null: zero
  float* next = nullptr;         // destination of the state after this token; null: not stored
};

// Rows [first, first + count) of one sequence, at consecutive positions: an item of attention.
struct QueryTile {
  int first, count;
  int index;     // of the first row, among all rows of the pass
  int position;  // likewise
  int end;       // end of the positions that rows see, if they see later ones
  std::byte* const* pages;
};
// Rows per tile for a pass of `total` rows: a tile reads K and V once, but all threads should have work.
int query_tile_rows(int total, int kv_heads, int threads);
// Divides the last rows of one sequence into tiles. `end` is QueryTile::end.
void add_tiles(std::vector<QueryTile>& tiles, std::span<const Row> rows, int first, int tile_rows, int end);
// Divides rows of one sequence, which start at row `first`, at the ends of key blocks, as one thread fills a
// block of a page.
void add_key_blocks(std::vector<RowRange>& blocks, std::span<const Row> rows, int first);
// Maximum splits of positions (kSplitPositions) that a tile sees if threads share positions; else 1.
int attention_splits(const Config& config, int window, std::span<const QueryTile> tiles, int threads);

// Computes the embedding of tokens, plus those of their positions and types if the model has them.
void embed(const Context& c, const Model& model, std::span<const Row> rows, const FloatRows& x);

// Kernels::multiply_int8 for both kinds of blocks; `scratch` has room for a widened group.
void multiply_packed(const Kernels& kernels, const PackedMatrix& weight, int group, const Int8Rows& x,
                     int first, int count, float* out, std::size_t stride, std::byte* scratch);

enum class CachePart { kNone, kKeys, kValues };
// One matrix of a step: out[t] = weight * x[t] (+ bias), or += with `add`.
struct Product {
  const Linear& weight;
  FloatRows out;
  const Tensor* bias = nullptr;
  bool add = false;
  CachePart part = CachePart::kNone;  // destination of `out` in the cache
};
class AttentionItems;
class CacheWriter;
// Computes products; meanwhile prefetches for `fetch` and notifies `cache` of K and V, if they are given.
void multiply(const Context& c, std::initializer_list<Product> products, const NormedRows& x, int rows,
              const AttentionItems* fetch = nullptr, const CacheWriter* cache = nullptr);
// The first half of a feed-forward block. Biases that a model does not have are null.
struct GateAndUp {
  const Linear& gate;  // without a tensor: activation(up * x)
  const Linear& up;
  const float* gate_bias;
  const float* up_bias;
  Activation activation;
};
// h = activation(gate * x + gate_bias) * (up * x + up_bias), in the formats that h requests.
void multiply_gated(const Context& c, const GateAndUp& w, const NormedRows& x, int rows,
                    const Activations& h);
// Scores the experts of each row by the router's products, and sorts rows by their experts.
void route(const Context& c, const Config& config, const Tensor& bias, const Routes& routes);
// Copies rows of x to their places, in the formats that `out` requests.
void gather_rows(const Context& c, const NormedRows& x, int columns, const Routes& routes,
                 const Activations& out);
// The gates and ups of all experts, and tables of biases, with a row for each expert; absent without biases.
struct GatedExperts {
  std::span<const Linear> gate, up;  // without gates: activation(up * x)
  const Tensor& gate_bias;
  const Tensor& up_bias;
  Activation activation;
};
// multiply_gated for each expert and the rows at its places.
void multiply_gated_experts(const Context& c, const GatedExperts& w, const Routes& routes,
                            const Activations& x, const Activations& h);
// The second half of a block of experts. `biases` is a table as in GatedExperts; `bias` may be null.
struct DownOfExperts {
  std::span<const Linear> down;
  const Tensor& biases;
  const float* bias;  // of the sum
};
// x += bias + factor * (down * h + biases) for each expert of a row, in the order of experts.
void add_experts(const Context& c, const DownOfExperts& w, const Routes& routes, const Activations& h,
                 const FloatRows& x);
// Computes logits of rows [0, rows) of x, plus `bias` if there is one. `logits` has the destination of each
// row, or null if only the largest is needed, which each thread collects in its scratch from best[first_best]
// on. `cap` is Config::logit_cap.
void multiply_head(const Context& c, const Linear& head, const Tensor& bias, const NormedRows& x, int rows,
                   float cap, float* const* logits, int first_best);
// Returns the best of a row over all threads.
Best best_of(std::span<const Scratch> scratch, int row);

inline const float* floats(const Tensor& tensor) {
  return reinterpret_cast<const float*>(tensor.data);
}
// Row `row` of a table, or null if the model has none.
inline const float* row_of(const Tensor& table, int row) {
  return table ? floats(table) + std::size_t(row) * std::size_t(table.cols) : nullptr;
}

// Converts columns [first, first + columns) of rows [row, row + rows) from float32 to the other formats.
void round_rows(const Context& c, const Activations& a, int row, int rows, int first, int columns);
inline void round_row(const Context& c, const Activations& a, int row, int columns) {
  round_rows(c, a, row, 1, 0, columns);
}

// Stores row `row` in the formats that `out` requests.
void store_row(const Context& c, float* x, int columns, const Activations& out, int row);

// Normalizes rows [first, first + rows) of x, which become rows [0, rows). Many rows are written to `out`, in
// a phase; few to the scratch of each thread, when it needs them.
NormedRows normalize(const Context& c, const FloatRows& x, const Norm& norm, int first, int rows,
                     const Activations& out);
// x += norm(y).
void add_normalized(const Context& c, const FloatRows& y, const Norm& norm, int rows, const FloatRows& x);
// x = norm(x), also stored in the formats that `out` requests.
void normalize_in_place(const Context& c, const Norm& norm, int rows, const FloatRows& x,
                        const Activations& out);
// x = second(x + first(x + y)), also stored in the formats that `out` requests. Overwrites y.
void normalize_twice(const Context& c, const FloatRows& y, const Norm& first, const Norm& second, int rows,
                     const FloatRows& x, const Activations& out);
// Moves row kept[i].index, which is at least i, to row i.
void keep_rows(const Context& c, const FloatRows& x, int columns, std::span<const Row> kept);

// Computes the inputs of all layers from the tokens, [rows][n_layers][per_layer_dim]: normalizes a projection
// of the embedding, which is in `inputs`, and adds a row of a table.
void per_layer_inputs(const Context& c, const Model& model, std::span<const Row> rows,
                      const FloatRows& inputs);
// x = activation(x) * factors, row by row, in the formats of x.
void activate_and_multiply(const Context& c, Activation activation, const FloatRows& factors, int columns,
                           int rows, const Activations& x);
// Clears the padding after the columns of rows: products read it, and a layer with wider rows may have left
// NaN there.
void fill_up(const Context& c, const Activations& x, int columns, int rows);
// x *= scale.
void scale_rows(const Context& c, float scale, int columns, int rows, const FloatRows& x);

// Computes the rotation of every pair for each row: [rows][rope_dim] cosines, then sines.
void rope_table(const Context& c, const Rope& rope, std::span<const Row> rows, float* table);

// The relative position bias in base-2 logarithms, [n_heads][kBiasRow], from distance -kBiasMargin of the key
// from the query; empty: the model has none.
std::vector<float> position_bias(const Model& model);

// Attention of one layer.
struct AttentionStep {
  const Config& config;  // with the dimensions of the layer
  const LayerWeights& weights;
  const KvPages& cache;
  int layer;
  const float* rotations;  // the layer's rotation table; null if it has no rotation
  const float* ones;       // [value_dim]: weights of the norm of values
  const float* slopes;     // [n_heads] of ALiBi; null without it
  const float* bias;       // [n_heads][kBiasRow] of relative positions, at distance 0; null without them
  const float*
      relative_row_of;  // row of relative positions, at distance 0 of the query from the key, or null
  FloatRows q, k, v;
};
// Query heads [first_head, first_head + heads) of a tile, which share a key-value head, over all positions
// that its rows see or over one split of them.
struct AttentionItem {
  const QueryTile& tile;
  int kv_head, first_head, heads;
  int seen_split;  // index of the split within the tile if threads share positions; else 0
};
// Divides a layer's attention into items. In a long context, few rows yield few items of very different
// length: threads then also share positions.
class AttentionItems {
 public:
  AttentionItems(const AttentionStep& step, std::span<const QueryTile> tiles, int threads);

  int count() const { return int(tiles_.size()) * (step_.config.n_heads / heads_) * splits_; }
  AttentionItem operator[](int i) const;
  std::span<const QueryTile> tiles() const { return tiles_; }
  // As returned by attention_splits().
  int splits() const { return splits_; }
  // Query heads per item.
  int heads() const { return heads_; }

  // Prefetches the parts of the cache that an item reads first.
  void fetch(int i) const;
  // Prefetches one of `shares` shares of the items, one for each thread, during products, which leave memory
  // idle. Attention would otherwise wait for it.
  void fetch_share(int share, int shares) const;

 private:
  const AttentionStep& step_;
  const std::span<const QueryTile> tiles_;
  const int threads_;
  int splits_, heads_, group_;  // query heads per key-value head: group_
};
// Stores normalized and rotated keys, and values, of a pass in the cache. With few rows, the thread that
// computes the last columns of a head stores it, which saves a phase. Many rows are stored in a separate
// phase, since half of a head's columns are in the caches of other cores.
class CacheWriter {
 public:
  // `blocks` are add_key_blocks() of the rows. `done`, [2][n_kv_heads], counts the finished products of a
  // head of keys or values; it is 0 between layers.
  CacheWriter(const AttentionStep& step, std::span<const Row> rows, std::span<const RowRange> blocks,
              std::atomic<int>* done);

  // Whether store_columns() stores products of the part directly. Requires many rows that are not changed
  // before they are stored, and a layout without blocks of columns. The products need no other destination.
  bool takes_columns(CachePart part) const;
  // Stores columns [column, column + columns) of some rows; their products are kGroupRows floats apart.
  void store_columns(const Context& c, CachePart part, int column, int columns, RowRange rows,
                     const float* products) const;
  // Called when columns [column, column + columns) of keys or values are computed for all rows.
  void computed(const Context& c, CachePart part, int column, int columns) const;
  // Stores the rows that computed() and store_columns() have not stored.
  void store_rest(const Context& c) const;

 private:
  // Whether each item of a product has all rows, as computed() requires.
  bool at_once() const { return rows_.size() <= kTileTokens; }
  void store(const Context& c, CachePart part, RowRange block, int head) const;
  // Stores columns [d, d + n) of a head for `count` positions from that of `row` on.
  void store_piece(const Context& c, CachePart part, const Row& row, int count, int head, int d, int n,
                   const float* from, std::size_t stride) const;

  const AttentionStep& step_;
  const std::span<const Row> rows_;
  const std::span<const RowRange> blocks_;
  std::atomic<int>* const done_;
};
// Normalizes and rotates queries and computes attention, in the formats of `out`. `splits` has room for each
// split of the rows if threads share positions.
void attend(const Context& c, const AttentionStep& step, const AttentionItems& items,
            const AttentionSplits& splits, const Activations& out);

// The convolution of one layer.
struct ConvStep {
  int channels, taps;
  const float* filter;  // [taps][channels]
  const float* bias;    // [channels]; null if there is none
  std::size_t first;    // of the layer's values in a slot of states
  FloatRows in;         // [rows][channels], or, with gates, [rows][3 * channels]
  bool gated;           // otherwise the result is activated
};
// Computes a row of the result.
void convolve(const Context& c, const ConvStep& step, const Row& row, float* out);
// Writes the inputs of the next convolution if the row stores a state.
void store_conv_state(const ConvStep& step, const Row& row);
// Convolves the wanted rows, which become the first rows of `out`, in its formats, and writes the states of
// all rows that store one.
void causal_conv(const Context& c, const ConvStep& step, std::span<const Row> all,
                 std::span<const Row> wanted, const Activations& out);

// The scan of a state-space layer (Mamba-2).
struct ScanStep {
  const Config& config;
  const LayerWeights& weights;
  std::size_t first;    // offset of the heads' values in a slot of states
  FloatRows projected;  // [rows][recurrent_in_dim()]
  FloatRows convolved;  // [rows][scan_channels()]
  FloatRows out;        // [rows][scan_dim()]
};
// Scans the tokens of each sequence and writes the states of the rows that store one.
void scan(const Context& c, const ScanStep& step, std::span<const Row> all,
          std::span<const RowRange> sequences);
// Multiplies the wanted rows of step.out by their gates, and normalizes groups, in the formats of `out`.
void gate_scan(const Context& c, const ScanStep& step, std::span<const Row> wanted, const Activations& out);

// The gated delta rule of one layer, and the convolution before it.
struct GatedDeltaStep {
  const Config& config;
  const LayerWeights& weights;
  const float *q_norm, *k_norm;  // [scan_key_dim]: weights with which RMSNorm normalizes lengths
  ConvStep conv;
  std::size_t first;    // of the layer's matrices in a slot of states
  FloatRows convolved;  // [rows][q | k | v]
  FloatRows rates;      // [rows][2 * scan_heads]: alpha and beta
  FloatRows out;        // [rows][scan_dim()]
};
// Scans the tokens of each sequence and writes the states of the rows that store one.
void gated_delta(const Context& c, const GatedDeltaStep& step, std::span<const Row> all,
                 std::span<const RowRange> sequences);
// Normalizes each head of the wanted rows and multiplies it by SiLU of its gate, in the formats of `out`.
void gated_norm(const Context& c, const Norm& norm, const FloatRows& x, const FloatRows& gate,
                std::span<const Row> wanted, int heads, const Activations& out);

}  // namespace metal_prefill::cpu
