// Products with the weights.
#include <algorithm>
#include <optional>
#include <vector>

#include "../../../shaders/token_tiles.h"
#include "ops_threads.h"

namespace metal_prefill::metal::ops {

namespace {

// Lanes that share a row: the fewest of 8, 16 and 32 for which a matvec has enough threads for the whole GPU.
std::size_t lanes_per_row(const Tuning& tuning, std::size_t rows) {
  std::size_t lanes = 8;
  while (lanes < kSimd && rows * lanes < std::size_t(tuning.matvec_threads)) lanes *= 2;
  return lanes;
}

// Multiply-adds of products by a matrix.
double product_work(const Projection& w, int tokens) {
  return double(w.out_dim) * double(w.in_dim) * double(tokens);
}

struct MatvecPlan {
  MatvecArgs args;
  Grid grid;
};

// `rows` of y per token; `rows_together` of them share one group of lanes.
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
  std::size_t count, rows;  // tiles; rows of weights per group of lanes
};
TokenTiles token_tiles(int tokens) {
  const bool many = tokens > MULTI_TOKEN_TILE;
  return {ceil_div(std::size_t(tokens), std::size_t(many ? MANY_TOKEN_TILE : MULTI_TOKEN_TILE)),
          std::size_t(many ? MANY_TOKEN_ROWS : FEW_TOKEN_ROWS)};
}

// Makes the tiles the inner dimension: adjacent threadgroups read the same weights for different tokens.
Grid by_tiles(Grid grid, std::size_t tiles) {
  grid.y = grid.x;
  grid.x = tiles;
  return grid;
}

// Output of the rows of `w` in y.
View output_of(const Projection& w, const View& y) {
  return y.at(std::size_t(w.column) * sizeof(float));
}

}  // namespace

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
  plan.args.norm_threads = u32_t(norm_threads(e, Kernel::kRmsnorm, norm.dim));
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

namespace {

// A kind of tile of a product: its kernel, size and cost.
struct TileKind {
  Kernel kernel;
  std::size_t rows, tokens;  // of a tile
  const TileCost& cost;
  std::size_t threads = MATMUL_THREADS;
};

// Kernels of a product, by kind of tile. They differ only in how a tile is multiplied.
struct MatmulKernels {
  Kernel narrow, wide;
  Kernel tensor_narrow, tensor_wide, tensor_tall;
  std::optional<Kernel> split = std::nullopt;  // narrow, with MATMUL_PARTS times as many threads

  std::vector<TileKind> kinds(const Tuning& tuning, const MatmulArgs& args) const {
    constexpr std::size_t kNarrow = MATMUL_NARROW_TILE, kWide = MATMUL_WIDE_TILE;
    const TileCosts& costs = tuning.tiles;
    std::vector<TileKind> found;
    // Kernels of tall tiles do not handle partial tiles.
    if (tuning.matmul_tensor && tuning.tall_tiles && args.tokens >= MATMUL_TALL_TOKENS &&
        args.in_dim % MATMUL_K == 0)
      found.push_back({tensor_tall, kWide, MATMUL_TALL_TOKENS, costs.tensor_tall});
    if (args.tokens > kNarrow)
      found.push_back(tuning.matmul_tensor ? TileKind{tensor_wide, kWide, kWide, costs.tensor_wide}
                                           : TileKind{wide, kWide, kWide, costs.wide});
    found.push_back(tuning.matmul_tensor ? TileKind{tensor_narrow, kNarrow, kNarrow, costs.tensor_narrow}
                                         : TileKind{narrow, kNarrow, kNarrow, costs.narrow});
    // Does not use matrix units, even if there are any: so few tiles are bound by memory.
    if (split && args.tokens <= u32_t(kMostSplitTokens))
      found.push_back({*split, kNarrow, kNarrow, costs.split, MATMUL_PARTS * MATMUL_THREADS});
    return found;
  }
};

// Cycles of a step: each core computes its tiles one after another, or overlaps several that wait for memory.
// `rows` includes gate and up.
std::size_t step_cycles(const Tuning& tuning, const TileKind& kind, std::size_t rows, std::size_t tokens) {
  const std::size_t counted = std::min(tokens, std::size_t(kMostTiledTokens));
  const std::size_t tiles = ceil_div(rows, kind.rows) * ceil_div(counted, kind.tokens);
  const std::size_t of_a_core = ceil_div(tiles, std::size_t(tuning.cores));
  return std::max(of_a_core * std::size_t(kind.cost.work),
                  ceil_div(of_a_core, std::size_t(kind.cost.resident)) * std::size_t(kind.cost.alone));
}

// Dispatches the tiles that take the least time; of equal ones, the largest. ForwardPass::kernels relies on
// the choice changing only after multiples of MATMUL_NARROW_TILE, up to kMostTiledTokens. Tall tiles, from
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

}  // namespace metal_prefill::metal::ops
