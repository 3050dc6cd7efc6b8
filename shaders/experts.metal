// Feed-forwards with experts: the choice of experts, and products of few rows. matmul_experts.metal has the
// products of many rows.
#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "matvec_products.h"
#include "norm.h"
#include "projection.h"
#include "variants.h"

using namespace metal;

// The values that a router reads: normalized as in NormedToken, or unchanged if there is no weight.
struct RoutedToken {
  device const float* x;
  device const float* weight;
  float scale;
  float4 values(uint column) const {
    const float4 value = *(device const float4*)(x + column);
    return weight ? value * scale * *(device const float4*)(weight + column) : value;
  }
};

// Tests the bits, as comparisons may be compiled under the assumption that there is no NaN.
static inline bool is_nan(float value) {
  return (as_type<uint>(value) & 0x7fffffffu) > 0x7f800000u;
}

// routes[t][used]: the experts of a row, best score first, the first expert of equal ones. NaN is the
// smallest score. Products are of float32 values on every path: rounded ones could change the choice.
// `offset` is added to products, `bias` to scores, only for the choice.
template <typename W>
kernel void choose_experts(device const uchar* router [[buffer(0)]],  // [experts][dim]
                           device const float* norm [[buffer(1)]],    // [dim]
                           device const float* bias [[buffer(2)]],    // [experts]
                           device const float* offset [[buffer(3)]],  // [experts]
                           device const float* x [[buffer(4)]],       // [tokens][dim]
                           device Route* routes [[buffer(5)]],        // [tokens][used]
                           constant ChooseExpertsArgs& args [[buffer(6)]],
                           uint token [[threadgroup_position_in_grid]],
                           ushort lane [[thread_index_in_simdgroup]],
                           ushort simdgroup [[simdgroup_index_in_threadgroup]],
                           ushort simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scores[MOST_EXPERTS], keys[MOST_EXPERTS];
  threadgroup uint chosen[MOST_EXPERTS];
  x += token * args.dim;
  const RoutedToken routed = {
      x, args.has_norm ? norm : nullptr,
      norm_scale_of((device const float4*)x, args.dim, args.eps, args.norm_threads, lane)};
  for (uint expert = simdgroup; expert < args.experts; expert += simdgroups) {
    Products<W, 1, 1, RoutedToken> products;
    products.row[0] = router + ulong(expert) * args.row_bytes;
    products.token[0] = routed;
    products.multiply(args.dim, lane, 32);
    const float product = products.total(0, 0, 32);
    if (lane == 0) scores[expert] = args.has_offset ? product + offset[expert] : product;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0) return;

  float largest = -INFINITY, sum = 0.0f;
  for (uint e = lane; e < args.experts; e += 32) largest = max(largest, scores[e]);
  largest = simd_max(largest);
  for (uint e = lane; e < args.experts; e += 32) {
    const float score =
        args.sigmoid ? 1.0f / (1.0f + precise::exp(-scores[e])) : precise::exp(scores[e] - largest);
    scores[e] = score;
    sum += score;
  }
  sum = args.sigmoid ? 1.0f : simd_sum(sum);
  for (uint e = lane; e < args.experts; e += 32) {
    scores[e] /= sum;
    const float key = args.has_bias ? scores[e] + bias[e] : scores[e];
    keys[e] = is_nan(key) ? -FLT_MAX : key;
  }
  float divisor = args.sigmoid ? 1e-6f : 0.0f;  // as in the published models
  for (uint i = 0; i < args.used; ++i) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float best = -INFINITY;
    uint expert = args.experts - 1;
    for (uint e = lane; e < args.experts; e += 32) {
      const bool better = keys[e] > best;
      best = better ? keys[e] : best;
      expert = better ? e : expert;
    }
    const float of_all = simd_max(best);
    expert = simd_min(best == of_all ? expert : args.experts - 1);
    divisor += scores[expert];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      chosen[i] = expert;
      keys[expert] = -INFINITY;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < args.used; i += 32) {
    const float factor = scores[chosen[i]] / (args.normalize ? divisor : 1.0f);
    const uint place = token * args.used + i;
    routes[place] = {chosen[i], place, factor * args.scale};
  }
}

// Assigns consecutive places to the routes of each expert, in order of rows, and divides these into tiles of
// MATMUL_NARROW_TILE. One threadgroup; experts are distributed over the threads in rotation.
kernel void sort_routes(device Route* routes [[buffer(0)]],      // [tokens][used]
                        device uint* rows [[buffer(1)]],         // [places]: the row of each
                        device ExpertTile* tiles [[buffer(2)]],  // [tiles]
                        constant SortRoutesArgs& args [[buffer(3)]],
                        ushort thread_index [[thread_index_in_threadgroup]],
                        ushort threads [[threads_per_threadgroup]]) {
  threadgroup uint counts[MOST_EXPERTS], first_place[MOST_EXPERTS], first_tile[MOST_EXPERTS + 1];
  for (uint expert = thread_index; expert < args.experts; expert += threads) {
    uint count = 0;
    for (uint i = 0; i < args.routes; ++i) count += routes[i].expert == expert ? 1 : 0;
    counts[expert] = count;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) {
    uint place = 0, tile = 0;
    for (uint expert = 0; expert < args.experts; ++expert) {
      first_place[expert] = place;
      first_tile[expert] = tile;
      place += counts[expert];
      tile += (counts[expert] + MATMUL_NARROW_TILE - 1) / MATMUL_NARROW_TILE;
    }
    first_tile[args.experts] = tile;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint expert = thread_index; expert < args.experts; expert += threads) {
    uint place = first_place[expert];
    for (uint i = 0; i < args.routes; ++i) {
      if (routes[i].expert != expert) continue;
      routes[i].place = place;
      rows[place] = i / args.used;
      ++place;
    }
    for (uint done = 0; done < counts[expert]; done += MATMUL_NARROW_TILE)
      tiles[first_tile[expert] + done / MATMUL_NARROW_TILE] = {
          expert, first_place[expert] + done, min(counts[expert] - done, uint(MATMUL_NARROW_TILE))};
  }
  for (uint tile = first_tile[args.experts] + thread_index; tile < args.tiles; tile += threads)
    tiles[tile] = {0, 0, 0};
}

