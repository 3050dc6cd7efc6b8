#include "ops.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "../../shaders/attention.h"
#include "../../shaders/gated_delta.h"
#include "../../shaders/token_tiles.h"
#include "../rounding.h"

namespace metal_prefill::metal {

namespace {

constexpr std::size_t kSimd = 32;
constexpr std::size_t kThreadgroupBytes = 32 << 10;       // limit of a threadgroup in Metal
static_assert(ops::kMostScanRows == kSimd * DELTA_ROWS);  // of either recurrence

}  // namespace

namespace ops {

namespace {

// Lanes that share a row: the smallest of 8, 16 and 32 with which a matvec has enough threads for the whole
// GPU.
std::size_t lanes_per_row(const Tuning& tuning, std::size_t rows) {
  std::size_t lanes = 8;
  while (lanes < kSimd && rows * lanes < std::size_t(tuning.matvec_threads)) lanes *= 2;
  return lanes;
}

// As many threads as the kernel's pipeline allows, in whole simdgroups. For kernels that take any number.
std::size_t allowed_threads(const Encoder& e, const KernelKey& kernel, std::size_t threads) {
  return std::min(threads, std::max(kSimd, e.max_threads(kernel) / kSimd * kSimd));
}

// Multiply-adds of products by a matrix.
double product_work(const Projection& w, int tokens) {
  return double(w.out_dim) * double(w.in_dim) * double(tokens);
}

// Multiply-adds of attention, about: every row with all keys up to its own.
double attention_work(const AttentionArgs& args, const PassPart& part) {
  double keys = 0;
  for (const RowRun& run : part.runs) keys += double(run.count) * (double(run.position) + run.count / 2.0);
  return keys * double(args.n_heads) * double(args.key_dim + args.value_dim);
}

struct MatvecPlan {
  MatvecArgs args;
  Grid grid;
};

// `rows` of y for each token; `rows_together` of them share the lanes of one.
MatvecPlan plan_matvec(const Tuning& tuning, const Projection& w, std::size_t rows, const StridedRows& y,
                       int tokens, std::size_t rows_together = 1) {
  const std::size_t lanes = lanes_per_row(tuning, rows), threads = std::size_t(tuning.matvec_group);
  return {{.weights = w.stack,
           .in_dim = u32_t(w.in_dim),
           .out_dim = u32_t(rows),
           .lanes_per_row = u32_t(lanes),
           .tokens = u32_t(tokens),
           .out_stride = u32_t(y.stride)},
          {.x = ceil_div(rows, rows_together * threads / lanes),
           .y = std::size_t(tokens),
           .threads = threads,
           .work = product_work(w, tokens)}};
}

// Tiles of multi_token_matvec.
struct TokenTiles {
  std::size_t count, rows;  // tiles; rows of weights for each group of lanes
};
TokenTiles token_tiles(int tokens) {
  const bool many = tokens > MULTI_TOKEN_TILE;
  return {ceil_div(std::size_t(tokens), std::size_t(many ? MANY_TOKEN_TILE : MULTI_TOKEN_TILE)),
          std::size_t(many ? MANY_TOKEN_ROWS : FEW_TOKEN_ROWS)};
}

// Groups that follow each other have the same rows, of other tokens.
Grid by_tiles(Grid grid, std::size_t tiles) {
  grid.y = grid.x;
  grid.x = tiles;
  return grid;
}

// Where the rows of `w` begin in y.
View output_of(const Projection& w, const View& y) {
  return y.at(std::size_t(w.column) * sizeof(float));
}

}  // namespace

void embed(Encoder& e, const Projection& table, const TokenIds& ids, const View& x, int tokens, float scale,
           Write write) {
  const EmbedArgs args = {.dim = u32_t(table.in_dim),
                          .row_bytes = table.stack.row_bytes,
                          .tokens = u32_t(tokens),
                          .vocab_size = u32_t(table.out_dim),
                          .id_stride = ids.stride,
                          .accumulate = write == Write::kAccumulate,
                          .scale = scale};
  e.dispatch(
      {Kernel::kEmbed, table.type}, {table.weights, ids.view, x}, args,
      {.x = ceil_div(std::size_t(table.in_dim) / 8, kSimd), .y = std::size_t(tokens), .threads = kSimd});
}

namespace {

// Four values a thread: a row is then read in one go.
std::size_t norm_threads(const Encoder& e, Kernel kernel, int dim) {
  return allowed_threads(e, kernel, round_up(std::size_t(dim) / 4, kSimd));
}

LayernormArgs layernorm_args(const Norm& norm, const View& addend, int stride) {
  return {.dim = u32_t(norm.dim),
          .stride = u32_t(stride),
          .has_bias = bool(norm.bias),
          .has_addend = bool(addend),
          .has_second_bias = false,
          .eps = norm.eps};
}

// Rows of the buffers start `stride` elements apart.
void dispatch_norm(Encoder& e, Kernel kernel, const Norm& norm, std::initializer_list<View> buffers,
                   int stride, int tokens) {
  e.dispatch(kernel, buffers, RmsnormArgs{u32_t(norm.dim), u32_t(stride), bool(norm.weight), norm.eps},
             {.x = std::size_t(tokens), .threads = norm_threads(e, kernel, norm.dim)});
}

}  // namespace

void norm(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens, Precision precision) {
  const bool half = precision == Precision::kF16;
  if (norm.weight && norm.kind == NormKind::kLayer) {
    const Kernel kernel = half ? Kernel::kLayernormF16 : Kernel::kLayernormF32;
    e.dispatch(kernel, {norm.weight, norm.bias ? norm.bias : norm.weight, x, y},
               layernorm_args(norm, {}, norm.dim),
               {.x = std::size_t(tokens), .threads = norm_threads(e, kernel, norm.dim)});
    return;
  }
  // Without a weight any buffer that is not written will do.
  dispatch_norm(e, half ? Kernel::kRmsnormF16 : Kernel::kRmsnormF32, norm,
                {norm.weight ? norm.weight : x, x, y}, norm.dim, tokens);
}

void layernorm_stream(Encoder& e, const Norm& norm, const View& addend, const View& x, const View& copy,
                      int tokens) {
  e.dispatch(Kernel::kLayernormStream,
             {norm.weight, norm.bias ? norm.bias : norm.weight, addend ? addend : norm.weight, x, copy},
             layernorm_args(norm, addend, norm.dim),
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kLayernormStream, norm.dim)});
}

