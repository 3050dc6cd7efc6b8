#include "workspace.h"

#include <memory>
#include <utility>

namespace metal_prefill::cpu {

namespace {

// Hands out parts of a block of memory that begin on cache lines. Without a block it only counts bytes.
class Layout {
 public:
  Layout(std::byte* base, std::size_t rows) : base_(base), rows_(rows) {}

  template <typename T>
  T* take(std::size_t count) {
    std::byte* part = base_ ? base_ + bytes_ : nullptr;
    bytes_ += round_up(count * sizeof(T), 64);
    return reinterpret_cast<T*>(part);
  }
  FloatRows floats(std::size_t columns) {
    // Rows end with an unused cache line: strides of a power of two would conflict in the L1 cache.
    const std::size_t stride = round_up(columns, kFloatPad) + kFloatPad;
    return {take<float>(rows_ * stride), stride};
  }
  template <typename Tile>
  TileRows<Tile> tiles(std::size_t blocks) {
    return {take<Tile>(round_up(rows_, kTileTokens) / kTileTokens * blocks), int(blocks)};
  }
  // A norm and attention always write float32 first.
  enum class Float32 { kAlways, kWhereRead };
  Activations activations(std::size_t columns, Forms forms, Float32 f32) {
    Activations a{forms, {}, {}, {}, {}, {}};
    if (forms.f32 || forms.super || forms.rotated || f32 == Float32::kAlways) a.f32 = floats(columns);
    if (forms.int8) a.int8 = tiles<ActivationTile>(columns / kBlockCols);
    if (forms.super) a.super = tiles<SuperTile>(columns / kSuperCols);
    if (forms.bfloat16) {
      const std::size_t stride = round_up(columns, kPairPad) + kPairPad;  // as for float32
      a.bfloat16 = {take<std::uint16_t>(round_up(rows_, kTileTokens) * stride), stride};
    }
    if (forms.rotated) {
      const std::size_t stride = RotatedRows::stride_of(columns, forms.wide, forms.rests);
      a.rotated.data = take<std::byte>(round_up(rows_, kTileTokens) * stride);
      a.rotated.stride = stride;
      a.rotated.terms = take<RotatedRows::Terms>(rows_);
    }
    return a;
  }
  // Sets the number of rows of the next buffers.
  void set_rows(std::size_t rows) { rows_ = rows; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* const base_;
  std::size_t rows_;
  std::size_t bytes_ = 0;
};

Routes take_routes(Layout& layout, const Config& c, int rows) {
  Routes routes;
  routes.rows = rows;
  routes.experts = c.n_experts;
  routes.used = c.experts_used;
  const std::size_t pairs = std::size_t(routes.pairs()), experts = std::size_t(c.n_experts);
  routes.scores = layout.floats(experts);
  routes.chosen = layout.take<int>(pairs);
  routes.factors = layout.take<float>(pairs);
  routes.places = layout.take<int>(pairs);
  routes.first = layout.take<int>(experts + 1);
  routes.counts = layout.take<int>(experts);
  routes.at_place = layout.take<Routes::Pair>(std::size_t(routes.most_tiles()) * kTileTokens);
  return routes;
}

}  // namespace

Buffer reserve_rows(int columns, const Forms& forms, int rows, Activations& out) {
  const auto lay_out = [&](std::byte* base) {
    Layout layout(base, std::size_t(rows));
    out = layout.activations(std::size_t(columns), forms, Layout::Float32::kAlways);
    return layout.bytes();
  };
  Buffer memory(lay_out(nullptr), "rows of activations");
  lay_out(memory.data());
  return memory;
}

void Workspace::reserve(const Config& c, const Weights& weights, std::size_t rope_tables, int rows,
                        int logit_rows, int threads) {
  if (rows > rows_) {
    const auto lay_out = [&](std::byte* base, Workspace& w) {
      Layout layout(base, std::size_t(rows));
      const std::size_t dim = std::size_t(c.dim), heads = std::size_t(c.n_heads),
                        kv_heads = std::size_t(c.n_kv_heads);
      w.x = layout.floats(dim);
      if (c.embedding_dim > 0)
        w.embedded = layout.activations(std::size_t(c.embedding_dim), {}, Layout::Float32::kAlways);
      w.block = layout.floats(dim);
      w.q = layout.floats(heads * std::size_t(c.query_step()));
      w.k = layout.floats(kv_heads * std::size_t(c.key_dim));
      w.v = layout.floats(kv_heads * std::size_t(c.value_dim));
      w.normed = layout.activations(dim, weights.dim_input, Layout::Float32::kAlways);
      w.att = layout.activations(heads * std::size_t(c.value_dim), weights.attention_input,
                                 Layout::Float32::kAlways);
      layout.set_rows(std::size_t(round_up(rows, kTileTokens * threads)));
      w.ffn = layout.activations(std::size_t(std::max(c.ffn_dim, c.shared_dim)), weights.ffn_input,
                                 Layout::Float32::kWhereRead);
      layout.set_rows(std::size_t(rows));
      if (c.per_layer_dim > 0) {
        const std::size_t columns = std::size_t(c.per_layer_dim);
        w.inputs = layout.floats(std::size_t(c.n_layers) * columns);
        w.gated_input = layout.activations(columns, weights.layer_input, Layout::Float32::kAlways);
      }
      int recurrent_in = 0;
      for (const LayerKind kind : c.layer_kinds)
        recurrent_in = std::max(recurrent_in, c.recurrent_in_dim(kind));
      if (recurrent_in > 0) w.recurrent_in = layout.floats(std::size_t(recurrent_in));
      if (weights.has_conv) w.conv = layout.activations(dim, weights.conv_input, Layout::Float32::kAlways);
      if (weights.has_scan) {
        const std::size_t inner = std::size_t(c.scan_dim());
        w.convolved = layout.activations(std::size_t(c.scan_channels()), {}, Layout::Float32::kAlways);
        w.scanned = layout.floats(inner);
        w.scan = layout.activations(inner, weights.scan_input, Layout::Float32::kAlways);
      }
      w.rotations = layout.take<float>(rope_tables * std::size_t(rows) * std::size_t(c.rope_dim));
      w.cache_done = layout.take<std::atomic<int>>(2 * kv_heads);
      if (c.n_experts > 0) {
        w.routes = take_routes(layout, c, rows);
        layout.set_rows(std::size_t(w.routes.most_tiles()) * kTileTokens);
        w.routed = layout.activations(dim, weights.expert_input, Layout::Float32::kWhereRead);
        w.expert_ffn = layout.activations(std::size_t(c.expert_dim), weights.expert_ffn_input,
                                          Layout::Float32::kWhereRead);
      }
      return layout.bytes();
    };
    Workspace unused;
    Buffer memory(lay_out(nullptr, unused), "the workspace of a pass");
    lay_out(memory.data(), *this);
    std::uninitialized_value_construct_n(cache_done, 2 * c.n_kv_heads);
    memory_ = std::move(memory);
    rows_ = rows;
  }
  const std::size_t logit_bytes = std::size_t(logit_rows) * std::size_t(c.vocab_size) * sizeof(float);
  if (logit_bytes > logits_memory_.bytes()) {
    logits_memory_ = Buffer(logit_bytes, "logits");
    logits = logits_memory_.as<float>();
  }
}

void Workspace::reserve_splits(const Config& c, int n_splits, int rows) {
  const std::size_t heads = std::size_t(c.n_heads), all = std::size_t(n_splits) * std::size_t(rows);
  const auto lay_out = [&](std::byte* base, AttentionSplits& room) {
    Layout layout(base, all);
    room.q = layout.floats(heads * std::size_t(c.query_step()));
    room.out = layout.floats(heads * std::size_t(c.value_dim));
    room.sums = layout.take<SoftmaxSum>(all * heads);
    room.done = layout.take<std::atomic<int>>(all * heads);
    return layout.bytes();
  };
  AttentionSplits unused;
  const std::size_t bytes = lay_out(nullptr, unused);
  if (bytes <= splits_memory_.bytes()) return;
  splits_memory_ = Buffer(bytes, "the splits of attention");
  lay_out(splits_memory_.data(), splits);
  std::uninitialized_value_construct_n(splits.done, all * heads);
}

}  // namespace metal_prefill::cpu