// x[t] += the sum of the results of its experts. Grid: (dim / 4, tokens) in threads.
kernel void add_experts(device const Route* routes [[buffer(0)]],  // [tokens][used]
                        device const float* y [[buffer(1)]],       // [places][dim]
                        device float* x [[buffer(2)]],             // [tokens][dim]
                        constant AddExpertsArgs& args [[buffer(3)]],
                        uint2 position [[thread_position_in_grid]]) {
  const uint column = 4 * position.x;
  if (column >= args.dim) return;
  routes += position.y * args.used;
  device float4* out = (device float4*)(x + position.y * args.dim + column);
  float4 sum = 0.0f;
  for (uint i = 0; i < args.used; ++i)
    sum += routes[i].factor * *(device const float4*)(y + routes[i].place * args.dim + column);
  *out += sum;
}

// y[route][row] = w[expert][row] . x[route] + bias[expert][row]. A simdgroup computes 32 / lanes_per_row
// rows.
template <typename W>
kernel void matvec_experts(device const uchar* w [[buffer(0)]],       // [experts][out_dim][in_dim]
                           device const float* bias [[buffer(1)]],    // [experts][out_dim]
                           device const float* x [[buffer(2)]],       // [routes][in_dim]
                           device const Route* routes [[buffer(3)]],  // [routes]
                           device float* y [[buffer(4)]],             // [routes][out_dim]
                           constant ExpertsArgs& args [[buffer(5)]], SIMDGROUP_ARGUMENTS(uint2)) {
  const ushort lanes = args.lanes_per_row;
  const uint row = (group.x * simdgroups + simdgroup) * (32 / lanes) + lane / lanes, last = args.out_dim - 1;
  const uint of_expert = routes[group.y].expert * args.out_dim + min(row, last);
  Products<W, 1, 1> products;
  products.row[0] = stacked_row(w, args.weights, of_expert);
  products.token[0] = {x + group.y * args.in_dim};
  products.multiply(args.in_dim, lane, lanes);
  const float total = products.total(0, 0, lanes);
  if (lane % lanes == 0 && row <= last)
    y[group.y * args.out_dim + row] = args.has_bias ? total + bias[of_expert] : total;
}

// y[route][row] = activation(gate[expert][row] . x) * (up[expert][row] . x), with the row of x of the route,
// and biases added to both products. Without gates: activation(up[expert][row] . x), for which both products
// are the same.
template <typename W>
kernel void matvec_experts_swiglu(device const uchar* w [[buffer(0)]],       // [2][experts][out_dim][in_dim]
                                  device const float* bias [[buffer(1)]],    // [2][experts][out_dim]
                                  device const float* x [[buffer(2)]],       // [tokens][in_dim]
                                  device const Route* routes [[buffer(3)]],  // [routes]
                                  device float* y [[buffer(4)]],             // [routes][out_dim]
                                  constant ExpertsArgs& args [[buffer(5)]], SIMDGROUP_ARGUMENTS(uint2)) {
  const ushort lanes = args.lanes_per_row;
  const uint row = (group.x * simdgroups + simdgroup) * (32 / lanes) + lane / lanes, last = args.out_dim - 1;
  const uint of_expert = routes[group.y].expert * args.out_dim + min(row, last);
  Products<W, 2, 1> products;
  products.row[0] = half_row(w, args.weights, 0, of_expert);
  products.row[1] = half_row(w, args.weights, has_gates(args.weights) ? 1 : 0, of_expert);
  products.token[0] = {x + group.y / args.used * args.in_dim};
  products.multiply(args.in_dim, lane, lanes);
  const float gate = products.total(0, 0, lanes), up = products.total(1, 0, lanes);
  if (lane % lanes != 0 || row > last) return;
  const float first = args.has_bias ? gate + bias[of_expert] : gate;
  const float second =
      args.has_bias && has_gates(args.weights) ? up + bias[args.weights.rows[0] + of_expert] : up;
  y[group.y * args.out_dim + row] = has_gates(args.weights) ? activate_gated(first, second, args.activation)
                                                            : activate(first, args.activation);
}

#define INSTANCES(name, W)                             \
  INSTANCE("choose_experts_" #name, choose_experts<W>) \
  INSTANCE("matvec_experts_" #name, matvec_experts<W>) \
  INSTANCE("matvec_experts_swiglu_" #name, matvec_experts_swiglu<W>)
#define INSTANTIATE(name, W, number) IF_WANTED(name)(INSTANCES(name, W))
EACH_TENSOR_TYPE(INSTANTIATE)