void layernorm_twice(Encoder& e, const Norm& first, const View& addend, const Norm& second, const View& y,
                     const View& x, const View& copy, int tokens) {
  LayernormArgs args = layernorm_args(first, addend, first.dim);
  args.has_second_bias = bool(second.bias);
  e.dispatch(Kernel::kLayernormTwice,
             {first.weight, first.bias ? first.bias : first.weight, addend ? addend : first.weight,
              second.weight, second.bias ? second.bias : second.weight, y, x, copy},
             args,
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kLayernormTwice, first.dim)});
}

void add_bias(Encoder& e, const View& bias, const View& x, int dim, int tokens) {
  const std::size_t columns = std::size_t(dim) / 4, threads = allowed_threads(e, Kernel::kAddBias, 256);
  e.dispatch(Kernel::kAddBias, {bias, x}, AddBiasArgs{u32_t(dim)},
             {.x = ceil_div(columns, threads), .y = std::size_t(tokens), .threads = threads});
}

void norm_in_place(Encoder& e, const Norm& norm, const View& addend, const StridedRows& rows, int tokens) {
  if (norm.kind == NormKind::kRms && addend) throw std::logic_error("RMSNorm of rows takes no addend");
  if (norm.kind == NormKind::kRms)
    return dispatch_norm(e, Kernel::kRmsnormInPlace, norm, {norm.weight, rows.view}, rows.stride, tokens);
  e.dispatch(Kernel::kLayernormInPlace,
             {norm.weight, norm.bias ? norm.bias : norm.weight, addend ? addend : norm.weight, rows.view},
             layernorm_args(norm, addend, rows.stride),
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kLayernormInPlace, norm.dim)});
}

void rmsnorm_add(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens) {
  dispatch_norm(e, Kernel::kRmsnormAdd, norm, {norm.weight, x, y}, norm.dim, tokens);
}

