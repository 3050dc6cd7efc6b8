// Rotation and attention.
#include <algorithm>
#include <vector>

#include "../../../shaders/attention.h"
#include "ops_threads.h"

namespace metal_prefill::metal::ops {

namespace {

struct HeadGroups {
  std::size_t count, simdgroups;  // threadgroups per token, and simdgroups per threadgroup, each for one head
};
HeadGroups head_groups(const Encoder& e, Kernel kernel, const RopeArgs& args) {
  const std::size_t heads =
      (args.skip_keys ? 0 : 2 * args.n_kv_heads) + (args.skip_queries ? 0 : args.n_heads);
  // The largest divisor of the heads: thousands of groups of one simdgroup take longer to start than to run.
  constexpr std::size_t kMost = 8;
  std::size_t simdgroups = allowed_threads(e, kernel, kMost * kSimd) / kSimd;
  while (heads % simdgroups != 0) --simdgroups;
  return {heads / simdgroups, simdgroups};
}

}  // namespace

void rope_append(Encoder& e, const RopeInputs& inputs, const View& qkv, const Sequences& sequences,
                 const LayerCache& cache, const RopeArgs& args) {
  const HeadGroups groups = head_groups(e, Kernel::kRopeAppend, args);
  e.dispatch(
      Kernel::kRopeAppend,
      {inputs.bias, inputs.q_norm, inputs.k_norm, inputs.table, qkv, sequences.rows, sequences.pages,
       cache.keys, cache.values},
      args, {.x = groups.count, .y = std::size_t(sequences.part.count), .threads = groups.simdgroups * kSimd},
      sequences.part.runs);
}

void rope_append_conv(Encoder& e, const RopeInputs& rope, const ConvInputs& conv, const View& projected,
                      const Sequences& sequences, const LayerCache& cache, const View& out,
                      RopeConvArgs args) {
  const HeadGroups groups = head_groups(e, Kernel::kRopeAppendConv, args.rope);
  args.head_groups = u32_t(groups.count);
  const std::size_t threads = groups.simdgroups * kSimd;
  e.dispatch(Kernel::kRopeAppendConv,
             {rope.bias, rope.q_norm, rope.k_norm, rope.table, projected, sequences.rows, sequences.pages,
              cache.keys, cache.values, conv.filter, conv.bias, conv.rows, conv.states, out},
             args,
             {.x = groups.count + ceil_div(std::size_t(args.conv.channels), threads),
              .y = std::size_t(sequences.part.count),
              .threads = threads},
             sequences.part.runs);
}

std::size_t decode_partial_bytes(const AttentionArgs& args, int tokens) {
  return std::size_t(tokens) * args.n_heads * args.splits * (args.value_dim + 2) * sizeof(float);
}

namespace {

int head_dim_of(const AttentionArgs& args) {
  return int(std::max(args.key_dim, args.value_dim));
}

// Approximate multiply-adds of attention: every row with all keys up to its own.
double attention_work(const AttentionArgs& args, const PassPart& part) {
  double keys = 0;
  for (const RowRun& run : part.runs) keys += double(run.count) * (double(run.position) + run.count / 2.0);
  return keys * double(args.n_heads) * double(args.key_dim + args.value_dim);
}

Grid decode_grid(const Encoder& e, const KernelKey& kernel, const AttentionArgs& args, const PassPart& part) {
  const int chunks = DECODE_CHUNKS(kernel.heads);
  const std::size_t head_blocks = ceil_div(args.n_heads / args.n_kv_heads, std::size_t(DECODE_HEADS(chunks)));
  // Every simdgroup has at least one key.
  const std::size_t keys = kSimd / DECODE_LANES(kernel.heads);  // of a simdgroup at a time
  const std::size_t most = allowed_threads(e, kernel, DECODE_SIMDGROUPS * kSimd) / kSimd;
  const std::size_t simdgroups = std::clamp<std::size_t>(ceil_div(part.split_keys, keys), 1, most);
  return {.x = part.splits,
          .y = args.n_kv_heads * head_blocks,
          .z = std::size_t(part.count),
          .threads = simdgroups * kSimd,
          .work = attention_work(args, part)};
}

// Output of the attention_decode kernel itself.
const View& first_output(const AttentionOutput& output, const AttentionArgs& args) {
  return args.splits > 1 ? output.partial : output.out;
}

void attention_combine(Encoder& e, const Sequences& sequences, const AttentionOutput& output,
                       const AttentionArgs& args) {
  if (args.splits == 1) return;
  const PassPart& part = sequences.part;
  e.dispatch(Kernel::kAttentionCombine, {output.partial, sequences.rows, output.out}, args,
             {.x = args.n_heads,
              .y = std::size_t(part.count),
              .threads = allowed_threads(e, Kernel::kAttentionCombine, round_up(args.value_dim, kSimd))},
             part.runs);
}

}  // namespace

void attention_decode(Encoder& e, const View& q, const Sequences& sequences, const LayerCache& cache,
                      const AttentionOutput& output, AttentionArgs args) {
  const KernelKey kernel = {Kernel::kAttentionDecode, decode_size(head_dim_of(args))};
  args.splits = sequences.part.splits;
  e.dispatch(kernel,
             {q, sequences.rows, sequences.pages, cache.keys, cache.values, first_output(output, args)}, args,
             decode_grid(e, kernel, args, sequences.part), sequences.part.runs);
  attention_combine(e, sequences, output, args);
}

void rope_attention_decode(Encoder& e, const RopeInputs& inputs, const View& qkv, const Sequences& sequences,
                           const LayerCache& cache, const AttentionOutput& output, RopeAttentionArgs args) {
  const KernelKey kernel = {Kernel::kRopeAttentionDecode, decode_size(head_dim_of(args.attention))};
  args.attention.splits = sequences.part.splits;
  e.dispatch(kernel,
             {inputs.bias, inputs.q_norm, inputs.k_norm, inputs.table, qkv, sequences.rows, sequences.pages,
              cache.keys, cache.values, first_output(output, args.attention)},
             args, decode_grid(e, kernel, args.attention, sequences.part), sequences.part.runs);
  attention_combine(e, sequences, output, args.attention);
}

namespace {

int element_bytes(KvType cache) {
  return cache == KvType::kF16 ? 2 : 4;
}

// The rows of a tile of attention_prefill, computed as in the kernel.
struct TileRows {
  int first_token, end_token;  // of the run
  double work;                 // approximate multiply-adds
};

TileRows rows_of(const AttentionTile& tile, const AttentionArgs& args, const TileShape& shape) {
  const u32_t heads = u32_t(shape.heads),
              end_row = std::min(tile.first + u32_t(shape.rows), heads * tile.tokens);
  const u32_t first = tile.first / heads, last = (end_row - 1) / heads;
  const u32_t before = args.window == 0 ? tile.position + tile.tokens
                       : args.both_ways ? args.window / 2
                                        : args.window - 1;
  const u32_t after = !args.both_ways ? 0 : args.window == 0 ? tile.end : args.window / 2;
  const u32_t first_key = std::max(tile.position + first, before) - before;
  const u32_t end_key = std::min(tile.position + last + after, tile.end - 1) + 1;
  return {int(first), int(last) + 1,
          double(end_row - tile.first) * double(std::max(end_key, first_key) - first_key) *
              double(args.n_kv_heads) * double(args.key_dim + args.value_dim)};
}

// Consecutive tiles that are dispatched together.
struct TileRange {
  std::size_t first, end;
  double work;
};

// Divides the tiles into as few ranges as possible of at most `most` work, or of one tile that exceeds it.
std::vector<TileRange> ranges_of(const Sequences& sequences, const AttentionArgs& args,
                                 const TileShape& shape, double most) {
  std::vector<TileRange> ranges;
  for (std::size_t i = 0; i < sequences.tile_table.size(); ++i) {
    const double work = rows_of(sequences.tile_table[i], args, shape).work;
    if (ranges.empty() || ranges.back().work + work > most) ranges.push_back({i, i, 0});
    ranges.back().end = i + 1;
    ranges.back().work += work;
  }
  return ranges;
}

// Runs of the rows in the tiles; a token whose heads are in two ranges is in both.
std::vector<RowRun> runs_of(const Sequences& sequences, const TileRange& range, const AttentionArgs& args,
                            const TileShape& shape) {
  std::vector<RowRun> runs;
  for (const RowRun& run : sequences.part.runs) {
    int first = run.count, end = 0;
    for (const AttentionTile& tile : sequences.tile_table.subspan(range.first, range.end - range.first)) {
      if (int(tile.row) != run.row - sequences.part.first) continue;
      const TileRows rows = rows_of(tile, args, shape);
      first = std::min(first, rows.first_token);
      end = std::max(end, rows.end_token);
    }
    if (first < end)
      runs.push_back({run.row + first, end - first, run.position + first, run.chunk, run.token + first});
  }
  return runs;
}

constexpr std::size_t kThreadgroupBytes = 32 << 10;  // limit in Metal

bool attends_on_tensors(const Tuning& tuning, KvType cache, const AttentionArgs& args) {
  return tuning.matmul_tensor && tuning.attention_tensor && cache == KvType::kF16 &&
         args.key_dim == args.value_dim && ATTENTION_TENSOR_DIMS(args.key_dim);
}

// Simdgroups of a threadgroup of attention_prefill, one tile each: `most`, or half as many if that reduces
// the tiles of the core with the most threadgroups.
std::size_t prefill_simdgroups(const Tuning& tuning, std::size_t most, std::size_t tiles, std::size_t heads) {
  const auto tiles_of_a_core = [&](std::size_t simdgroups) {
    return ceil_div(ceil_div(tiles, simdgroups) * heads, std::size_t(tuning.cores)) * simdgroups;
  };
  const std::size_t half = std::max(most / 2, std::size_t(1));
  return tiles_of_a_core(most) > most && tiles_of_a_core(half) < tiles_of_a_core(most) ? half : most;
}

}  // namespace

TileShape tile_shape(const Tuning& tuning, KvType cache, const AttentionArgs& args) {
  return {args.n_kv_heads > 0 ? int(args.n_heads / args.n_kv_heads) : 1,
          attends_on_tensors(tuning, cache, args)
              ? ATTENTION_TENSOR_ROWS
              : 8 * PREFILL_ROW_BLOCKS(prefill_size(head_dim_of(args)), element_bytes(cache))};
}

void relative_scores(Encoder& e, const RelativePositions& positions, const View& q,
                     const Sequences& sequences, const LayerCache& cache, const View& out,
                     const RelativeScoresArgs& args) {
  const std::size_t threads = allowed_threads(e, Kernel::kRelativeScores, 64);
  e.dispatch(Kernel::kRelativeScores,
             {positions.keys, positions.queries, positions.row_of, q, sequences.tiles, sequences.pages,
              cache.keys, out},
             args,
             {.x = ceil_div(std::size_t(args.keys), threads),
              .y = sequences.tile_table.size(),
              .z = args.n_heads,
              .threads = threads,
              .work = 2.0 * sequences.part.count * args.keys * args.n_heads * args.key_dim},
             sequences.part.runs);
}

void attention_prefill(Encoder& e, const View& q, const Sequences& sequences, const LayerCache& cache,
                       const View& additions, const View& sinks, const View& out, AttentionArgs args) {
  const int size = prefill_size(head_dim_of(args));
  // Threadgroup memory per simdgroup, which computes a tile; on tensors all simdgroups share one.
  const std::size_t bytes = std::size_t(PREFILL_SCRATCH(size, element_bytes(e.cache()))) * sizeof(float);
  const std::size_t most = std::min(std::size_t(e.tuning().prefill_simdgroups), kThreadgroupBytes / bytes);
  const bool on_tensors = attends_on_tensors(e.tuning(), e.cache(), args);
  const KernelKey kernel = {on_tensors ? Kernel::kAttentionTensor : Kernel::kAttentionPrefill, size};
  const std::size_t allowed = on_tensors ? 1 : allowed_threads(e, kernel, most * kSimd) / kSimd;
  const std::size_t heads = args.n_kv_heads * std::size_t(PREFILL_VALUE_PARTS(size));
  const TileShape shape = tile_shape(e.tuning(), e.cache(), args);
  const std::vector<TileRange> ranges = ranges_of(sequences, args, shape, e.tuning().buffer_work);
  for (const TileRange& range : ranges) {
    const bool all = ranges.size() == 1;
    args.tiles = u32_t(range.end - range.first);
    const std::size_t simdgroups = prefill_simdgroups(e.tuning(), allowed, args.tiles, heads);
    e.dispatch(kernel,
               {q, sequences.tiles.at(range.first * sizeof(AttentionTile)), sequences.pages, cache.keys,
                cache.values, additions, sinks, out},
               args,
               {.x = ceil_div(args.tiles, simdgroups),
                .y = heads,
                .threads = on_tensors ? MATMUL_THREADS : simdgroups * kSimd,
                .threadgroup_bytes = on_tensors ? 0 : simdgroups * bytes,
                .work = range.work},
               all ? sequences.part.runs : runs_of(sequences, range, args, shape));
  }
}

}  // namespace metal_prefill::metal::ops
