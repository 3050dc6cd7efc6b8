#include <algorithm>
#include <numbers>

#include "ops.h"

namespace metal_prefill::cpu {

std::vector<float> position_bias(const Model& model) {
  const Tensor& stored = model.position_bias;  // [bucket][head], in any type
  if (!stored) return {};
  const int heads = model.config.n_heads;
  std::vector<float> of_buckets(std::size_t(stored.rows) * std::size_t(heads));
  dequantize_row(stored.type, stored.data, of_buckets.data(), of_buckets.size());
  std::vector<float> bias(std::size_t(heads) * kBiasRow);
  for (std::size_t i = 0; i < bias.size(); ++i) {
    const int distance = int(i % kBiasRow) - kBiasMargin;
    bias[i] = of_buckets[std::size_t(position_bucket(distance) * heads) + i / kBiasRow] *
              std::numbers::log2e_v<float>;
  }
  return bias;
}

namespace {

// The norm of queries or keys: per head, or over all heads of a row.
Norm qk_norm(const AttentionStep& step, const Tensor& weight, const Tensor& bias) {
  return {weight, bias, weight.cols, step.config.norm_eps, step.config.norm_kind};
}
Norm query_norm(const AttentionStep& step) {
  return qk_norm(step, step.weights.q_norm, step.weights.q_norm_bias);
}
Norm key_norm(const AttentionStep& step) {
  return qk_norm(step, step.weights.k_norm, step.weights.k_norm_bias);
}

// Whether all heads of a row share one norm.
bool normed_together(const AttentionStep& step, const Norm& norm) {
  return norm.weight && step.config.qk_norm_place == QkNormPlace::kRows;
}

// Normalizes and rotates a head of a row of the pass.
void prepare_head(const Context& c, const AttentionStep& step, const Norm& norm, int row, float* head) {
  const std::size_t pairs = std::size_t(step.config.rope_dim) / 2;
  const auto norm_at = [&](QkNormPlace place) {
    if (norm.weight && step.config.qk_norm_place == place) apply(c.kernels, norm, head, head);
  };
  norm_at(QkNormPlace::kHeads);
  if (step.rotations)
    c.kernels.rope(head, step.rotations + std::size_t(row) * 2 * pairs, int(pairs), step.config.rope_style);
  norm_at(QkNormPlace::kRotatedHeads);
}

// Counts one of `n` parts as done. Returns true, and resets the count, if it was the last one.
bool is_last(std::atomic<int>& done, int n) {
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < n) return false;
  done.store(0, std::memory_order_relaxed);
  return true;
}

int rows_of(std::span<const QueryTile> tiles) {
  int rows = 0;
  for (const QueryTile& tile : tiles) rows += tile.count;
  return rows;
}

// Union of the ranges that the rows of a tile see.
VisibleRange visible_range(const Config& config, int window, const QueryTile& tile) {
  const int length = config.causal ? 0 : tile.end;
  return {cpu::visible_range(tile.position, window, length).begin,
          cpu::visible_range(tile.position + tile.count - 1, window, length).end};
}

// Number of splits with visible positions, at least one.
int splits_of(VisibleRange visible) {
  return std::max(1, ceil_div(visible.end, kSplitPositions) - visible.begin / kSplitPositions);
}

// Number of query-key products of a tile, per head.
double visible_pairs(const Config& config, int window, const QueryTile& tile) {
  double pairs = 0;
  for (int own = tile.position; own < tile.position + tile.count; ++own) {
    const VisibleRange visible = cpu::visible_range(own, window, config.causal ? 0 : tile.end);
    pairs += visible.end - visible.begin;
  }
  return pairs;
}

// Normalizes and rotates the queries of an item in rows of `q`.
void prepare_queries(const Context& c, const AttentionStep& step, const AttentionItem& item,
                     const FloatRows& q) {
  if (!query_norm(step).weight && !step.rotations) return;
  const QueryTile& tile = item.tile;
  for (int i = 0; i < tile.count; ++i)
    for (int h = item.first_head; h < item.first_head + item.heads; ++h)
      prepare_head(c, step, query_norm(step), tile.index + i,
                   q.row(tile.first + i) + std::size_t(h) * std::size_t(step.config.query_step()));
}

// Arguments of the attention of a whole item, from rows of `q` into rows of `out`.
AttentionHead attention_head(const AttentionStep& step, const AttentionItem& item, const FloatRows& q,
                             const FloatRows& out) {
  const Config& config = step.config;
  const std::size_t head = std::size_t(item.first_head);
  return {
      .q = q.row(item.tile.first) + head * std::size_t(config.query_step()),
      .q_stride = q.stride,
      .q_step = std::size_t(config.query_step()),
      .out = out.row(item.tile.first) + head * std::size_t(config.value_dim),
      .out_stride = out.stride,
      .pages = item.tile.pages,
      .keys = step.cache.keys(step.layer, item.kv_head),
      .values = step.cache.values(step.layer, item.kv_head),
      .layout = step.cache.layout(),
      .key_dim = config.key_dim,
      .value_dim = config.value_dim,
      .key_stride = step.cache.key_stride(step.layer),
      .value_stride = step.cache.value_stride(step.layer),
      .heads = item.heads,
      .position = item.tile.position,
      .window = config.window(step.layer),
      .length = config.causal ? 0 : item.tile.end,
      .scale = config.score_scale(),
      .cap = config.score_cap,
      .slopes = step.slopes ? step.slopes + head : nullptr,
      .bias = step.bias ? step.bias + head * kBiasRow : nullptr,
      .sinks = step.weights.sinks ? floats(step.weights.sinks) + head : nullptr,
  };
}

// Adds the contribution of relative positions to the scores of an item. Rows of `q` are its prepared queries.
void add_relative_scores(const Context& c, const AttentionStep& step, const AttentionItem& item,
                         const FloatRows& q, AttentionHead& head) {
  if (!step.relative_row_of) return;
  const Config& config = step.config;
  const QueryTile& tile = item.tile;
  const std::size_t column = std::size_t(item.kv_head) * std::size_t(config.key_dim);
  auto* added = c.scratch.added.as<float>();
  for (int i = 0; i < tile.count; ++i)
    c.kernels.relative_scores({.q = q.row(tile.first + i) + column,
                               .k = step.k.row(tile.index - tile.position) + column,
                               .k_stride = step.k.stride,
                               .keys = floats(step.weights.relative_keys) + column,
                               .queries = floats(step.weights.relative_queries) + column,
                               .stride = std::size_t(step.weights.relative_keys.cols),
                               .row_of = step.relative_row_of + tile.position + i,
                               .positions = tile.end,
                               .dim = config.key_dim,
                               .scale = config.score_scale() * std::numbers::log2e_v<float>},
                              added + std::size_t(i) * c.scratch.added_stride);
  head.added = added;
  head.added_stride = c.scratch.added_stride;
}

// Computes split `split` of an item. Each split prepares its own queries, so that no thread waits for
// another.
void attend_to_split(const Context& c, const AttentionStep& step, const AttentionItem& item, int split,
                     int rows, const AttentionSplits& splits) {
  const std::size_t n_heads = std::size_t(step.config.n_heads), first_head = std::size_t(item.first_head);
  const std::size_t query_step = std::size_t(step.config.query_step());
  const auto of_split = [&](const FloatRows& all) {
    return FloatRows{all.row(item.seen_split * rows), all.stride};
  };
  const FloatRows q = of_split(splits.q);
  for (int row = item.tile.first; row < item.tile.first + item.tile.count; ++row)
    std::copy_n(step.q.row(row) + first_head * query_step, std::size_t(item.heads) * query_step,
                q.row(row) + first_head * query_step);
  prepare_queries(c, step, item, q);
  AttentionHead head = attention_head(step, item, q, of_split(splits.out));
  head.sums = splits.sums + std::size_t(item.seen_split * rows + item.tile.first) * n_heads + first_head;
  head.sums_stride = n_heads;
  head.split = split;
  add_relative_scores(c, step, item, q, head);
  c.kernels.attention(head, 0, item.tile.count);
}

// Combines the `n` splits of an item.
void combine_splits(const Context& c, const AttentionStep& step, const AttentionItem& item, int n, int rows,
                    const AttentionSplits& splits, const FloatRows& out) {
  const std::size_t n_heads = std::size_t(step.config.n_heads);
  for (int row = item.tile.first; row < item.tile.first + item.tile.count; ++row)
    for (int h = item.first_head; h < item.first_head + item.heads; ++h) {
      const std::size_t column = std::size_t(h) * std::size_t(step.config.value_dim);
      const float* sink = step.weights.sinks ? floats(step.weights.sinks) + h : nullptr;
      c.kernels.combine_splits(splits.out.row(row) + column, std::size_t(rows) * splits.out.stride,
                               splits.sums + std::size_t(row) * n_heads + std::size_t(h),
                               std::size_t(rows) * n_heads, n, step.config.value_dim, sink,
                               out.row(row) + column);
    }
}

// Multiplies the results of an item by the gates that are stored after its queries.
void apply_gates(const Context& c, const AttentionStep& step, const AttentionItem& item,
                 const FloatRows& out) {
  const Config& config = step.config;
  for (int row = item.tile.first; row < item.tile.first + item.tile.count; ++row)
    for (int h = item.first_head; h < item.first_head + item.heads; ++h)
      c.kernels.apply_gate(
          step.q.row(row) + std::size_t(h) * std::size_t(config.query_step()) + std::size_t(config.key_dim),
          config.value_dim, out.row(row) + std::size_t(h) * std::size_t(config.value_dim));
}

}  // namespace