void matvec(Encoder& e, const Projection& w, const View& x, const StridedRows& y, int tokens, Write write) {
  const bool accumulate = write == Write::kAccumulate;
  const std::size_t rows = std::size_t(w.out_dim);
  const TokenTiles tiles = token_tiles(tokens);
  std::size_t together = tiles.rows;
  Kernel kernel = accumulate ? Kernel::kMultiTokenMatvecAccumulate : Kernel::kMultiTokenMatvec;
  if (tokens == 1) {
    together = lanes_per_row(e.tuning(), rows) == kSimd ? std::size_t(e.tuning().matvec_rows) : 1;
    kernel = together == 4 ? Kernel::kMatvecRows4 : together == 2 ? Kernel::kMatvecRows2 : Kernel::kMatvec;
  }
  MatvecPlan plan = plan_matvec(e.tuning(), w, rows, y, tokens, together);
  plan.args.accumulate = accumulate;
  if (tokens > 1) plan.grid = by_tiles(plan.grid, tiles.count);
  e.dispatch({kernel, w.type}, {w.weights, x, output_of(w, y.view)}, plan.args, plan.grid);
}

void matvec_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation) {
  const int rows = w.out_dim / 2;
  const TokenTiles tiles = token_tiles(tokens);
  MatvecPlan plan =
      plan_matvec(e.tuning(), w, std::size_t(rows), {y, rows}, tokens, tokens > 1 ? tiles.rows / 2 : 1);
  plan.args.activation = activation;
  if (tokens > 1) plan.grid = by_tiles(plan.grid, tiles.count);
  e.dispatch({tokens == 1 ? Kernel::kMatvecSwiglu : Kernel::kMultiTokenMatvecSwiglu, w.type},
             {w.weights, x, y}, plan.args, plan.grid);
}

namespace {

MatvecPlan plan_normed_matvec(const Encoder& e, const Projection& w, const Norm& norm, std::size_t rows) {
  MatvecPlan plan = plan_matvec(e.tuning(), w, rows, {{}, int(rows)}, 1, NORMED_MATVEC_ROWS);
  plan.args.eps = norm.eps;
  plan.args.norm_threads = u32_t(norm_threads(e, Kernel::kRmsnormF32, norm.dim));
  return plan;
}

}  // namespace

void rmsnorm_matvec(Encoder& e, const Projection& w, const Norm& norm, const View& x, const StridedRows& y) {
  MatvecPlan plan = plan_normed_matvec(e, w, norm, std::size_t(w.out_dim));
  plan.args.out_stride = u32_t(y.stride);
  e.dispatch({Kernel::kRmsnormMatvec, w.type}, {w.weights, norm.weight, x, output_of(w, y.view)}, plan.args,
             plan.grid);
}

void rmsnorm_matvec_swiglu(Encoder& e, const Projection& w, const Norm& norm, const View& x, const View& y,
                           u32_t activation) {
  MatvecPlan plan = plan_normed_matvec(e, w, norm, std::size_t(w.out_dim) / 2);
  plan.args.activation = activation;
  e.dispatch({Kernel::kRmsnormMatvecSwiglu, w.type}, {w.weights, norm.weight, x, y}, plan.args, plan.grid);
}

void silu_matvec_q4_0_accumulate(Encoder& e, const Projection& w, const View& gate_up, const View& y,
                                 int tokens, u32_t activation) {
  MatvecPlan plan = plan_matvec(e.tuning(), w, std::size_t(w.out_dim), {y, w.out_dim}, tokens);
  plan.args.activation = activation;
  e.dispatch(Kernel::kSiluMatvecQ4_0Accumulate, {w.weights, gate_up, y}, plan.args, plan.grid);
}

namespace {

// A kind of tiles of a product: their cost and their kernel.
struct TileKind {
  Kernel kernel;
  std::size_t rows, tokens;  // of a tile
  const TileCost& cost;
  std::size_t threads = MATMUL_THREADS;
};

// Kernels of a product, by the kind of its tiles. They differ only in how a tile is multiplied.
struct MatmulKernels {
  Kernel narrow, wide;
  Kernel tensor_narrow, tensor_wide, tensor_tall;
  std::optional<Kernel> split = std::nullopt;  // narrow, by MATMUL_PARTS times as many threads

