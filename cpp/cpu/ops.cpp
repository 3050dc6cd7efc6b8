#include "ops.h"

#include <algorithm>

namespace metal_prefill::cpu {

namespace {

const float* floats(const Tensor& tensor) {
  return reinterpret_cast<const float*>(tensor.data);
}

// Fills the other forms of columns [first, first + columns) from the float32 one.
void round_row(const Context& c, const Activations& a, int row, int first, int columns) {
  const float* from = a.f32.row(row) + first;
  if (a.forms.int8)
    c.kernels.quantize(from, 0, row % kTileTokens, 1, columns / kBlockCols,
                       a.int8.tile(row) + first / kBlockCols);
  if (a.forms.bfloat16) c.kernels.round_to_bfloat16(from, columns, a.bfloat16.row(row) + first);
}

// Norms whole rows of queries or keys, where the model has such norms.
void normalize_heads_together(const Context& c, const AttentionStep& step, const Tensor& norm,
                              const FloatRows& heads, int rows) {
  if (!norm || step.config.qk_norm_place != QkNormPlace::kRows) return;
  c.worker.for_each(rows, [&](int i) {
    c.kernels.rms_norm(heads.row(i), floats(norm), step.config.norm_eps, norm.cols, heads.row(i));
  });
}

// Norms and rotates a head of a row of the pass.
void prepare_head(const Context& c, const AttentionStep& step, const Tensor& norm, int row, float* head) {
  const std::size_t pairs = std::size_t(step.config.rope_dim) / 2;
  const auto norm_at = [&](QkNormPlace place) {
    if (norm && step.config.qk_norm_place == place)
      c.kernels.rms_norm(head, floats(norm), step.config.norm_eps, norm.cols, head);
  };
  norm_at(QkNormPlace::kHeads);
  if (step.rotations)
    c.kernels.rope(head, step.rotations + std::size_t(row) * 2 * pairs, int(pairs), step.config.rope_style);
  norm_at(QkNormPlace::kRotatedHeads);
}

int rows_of(std::span<const QueryTile> tiles) {
  int rows = 0;
  for (const QueryTile& tile : tiles) rows += tile.count;
  return rows;
}

// Asks for what the rows of a tile see of a head's cache.
void fetch_cache(const AttentionStep& step, const QueryTile& tile, int kv_head) {
  constexpr int kMost = 4 * kPagePositions;  // of a sequence: the processor follows what comes after it
  const int window = step.config.window(step.layer);
  const int begin =
      window > 0 ? std::max(0, tile.position - window + 1) / kPagePositions * kPagePositions : 0;
  const int end = std::min(tile.position + tile.count, begin + kMost);
  for (int position = begin; position < end; position += kPagePositions)
    step.cache.fetch(tile.pages[position / kPagePositions], step.layer, kv_head,
                     std::min(end - position, kPagePositions));
}

// Products of a query and a key that the rows of a tile compute.
double visible_pairs(const QueryTile& tile, int window, bool causal) {
  const int reach = window == 0 ? tile.end : causal ? window - 1 : window / 2;
  double pairs = 0;
  for (int own = tile.position; own < tile.position + tile.count; ++own)
    pairs += 1 + std::min(own, reach) + (causal ? 0 : std::min(tile.end - 1 - own, reach));
  return pairs;
}

}  // namespace

void embed(const Context& c, const Model& model, std::span<const Row> rows, const FloatRows& x) {
  const Config& config = model.config;
  c.worker.for_each(int(rows.size()), [&](int i) {
    float* row = x.row(i);
    dequantize_row(model.token_embedding.type, model.token_embedding.row(rows[std::size_t(i)].token), row,
                   std::size_t(config.dim));
    if (const float scale = config.stream_embedding_scale(); scale != 1.0f)
      for (int d = 0; d < config.dim; ++d) row[d] *= scale;
  });
}

void normalize(const Context& c, const FloatRows& x, const Norm& norm, int first, int rows,
               const Activations& out) {
  c.worker.for_each(rows, [&](int i) {
    if (norm.weight)
      c.kernels.rms_norm(x.row(first + i), floats(norm.weight), norm.eps, norm.dim, out.f32.row(i));
    else
      std::copy_n(x.row(first + i), norm.dim, out.f32.row(i));
    round_row(c, out, i, 0, norm.dim);
  });
}

void add_normalized(const Context& c, const FloatRows& y, const Norm& norm, int rows, const FloatRows& x) {
  c.worker.for_each(rows, [&](int i) {
    float* from = y.row(i);
    float* to = x.row(i);
    c.kernels.rms_norm(from, floats(norm.weight), norm.eps, norm.dim, from);
    for (int d = 0; d < norm.dim; ++d) to[d] += from[d];
  });
}

void keep_rows(const Context& c, const FloatRows& x, int columns, std::span<const Row> kept) {
  // Each item moves its columns of all rows, the first rows first: none is overwritten before it is read.
  constexpr int kColumns = 64;
  c.worker.for_each((columns + kColumns - 1) / kColumns, [&](int item) {
    const int column = item * kColumns, n = std::min(kColumns, columns - column);
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const float* from = x.row(kept[i].index) + column;
      if (kept[i].index != int(i)) std::copy_n(from, n, x.row(int(i)) + column);
    }
  });
}

void rope_table(const Context& c, const Rope& rope, std::span<const Row> rows, float* table) {
  const std::size_t pairs = rope.frequencies.size();
  c.worker.for_each(int(rows.size()), [&](int i) {
    float* row = table + std::size_t(i) * 2 * pairs;
    for (std::size_t p = 0; p < pairs; ++p) {
      const Rotation turn = rope.at(std::size_t(rows[std::size_t(i)].position), p);
      row[p] = turn.cos;
      row[pairs + p] = turn.sin;
    }
  });
}