CacheWriter::CacheWriter(const AttentionStep& step, std::span<const Row> rows,
                         std::span<const RowRange> blocks, std::atomic<int>* done)
    : step_(step), rows_(rows), blocks_(blocks), done_(done) {}

bool CacheWriter::takes_columns(CachePart part) const {
  if (at_once() || step_.cache.layout() != KvLayout::kPairs || step_.relative_row_of) return false;
  if (part == CachePart::kValues) return !step_.config.value_norm;
  return part == CachePart::kKeys && !step_.weights.k_norm && !step_.rotations &&
         step_.config.key_dim % 2 == 0;
}

void CacheWriter::store_columns(const Context& c, CachePart part, int column, int columns, RowRange rows,
                                const float* products) const {
  const int dim = part == CachePart::kKeys ? step_.config.key_dim : step_.config.value_dim;
  const int end = rows.first + rows.count;
  auto block = std::partition_point(blocks_.begin(), blocks_.end(),
                                    [&](RowRange b) { return b.first + b.count <= rows.first; });
  for (; block != blocks_.end() && block->first < end; ++block) {
    const int first = std::max(block->first, rows.first);
    const int count = std::min(block->first + block->count, end) - first;
    const Row& row = rows_[std::size_t(first)];
    const float* from = products + (first - rows.first) * kGroupRows;
    for (int at = column, n = 0; at < column + columns; at += n, from += n) {
      const int head = at / dim, d = at % dim;
      n = std::min(dim - d, column + columns - at);
      store_piece(c, part, row, count, head, d, n, from, kGroupRows);
    }
  }
}