  std::vector<TileKind> kinds(const Tuning& tuning, const MatmulArgs& args) const {
    constexpr std::size_t kNarrow = MATMUL_NARROW_TILE, kWide = MATMUL_WIDE_TILE;
    const TileCosts& costs = tuning.tiles;
    std::vector<TileKind> found;
    // Tall tiles have no edges.
    if (tuning.matmul_tensor && tuning.tall_tiles && args.tokens >= MATMUL_TALL_TOKENS &&
        args.in_dim % MATMUL_K == 0)
      found.push_back({tensor_tall, kWide, MATMUL_TALL_TOKENS, costs.tensor_tall});
    if (args.tokens > kNarrow)
      found.push_back(tuning.matmul_tensor ? TileKind{tensor_wide, kWide, kWide, costs.tensor_wide}
                                           : TileKind{wide, kWide, kWide, costs.wide});
    found.push_back(tuning.matmul_tensor ? TileKind{tensor_narrow, kNarrow, kNarrow, costs.tensor_narrow}
                                         : TileKind{narrow, kNarrow, kNarrow, costs.narrow});
    // Without matrix units, even if there are some: so few tiles wait for memory.
    if (split && args.tokens <= u32_t(kMostSplitTokens))
      found.push_back({*split, kNarrow, kNarrow, costs.split, MATMUL_PARTS * MATMUL_THREADS});
    return found;
  }
};

// Cycles of a step: each core takes its tiles one after another, or some at a time while they wait. `rows`
// includes gate and up.
std::size_t step_cycles(const Tuning& tuning, const TileKind& kind, std::size_t rows, std::size_t tokens) {
  const std::size_t counted = std::min(tokens, std::size_t(kMostTiledTokens));
  const std::size_t tiles = ceil_div(rows, kind.rows) * ceil_div(counted, kind.tokens);
  const std::size_t of_a_core = ceil_div(tiles, std::size_t(tuning.cores));
  return std::max(of_a_core * std::size_t(kind.cost.work),
                  ceil_div(of_a_core, std::size_t(kind.cost.resident)) * std::size_t(kind.cost.alone));
}

// With the tiles that take the least time; of equal ones, the largest. ForwardPass::kernels relies on this:
// the choice changes only after multiples of MATMUL_NARROW_TILE, up to kMostTiledTokens. Tall tiles, from
// MATMUL_TALL_TOKENS on, are an exception, but no chip has a kind of tiles for 97 to 127 tokens alone.
void dispatch_matmul(Encoder& e, const MatmulKernels& kernels, const Projection& w, const View& x,
                     const View& y, MatmulArgs args) {
  const std::size_t rows = std::size_t(w.out_dim), tokens = args.tokens;
  args.weights = w.stack;
  args.in_dim = u32_t(w.in_dim);
  const std::vector<TileKind> kinds = kernels.kinds(e.tuning(), args);
  const TileKind& kind =
      *std::min_element(kinds.begin(), kinds.end(), [&](const TileKind& a, const TileKind& b) {
        return step_cycles(e.tuning(), a, rows, tokens) < step_cycles(e.tuning(), b, rows, tokens);
      });
  e.dispatch({kind.kernel, w.type}, {w.weights, x, y}, args,
             {.x = ceil_div(rows, kind.rows),
              .y = ceil_div(tokens, kind.tokens),
              .threads = kind.threads,
              .work = product_work(w, int(args.tokens))});
}

}  // namespace

void matmul(Encoder& e, const Projection& w, const View& x, const StridedRows& y, int tokens, Write write) {
  dispatch_matmul(e,
                  {Kernel::kMatmulNarrow, Kernel::kMatmulWide, Kernel::kMatmulTensorNarrow,
                   Kernel::kMatmulTensorWide, Kernel::kMatmulTensorTall, Kernel::kMatmulSplit},
                  w, x, output_of(w, y.view),
                  {.out_dim = u32_t(w.out_dim),
                   .tokens = u32_t(tokens),
                   .out_stride = u32_t(y.stride),
                   .accumulate = write == Write::kAccumulate});
}