void append_to_cache(const Context& c, const AttentionStep& step, std::span<const Row> rows,
                     std::span<const KeyBlock> blocks) {
  const Config& config = step.config;
  const KvPages& cache = step.cache;
  normalize_heads_together(c, step, step.weights.k_norm, step.k, int(rows.size()));
  c.worker.for_each(int(blocks.size()) * config.n_kv_heads, [&](int item) {
    const auto [first, count] = blocks[std::size_t(item / config.n_kv_heads)];
    const int h = item % config.n_kv_heads;
    for (int i = first; i < first + count; ++i) {
      const Row& row = rows[std::size_t(i)];
      float* key = step.k.row(i) + std::size_t(h) * std::size_t(config.key_dim);
      const float* value = step.v.row(i) + std::size_t(h) * std::size_t(config.value_dim);
      std::byte* page = row.pages[row.position / kPagePositions];
      const int in_page = row.position % kPagePositions;
      prepare_head(c, step, step.weights.k_norm, row.index, key);
      c.kernels.store_key(key, config.key_dim, cache.key_stride(), cache.layout(),
                          page + cache.keys(step.layer, h), in_page);
      c.kernels.store_value(value, config.value_dim, cache.value_stride(), cache.layout(),
                            page + cache.values(step.layer, h), in_page);
    }
  });
}

int query_tile_rows(int total, int kv_heads, int threads) {
  constexpr int kSmallest = 4;
  const int items_of_thread = threads > 8 ? 6 : 3;  // many threads end together only with short items
  int rows = kQueryTile;
  while (rows > kSmallest && ceil_div(total, rows) * kv_heads < items_of_thread * threads) rows /= 2;
  return rows;
}

void add_tiles(std::vector<QueryTile>& tiles, std::span<const Row> rows, int first, int tile_rows) {
  for (int i = 0; i < int(rows.size()); i += tile_rows) {
    const Row& row = rows[std::size_t(i)];
    const int count = std::min(tile_rows, int(rows.size()) - i);
    tiles.push_back({first + i, count, row.index, row.position, rows.back().position + 1, row.pages});
  }
}

void add_key_blocks(std::vector<KeyBlock>& blocks, std::span<const Row> rows, int first) {
  for (int i = 0; i < int(rows.size());) {
    const int left = kKeyBlock - rows[std::size_t(i)].position % kKeyBlock;
    const int count = std::min(left, int(rows.size()) - i);
    blocks.push_back({first + i, count});
    i += count;
  }
}

void CacheFetch::part(int part, int parts) const {
  const auto items = std::int64_t(tiles_.size()) * step_.config.n_kv_heads;
  for (auto item = items * part / parts; item < items * (part + 1) / parts; ++item)
    fetch_cache(step_, tiles_[std::size_t(item / step_.config.n_kv_heads)],
                int(item % step_.config.n_kv_heads));
}

void attend(const Context& c, const AttentionStep& step, std::span<const QueryTile> tiles,
            const Activations& out) {
  const Config& config = step.config;
  const int group = config.n_heads / config.n_kv_heads;
  // Where a single token has too few groups to share among threads, its heads go one by one.
  const bool single = tiles.size() == 1 && tiles[0].count == 1;
  const int heads = single && config.n_kv_heads < c.worker.count() ? 1 : group;
  const int n_groups = config.n_heads / heads, columns = heads * config.value_dim;
  const bool whole_blocks = !out.forms.int8 || columns % kBlockCols == 0;
  normalize_heads_together(c, step, step.weights.q_norm, step.q, rows_of(tiles));
  const int items = int(tiles.size()) * n_groups;
  c.for_each(items, [&](int item) {
    const QueryTile& tile = tiles[std::size_t(item / n_groups)];
    // Not all that was asked for during the products is still near.
    if (const int next = item + 1; tiles.size() > 1 && next < items)
      fetch_cache(step, tiles[std::size_t(next / n_groups)], next % n_groups);
    const int first_head = item % n_groups * heads, kv_head = first_head / group;
    const int first_column = first_head * config.value_dim;
    float* q = step.q.row(tile.first) + std::size_t(first_head) * std::size_t(config.key_dim);
    for (int i = 0; i < tile.count; ++i)
      for (int h = 0; h < heads; ++h)
        prepare_head(c, step, step.weights.q_norm, tile.index + i,
                     q + std::size_t(i) * step.q.stride + std::size_t(h) * std::size_t(config.key_dim));
    const AttentionHead head = {
        .q = q,
        .q_stride = step.q.stride,
        .out = out.f32.row(tile.first) + first_column,
        .out_stride = out.f32.stride,
        .pages = tile.pages,
        .keys = step.cache.keys(step.layer, kv_head),
        .values = step.cache.values(step.layer, kv_head),
        .layout = step.cache.layout(),
        .key_dim = config.key_dim,
        .value_dim = config.value_dim,
        .key_stride = step.cache.key_stride(),
        .value_stride = step.cache.value_stride(),
        .heads = heads,
        .position = tile.position,
        .window = config.window(step.layer),
        .length = config.causal ? 0 : tile.end,
        .scale = config.score_scale(),
    };
    c.kernels.attention(head, 0, tile.count);
    c.scratch.multiply_adds +=
        visible_pairs(tile, head.window, config.causal) * heads * (config.key_dim + config.value_dim);
    if (whole_blocks)
      for (int row = tile.first; row < tile.first + tile.count; ++row)
        round_row(c, out, row, first_column, columns);
  });
  // Blocks that hold columns of two items wait for both.
  if (!whole_blocks)
    c.worker.for_each(rows_of(tiles),
                      [&](int row) { round_row(c, out, row, 0, config.n_heads * config.value_dim); });
}

}  // namespace metal_prefill::cpu