void CacheWriter::computed(const Context& c, CachePart part, int column, int columns) const {
  if (part == CachePart::kNone || !at_once()) return;
  const Config& config = step_.config;
  const Norm norm = key_norm(step_);
  const bool keys = part == CachePart::kKeys, together = keys && normed_together(step_, norm);
  const int heads = together ? config.n_kv_heads : 1;  // heads that are complete at the same time
  const int width = heads * (keys ? config.key_dim : config.value_dim);
  for (int i = column / width; i * width < column + columns; ++i) {
    const int products = ceil_div((i + 1) * width, kGroupRows) - i * width / kGroupRows;
    if (!is_last(done_[(keys ? 0 : config.n_kv_heads) + i], products)) continue;
    if (together)
      for (int row = 0; row < int(rows_.size()); ++row)
        apply(c.kernels, norm, step_.k.row(row), step_.k.row(row));
    for (int head = i * heads; head < (i + 1) * heads; ++head)
      for (const RowRange& block : blocks_) store(c, part, block, head);
  }
}

void CacheWriter::store_rest(const Context& c) const {
  const bool keys = !takes_columns(CachePart::kKeys), values = !takes_columns(CachePart::kValues);
  if (at_once() || !(keys || values)) return;
  if (const Norm norm = key_norm(step_); normed_together(step_, norm))
    c.worker.for_each(int(rows_.size()),
                      [&](int row) { apply(c.kernels, norm, step_.k.row(row), step_.k.row(row)); });
  const int heads = step_.config.n_kv_heads;
  c.worker.for_each(int(blocks_.size()) * heads, [&](int item) {
    const RowRange& block = blocks_[std::size_t(item / heads)];
    if (keys) store(c, CachePart::kKeys, block, item % heads);
    if (values) store(c, CachePart::kValues, block, item % heads);
  });
}