void matmul_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation) {
  const u32_t rows = u32_t(w.out_dim) / 2;  // gate and up share the tiles
  dispatch_matmul(e,
                  {Kernel::kMatmulSwigluNarrow, Kernel::kMatmulSwigluWide, Kernel::kMatmulTensorSwigluNarrow,
                   Kernel::kMatmulTensorSwigluWide, Kernel::kMatmulTensorSwigluTall},
                  w, x, y,
                  {.out_dim = rows, .tokens = u32_t(tokens), .out_stride = rows, .activation = activation});
}

namespace {

// Heads of a token that a threadgroup takes: thousands of groups of one simdgroup would take longer to start
// than to run.
std::size_t rope_simdgroups(std::size_t heads, std::size_t most) {
  for (std::size_t n = most; n > 1; --n)
    if (heads % n == 0) return n;
  return 1;
}

struct HeadGroups {
  std::size_t count, simdgroups;  // threadgroups of a token, and simdgroups of each, which take a head
};
HeadGroups head_groups(const Encoder& e, Kernel kernel, const RopeArgs& args) {
  const std::size_t heads = 2 * args.n_kv_heads + (args.skip_queries ? 0 : args.n_heads);
  constexpr std::size_t kMost = 8;
  const std::size_t simdgroups = rope_simdgroups(heads, allowed_threads(e, kernel, kMost * kSimd) / kSimd);
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

Grid decode_grid(const Encoder& e, const KernelKey& kernel, const AttentionArgs& args, const PassPart& part) {
  const int chunks = e.cache().decode_size() / 32;
  const std::size_t head_blocks = ceil_div(args.n_heads / args.n_kv_heads, std::size_t(DECODE_HEADS(chunks)));
  // Four keys for each simdgroup at a time: no more simdgroups than have keys.
  const std::size_t most = allowed_threads(e, kernel, DECODE_SIMDGROUPS * kSimd) / kSimd;
  const std::size_t simdgroups = std::clamp<std::size_t>(ceil_div(part.split_keys, 4), 1, most);
  return {.x = part.splits,
          .y = args.n_kv_heads * head_blocks,
          .z = std::size_t(part.count),
          .threads = simdgroups * kSimd,
          .work = attention_work(args, part)};
}

// Where attention_decode itself writes.
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
  args.splits = sequences.part.splits;
  e.dispatch(Kernel::kAttentionDecode,
             {q, sequences.rows, sequences.pages, cache.keys, cache.values, first_output(output, args)}, args,
             decode_grid(e, Kernel::kAttentionDecode, args, sequences.part), sequences.part.runs);
  attention_combine(e, sequences, output, args);
}

void rope_attention_decode(Encoder& e, const RopeInputs& inputs, const View& qkv, const Sequences& sequences,
                           const LayerCache& cache, const AttentionOutput& output, RopeAttentionArgs args) {
  args.attention.splits = sequences.part.splits;
  e.dispatch(Kernel::kRopeAttentionDecode,
             {inputs.bias, inputs.q_norm, inputs.k_norm, inputs.table, qkv, sequences.rows, sequences.pages,
              cache.keys, cache.values, first_output(output, args.attention)},
             args, decode_grid(e, Kernel::kRopeAttentionDecode, args.attention, sequences.part),
             sequences.part.runs);
  attention_combine(e, sequences, output, args.attention);
}

namespace {

int element_bytes(const CacheShape& cache) {
  return cache.type == KvType::kF16 ? 2 : 4;
}

}  // namespace

namespace {

// The rows of attention_prefill's tiles, as the kernel finds them.
struct TileRows {
  int first_token, end_token;  // of the run
  double work;                 // multiply-adds, about
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

// As few ranges as keep within `most` work, but for a tile that exceeds it alone.
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

// Runs of the rows in the tiles; a token whose heads are in two ranges belongs to both.
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

}  // namespace

namespace {

bool attends_on_tensors(const Tuning& tuning, const CacheShape& cache, const AttentionArgs& args) {
  return tuning.matmul_tensor && tuning.attention_tensor && cache.type == KvType::kF16 &&
         args.key_dim == args.value_dim && ATTENTION_TENSOR_DIMS(args.key_dim);
}

// Simdgroups of a threadgroup of attention_prefill, each of which takes a tile: `most`, or half as many where
// the core with the most threadgroups then has fewer tiles.
std::size_t prefill_simdgroups(const Tuning& tuning, std::size_t most, std::size_t tiles, std::size_t heads) {
  const auto tiles_of_a_core = [&](std::size_t simdgroups) {
    return ceil_div(ceil_div(tiles, simdgroups) * heads, std::size_t(tuning.cores)) * simdgroups;
  };
  const std::size_t half = std::max(most / 2, std::size_t(1));
  return tiles_of_a_core(most) > most && tiles_of_a_core(half) < tiles_of_a_core(most) ? half : most;
}

}  // namespace

TileShape tile_shape(const Tuning& tuning, const CacheShape& cache, const AttentionArgs& args) {
  return {args.n_kv_heads > 0 ? int(args.n_heads / args.n_kv_heads) : 1,
          attends_on_tensors(tuning, cache, args)
              ? ATTENTION_TENSOR_ROWS
              : 8 * PREFILL_ROW_BLOCKS(cache.prefill_size(), element_bytes(cache))};
}

void attention_prefill(Encoder& e, const View& q, const Sequences& sequences, const LayerCache& cache,
                       const View& out, AttentionArgs args) {
  // Threadgroup memory of a simdgroup, each of which takes a tile; on tensors all of them share one.
  const std::size_t bytes =
      std::size_t(PREFILL_SCRATCH(e.cache().prefill_size(), element_bytes(e.cache()))) * sizeof(float);
  const std::size_t most = std::min(std::size_t(e.tuning().prefill_simdgroups), kThreadgroupBytes / bytes);
  const bool on_tensors = attends_on_tensors(e.tuning(), e.cache(), args);
  const std::size_t allowed =
      on_tensors ? 1 : allowed_threads(e, Kernel::kAttentionPrefill, most * kSimd) / kSimd;
  const TileShape shape = tile_shape(e.tuning(), e.cache(), args);
  const std::vector<TileRange> ranges = ranges_of(sequences, args, shape, e.tuning().buffer_work);
  for (const TileRange& range : ranges) {
    const bool all = ranges.size() == 1;
    args.tiles = u32_t(range.end - range.first);
    const std::size_t simdgroups = prefill_simdgroups(e.tuning(), allowed, args.tiles, args.n_kv_heads);
    e.dispatch(on_tensors ? Kernel::kAttentionTensor : Kernel::kAttentionPrefill,
               {q, sequences.tiles.at(range.first * sizeof(AttentionTile)), sequences.pages, cache.keys,
                cache.values, out},
               args,
               {.x = ceil_div(args.tiles, simdgroups),
                .y = args.n_kv_heads,
                .threads = on_tensors ? MATMUL_THREADS : simdgroups * kSimd,
                .threadgroup_bytes = on_tensors ? 0 : simdgroups * bytes,
                .work = range.work},
               all ? sequences.part.runs : runs_of(sequences, range, args, shape));
  }
}

void swiglu(Encoder& e, const GateUp& gate_up, const View& out, int tokens, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kSwigluF16 : Kernel::kSwigluF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(
      kernel, {gate_up.bias ? gate_up.bias : gate_up.rows, gate_up.rows, out},
      SwigluArgs{u32_t(gate_up.ffn_dim), u32_t(tokens), gate_up.activation, gate_up.gated,
                 bool(gate_up.bias)},
      {.x = ceil_div(std::size_t(gate_up.ffn_dim), threads), .y = std::size_t(tokens), .threads = threads});
}

void causal_conv(Encoder& e, const ConvInputs& inputs, const View& in, const View& out,
                 const CausalConvArgs& args, Precision precision, std::span<const RowRun> runs) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kCausalConvF16 : Kernel::kCausalConvF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(
      kernel, {inputs.filter, inputs.bias, in, inputs.rows, inputs.states, out}, args,
      {.x = ceil_div(std::size_t(args.channels), threads), .y = std::size_t(args.tokens), .threads = threads},
      runs);
}

void scan(Encoder& e, const ScanWeights& w, const View& projected, const View& convolved, const View& rows,
          const View& states, const View& out, const ScanArgs& args, int sequences, Precision precision,
          std::span<const RowRun> runs) {
  const bool many_rows = args.rows > 128;
  const Kernel kernel = precision == Precision::kF16
                            ? (many_rows ? Kernel::kScanF16Rows256 : Kernel::kScanF16Rows128)
                            : (many_rows ? Kernel::kScanF32Rows256 : Kernel::kScanF32Rows128);
  const std::size_t threads = allowed_threads(e, kernel, 128);
  const std::size_t simdgroups = args.heads * ceil_div(args.dim, std::size_t(SCAN_COLUMNS));
  e.dispatch(kernel, {w.a, w.bias, w.skip, projected, convolved, rows, states, out}, args,
             {.x = ceil_div(simdgroups, threads / kSimd),
              .y = std::size_t(sequences),
              .threads = threads,
              .work = 3.0 * args.tokens * args.heads * args.dim * args.rows},
             runs);
}

void scan_norm(Encoder& e, const ScanWeights& w, const View& gates, const View& y, const View& out,
               const ScanNormArgs& args, int tokens, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kScanNormF16 : Kernel::kScanNormF32;
  const std::size_t columns = args.inner / args.groups;
  e.dispatch(kernel, {w.norm, gates, y, out}, args,
             {.x = std::size_t(tokens),
              .y = args.groups,
              .threads = allowed_threads(e, kernel, std::min(round_up(columns, kSimd), std::size_t(256)))});
}

void gated_delta(Encoder& e, const DeltaWeights& w, const View& qkv, const View& rates, const View& rows,
                 const View& states, const View& out, const GatedDeltaArgs& args, int sequences,
                 std::span<const RowRun> runs) {
  const std::size_t threads = allowed_threads(e, Kernel::kGatedDelta, DELTA_SIMDGROUPS * kSimd);
  e.dispatch(Kernel::kGatedDelta, {w.decay, w.step, qkv, rates, rows, states, out}, args,
             {.x = ceil_div(std::size_t(args.value_dim), threads / kSimd * DELTA_COLUMNS),
              .y = std::size_t(args.heads),
              .z = std::size_t(sequences),
              .threads = threads,
              .work = 4.0 * args.tokens * args.heads * args.value_dim * args.key_dim},
             runs);
}

void gated_norm(Encoder& e, const Norm& norm, const View& x, const StridedRows& gate, const View& y,
                int heads, int tokens, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kGatedNormF16 : Kernel::kGatedNormF32;
  const std::size_t threads = allowed_threads(e, kernel, 8 * kSimd);
  e.dispatch(
      kernel, {norm.weight, x, gate.view, y},
      GatedNormArgs{u32_t(heads), u32_t(norm.dim), u32_t(gate.stride), norm.eps},
      {.x = ceil_div(std::size_t(heads) * kSimd, threads), .y = std::size_t(tokens), .threads = threads});
}

void gate_heads(Encoder& e, const View& q, const View& y, const GateHeadsArgs& args, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kGateHeadsF16 : Kernel::kGateHeadsF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(kernel, {q, y}, args,
             {.x = ceil_div(std::size_t(args.n_heads) * args.value_dim, threads),
              .y = std::size_t(args.tokens),
              .threads = threads});
}

std::size_t candidates_bytes(const Tuning& tuning, int rows) {
  return std::size_t(rows) * std::size_t(tuning.argmax_groups) * sizeof(Candidate);
}

void argmax(Encoder& e, const View& logits, const View& candidates, const View& result, int n, int rows) {
  const std::size_t groups = std::size_t(e.tuning().argmax_groups);
  e.dispatch(
      Kernel::kArgmaxStage1, {logits, candidates}, ArgmaxArgs{u32_t(n)},
      {.x = groups, .y = std::size_t(rows), .threads = allowed_threads(e, Kernel::kArgmaxStage1, 256)});
  e.dispatch(Kernel::kArgmaxStage2, {candidates, result}, ArgmaxArgs{u32_t(groups)},
             {.x = std::size_t(rows), .threads = kSimd});
}

void log_prob(Encoder& e, const View& logits, const View& targets, const View& out, int vocab_size,
              int tokens) {
  e.dispatch(Kernel::kLogProb, {logits, targets, out}, LogProbArgs{u32_t(vocab_size)},
             {.x = std::size_t(tokens), .threads = allowed_threads(e, Kernel::kLogProb, 256)});
}

}  // namespace ops
}  // namespace metal_prefill::metal
