// Feed-forwards with experts.
#include <algorithm>

#include "ops_threads.h"

namespace metal_prefill::metal::ops {

namespace {

constexpr std::size_t kTile = MATMUL_NARROW_TILE;

// Arguments of products with the rows of one expert; gate and up count once.
ExpertsArgs args_of(const ExpertWeights& experts, const Routes& routes, std::optional<u32_t> activation) {
  return {.weights = experts.w.stack,
          .in_dim = u32_t(experts.w.in_dim),
          .out_dim = experts.w.stack.rows[0] / u32_t(routes.experts),
          .used = u32_t(routes.used),
          .lanes_per_row = u32_t(kSimd),
          .activation = activation.value_or(0),
          .has_bias = bool(experts.bias)};
}

// Multiply-adds of the routes of `tokens` rows.
double work_of(const Projection& w, const Routes& routes, int tokens) {
  return double(w.out_dim) / routes.experts * w.in_dim * routes.used * tokens;
}

}  // namespace

std::size_t Routes::most_tiles(int tokens) const {
  const std::size_t pairs = std::size_t(tokens) * std::size_t(used);
  const std::size_t begun = std::min(pairs, std::size_t(experts));
  return begun + (pairs - begun) / kTile;
}

void choose_experts(Encoder& e, const Router& router, const Norm& norm, const View& x, const Routes& routes,
                    int tokens, bool sigmoid, bool normalize, float scale) {
  const KernelKey kernel = {Kernel::kChooseExperts, router.w.type};
  e.dispatch(kernel,
             {router.w.weights, norm.weight.or_any(x), router.bias.or_any(x), router.offset.or_any(x), x,
              routes.routes},
             ChooseExpertsArgs{.dim = u32_t(router.w.in_dim),
                               .row_bytes = router.w.stack.row_bytes,
                               .experts = u32_t(routes.experts),
                               .used = u32_t(routes.used),
                               .sigmoid = sigmoid,
                               .has_bias = bool(router.bias),
                               .has_offset = bool(router.offset),
                               .normalize = normalize,
                               .has_norm = bool(norm.weight),
                               .scale = scale,
                               .eps = norm.eps,
                               .norm_threads = u32_t(norm_threads(e, Kernel::kRmsnorm, norm.dim))},
             {.x = std::size_t(tokens),
              .threads = allowed_threads(e, kernel, 8 * kSimd),
              .work = double(router.w.in_dim) * routes.experts * tokens});
}

void sort_routes(Encoder& e, const Routes& routes, int tokens) {
  e.dispatch(Kernel::kSortRoutes, {routes.routes, routes.rows, routes.tiles},
             SortRoutesArgs{u32_t(routes.experts), u32_t(routes.used), u32_t(tokens * routes.used),
                            u32_t(routes.most_tiles(tokens))},
             {.x = 1, .threads = allowed_threads(e, Kernel::kSortRoutes, 8 * kSimd)});
}

void matvec_experts(Encoder& e, const ExpertWeights& experts, const View& x, const Routes& routes,
                    const View& y, int tokens, std::optional<u32_t> activation) {
  const Projection& w = experts.w;
  const ExpertsArgs args = args_of(experts, routes, activation);
  const std::size_t threads = std::size_t(e.tuning().matvec_group);
  e.dispatch({activation ? Kernel::kMatvecExpertsSwiglu : Kernel::kMatvecExperts, w.type},
             {w.weights, experts.bias.or_any(w.weights), x, routes.routes, y}, args,
             {.x = ceil_div(std::size_t(args.out_dim), threads / kSimd),
              .y = std::size_t(tokens) * std::size_t(routes.used),
              .threads = threads,
              .work = work_of(w, routes, tokens)});
}

void matmul_experts(Encoder& e, const ExpertWeights& experts, const View& x, const Routes& routes,
                    const View& y, int tokens, std::optional<u32_t> activation) {
  const Projection& w = experts.w;
  const View& bias = experts.bias.or_any(w.weights);
  const ExpertsArgs args = args_of(experts, routes, activation);
  const Grid grid = {.x = ceil_div(std::size_t(args.out_dim), kTile / std::size_t(experts.matrices())),
                     .y = routes.most_tiles(tokens),
                     .threads = MATMUL_THREADS,
                     .work = work_of(w, routes, tokens)};
  if (activation)
    e.dispatch({Kernel::kMatmulExpertsSwiglu, w.type}, {w.weights, bias, x, routes.rows, routes.tiles, y},
               args, grid);
  else
    e.dispatch({Kernel::kMatmulExperts, w.type}, {w.weights, bias, x, routes.tiles, y}, args, grid);
}

void add_experts(Encoder& e, const Routes& routes, const View& y, const View& x, int dim, int tokens) {
  dispatch_values(e, Kernel::kAddExperts, {routes.routes, y, x},
                  AddExpertsArgs{u32_t(dim), u32_t(routes.used)}, std::size_t(dim) / 4, tokens);
}

}  // namespace metal_prefill::metal::ops