void CacheWriter::store(const Context& c, CachePart part, RowRange block, int head) const {
  const Config& config = step_.config;
  const bool keys = part == CachePart::kKeys;
  const FloatRows& x = keys ? step_.k : step_.v;
  const int dim = keys ? config.key_dim : config.value_dim;
  const std::size_t column = std::size_t(head) * std::size_t(dim);
  for (int row = block.first; row < block.first + block.count; ++row) {
    float* own = x.row(row) + column;
    if (keys)
      prepare_head(c, step_, key_norm(step_), rows_[std::size_t(row)].index, own);
    else if (config.value_norm)
      c.kernels.rms_norm(own, step_.ones, config.norm_eps, dim, own);
  }
  store_piece(c, part, rows_[std::size_t(block.first)], block.count, head, 0, dim,
              x.row(block.first) + column, x.stride);
}

void CacheWriter::store_piece(const Context& c, CachePart part, const Row& row, int count, int head, int d,
                              int n, const float* from, std::size_t stride) const {
  constexpr std::size_t kValueStep = 2 * sizeof(std::uint16_t);
  const KvPages& cache = step_.cache;
  const int layer = step_.layer, position = row.position % kPagePositions;
  std::byte* page = row.pages[row.position / kPagePositions];
  if (part == CachePart::kKeys)
    c.kernels.store_keys(from, stride, count, n, cache.key_stride(layer), cache.layout(),
                         page + cache.keys(layer, head) + std::size_t(d / 2) * kKeyLaneStep, position);
  else
    c.kernels.store_values(from, stride, count, n, cache.value_stride(layer), cache.layout(),
                           page + cache.values(layer, head) + std::size_t(d) * kValueStep, position);
}

int query_tile_rows(int total, int kv_heads, int threads) {
  constexpr int kSmallest = 4;
  const int items_of_thread = threads > 8 ? 6 : 3;  // many threads finish together only if items are short
  int rows = kQueryTile;
  while (rows > kSmallest && ceil_div(total, rows) * kv_heads < items_of_thread * threads) rows /= 2;
  return rows;
}

void add_tiles(std::vector<QueryTile>& tiles, std::span<const Row> rows, int first, int tile_rows, int end) {
  for (int i = 0; i < int(rows.size()); i += tile_rows) {
    const Row& row = rows[std::size_t(i)];
    const int count = std::min(tile_rows, int(rows.size()) - i);
    tiles.push_back({first + i, count, row.index, row.position, end, row.pages});
  }
}

void add_key_blocks(std::vector<RowRange>& blocks, std::span<const Row> rows, int first) {
  for (int i = 0; i < int(rows.size());) {
    const int left = kKeyBlock - rows[std::size_t(i)].position % kKeyBlock;
    const int count = std::min(left, int(rows.size()) - i);
    blocks.push_back({first + i, count});
    i += count;
  }
}

int attention_splits(const Config& config, int window, std::span<const QueryTile> tiles, int threads) {
  constexpr int kItemsOfThread =
      4;  // in units of the longest: with more items, threads finish together anyway
  if (threads == 1 || rows_of(tiles) > kQueryTile) return 1;
  int splits = 1;
  double longest = 0, all = 0;
  for (const QueryTile& tile : tiles) {
    const double pairs = visible_pairs(config, window, tile);
    longest = std::max(longest, pairs);
    all += pairs * config.n_kv_heads;
    splits = std::max(splits, splits_of(visible_range(config, window, tile)));
  }
  return all < longest * threads * kItemsOfThread ? splits : 1;
}

