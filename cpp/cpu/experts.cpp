// Routing of rows to experts, and the experts' inputs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops.h"

namespace metal_prefill::cpu {

namespace {

// Added to the sum of sigmoid scores, which may be tiny; the published models use the same value.
constexpr float kSigmoidEps = 1e-6f;

// Replaces the router's products of a row by scores.
void score(RouterScore kind, float* scores, int n) {
  if (kind == RouterScore::kSigmoid) {
    for (int i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
    return;
  }
  const float largest = *std::max_element(scores, scores + n);
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += scores[i] = std::exp(scores[i] - largest);
  for (int i = 0; i < n; ++i) scores[i] /= sum;
}

// Chooses the experts of a row, in ascending order: those with the largest scores plus bias, the first of
// equal ones. NaN counts as the smallest score. The bias has no effect on the factors.
void choose(const Config& config, const Tensor& bias, const float* scores, int* chosen, float* factors) {
  const int n = config.n_experts, used = config.experts_used;
  const auto key = [&](int expert) {
    const float biased = scores[expert] + (bias ? floats(bias)[expert] : 0.0f);
    return std::isnan(biased) ? -std::numeric_limits<float>::infinity() : biased;
  };
  const auto better = [&](int a, int b) { return key(a) > key(b) || (key(a) == key(b) && a < b); };
  // A heap of the best so far, with the worst of them on top.
  for (int expert = 0; expert < n; ++expert) {
    if (expert >= used) {
      if (!better(expert, chosen[0])) continue;
      std::pop_heap(chosen, chosen + used, better);
    }
    const int last = std::min(expert, used - 1);
    chosen[last] = expert;
    std::push_heap(chosen, chosen + last + 1, better);
  }
  std::sort(chosen, chosen + used);
  float divisor = 1.0f;
  if (config.normalize_routes) {
    divisor = config.router_score == RouterScore::kSigmoid ? kSigmoidEps : 0.0f;
    for (int i = 0; i < used; ++i) divisor += scores[chosen[i]];
  }
  for (int i = 0; i < used; ++i) factors[i] = scores[chosen[i]] / divisor * config.route_scale;
}

void sort_by_expert(const Routes& routes) {
  std::fill_n(routes.counts, routes.experts, 0);
  for (int pair = 0; pair < routes.pairs(); ++pair) ++routes.counts[routes.chosen[pair]];
  routes.first[0] = 0;
  for (int expert = 0; expert < routes.experts; ++expert)
    routes.first[expert + 1] = routes.first[expert] + round_up(routes.counts[expert], kTileTokens);
  std::fill_n(routes.counts, routes.experts, 0);
  for (int pair = 0; pair < routes.pairs(); ++pair) {
    const int expert = routes.chosen[pair], place = routes.first[expert] + routes.counts[expert]++;
    routes.places[pair] = place;
    routes.at_place[place] = {pair / routes.used, routes.factors[pair]};
  }
}

}  // namespace

void route(const Context& c, const Config& config, const Tensor& bias, const Routes& routes) {
  c.worker.for_each(routes.rows, [&](int row) {
    const int first = row * routes.used;
    float* scores = routes.scores.row(row);
    score(config.router_score, scores, routes.experts);
    choose(config, bias, scores, routes.chosen + first, routes.factors + first);
  });
  c.worker.for_each(1, [&](int) { sort_by_expert(routes); });
}

void gather_rows(const Context& c, const NormedRows& x, int columns, const Routes& routes,
                 const Activations& out) {
  for_each_of(c, routes.pairs(), x, [&](int pair) {
    store_row(c, x.rows().f32.row(pair / routes.used), columns, out, routes.places[pair]);
  });
}

}  // namespace metal_prefill::cpu