AttentionItems::AttentionItems(const AttentionStep& step, std::span<const QueryTile> tiles, int threads)
    : step_(step), tiles_(tiles), threads_(threads) {
  const Config& config = step.config;
  splits_ = attention_splits(config, config.window(step.layer), tiles, threads);
  // If a single token has too few groups for all threads, items are single heads.
  const bool single = tiles.size() == 1 && tiles[0].count == 1;
  group_ = config.n_heads / config.n_kv_heads;
  heads_ = single && config.n_kv_heads * splits_ < threads ? 1 : group_;
}

AttentionItem AttentionItems::operator[](int i) const {
  const int n_groups = step_.config.n_heads / heads_, group = i / splits_;
  const int first_head = group % n_groups * heads_;
  return {tiles_[std::size_t(group / n_groups)], first_head / group_, first_head, heads_, i % splits_};
}

void AttentionItems::fetch(int i) const {
  // An encoder reads only K and V that the pass itself has just stored.
  if (!step_.config.causal) return;
  constexpr int kMost = 4 * kPagePositions;  // positions per sequence: the processor prefetches further ones
  const AttentionItem item = (*this)[i];
  const VisibleRange visible = visible_range(step_.config, step_.config.window(step_.layer), item.tile);
  const int begin = item.seen_split == 0
                        ? visible.begin / kPagePositions * kPagePositions
                        : (visible.begin / kSplitPositions + item.seen_split) * kSplitPositions;
  const int end = std::min(visible.end, begin + kMost);
  for (int position = begin; position < end; position += kPagePositions)
    step_.cache.fetch(item.tile.pages[position / kPagePositions], step_.layer, item.kv_head,
                      std::min(end - position, kPagePositions));
}

void AttentionItems::fetch_share(int share, int shares) const {
  const std::int64_t n = count();
  const auto begins_share = [&](std::int64_t i) { return n * ceil_div(i * threads_, n) / threads_ == i; };
  // The processor's prefetcher continues from one split to the next.
  for (std::int64_t i = n * share / shares; i < n * (share + 1) / shares; ++i)
    if (i % splits_ == 0 || begins_share(i)) fetch(int(i));
}

void attend(const Context& c, const AttentionStep& step, const AttentionItems& items,
            const AttentionSplits& splits, const Activations& out) {
  const Config& config = step.config;
  const int window = config.window(step.layer), rows = rows_of(items.tiles());
  const int columns = items.heads() * config.value_dim;
  const bool whole_blocks = columns % out.forms.block_cols() == 0;
  // Returns false until all splits of the item are complete.
  const auto attend_to = [&](const AttentionItem& item, int i) {
    if (items.splits() == 1) {
      prepare_queries(c, step, item, step.q);
      AttentionHead head = attention_head(step, item, step.q, out.f32);
      add_relative_scores(c, step, item, step.q, head);
      c.kernels.attention(head, 0, item.tile.count);
      return true;
    }
    const VisibleRange visible = visible_range(config, window, item.tile);
    const int n = splits_of(visible);
    if (item.seen_split >= n) return false;
    attend_to_split(c, step, item, visible.begin / kSplitPositions + item.seen_split, rows, splits);
    if (!is_last(splits.done[i / items.splits()], n)) return false;
    combine_splits(c, step, item, n, rows, splits, out.f32);
    return true;
  };

  if (const Norm norm = query_norm(step); normed_together(step, norm))
    c.worker.for_each(rows, [&](int i) { apply(c.kernels, norm, step.q.row(i), step.q.row(i)); });
  c.for_each(items.count(), [&](int i) {
    // Data that was prefetched during the products may have been evicted.
    if (items.tiles().size() > 1 && i + 1 < items.count()) items.fetch(i + 1);
    const AttentionItem item = items[i];
    if (!attend_to(item, i)) return;
    if (config.query_gate) apply_gates(c, step, item, out.f32);
    c.scratch.multiply_adds +=
        visible_pairs(config, window, item.tile) * item.heads * (config.key_dim + config.value_dim);
    if (whole_blocks)
      round_rows(c, out, item.tile.first, item.tile.count, item.first_head * config.value_dim, columns);
  });
  // A block with columns of two items is rounded after both are complete.
  if (!whole_blocks)
    c.worker.for_each(rows, [&](int row) { round_row(c, out, row, config.n_heads * config.value_dim); });
}

}  // namespace metal_prefill::cpu
