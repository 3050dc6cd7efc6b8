// The positions of a sequence in splits, each with a softmax of its own.
//
// Splits begin at fixed positions, and what they give is added up in their order. So a token's attention has
// the same bits whether one thread goes through all of its positions, as in a prompt, or several share them.
#pragma once

#include <algorithm>

#include "tile_rows.h"

namespace metal_prefill::cpu {
namespace {

// Calls body(positions, last) for each split that is asked for, with those of its positions that rows see.
template <typename Body>
inline void each_split(const AttentionHead& head, Sight sight, Body&& body) {
  const auto of_split = [&](int split) {
    return Sight{std::max(sight.begin, split * kSplitPositions),
                 std::min(sight.end, (split + 1) * kSplitPositions)};
  };
  if (head.sums) return body(of_split(head.split), false);
  for (int split = sight.begin / kSplitPositions; split * kSplitPositions < sight.end; ++split)
    body(of_split(split), (split + 1) * kSplitPositions >= sight.end);
}

// Adds a split of a row, its sum of weights and `acc`, that of weights times values, to the splits before in
// `row` and `out`. After the last one, `out` is divided by the sum of weights.
inline void add_split(SoftmaxSum split, const float* acc, int dim, bool last, SoftmaxSum& row, float* out) {
  const bool sees = split.sum != 0, saw = row.sum != 0;  // NaN is something
  if (!sees && !last) return;
  F before = Simd::set(1), now = Simd::set(1);
  if (sees && saw) {
    const float shift = std::max(row.shift, split.shift);
    before = exp2(Simd::set(row.shift - shift));
    now = exp2(Simd::set(split.shift - shift));
    float sums[Simd::kLanes];
    Simd::store(sums, Simd::fma(Simd::set(row.sum), before, Simd::mul(Simd::set(split.sum), now)));
    row = {shift, sums[0]};
  } else if (sees) {
    row = split;
  }
  const F scale = Simd::set(last ? 1 / row.sum : 1);
  for (int d = 0; d < dim; d += Simd::kLanes) {
    const int left = dim - d;
    F sum = saw ? load_part(out + d, left) : load_part(acc + d, left);
    if (sees && saw) sum = Simd::fma(sum, before, Simd::mul(load_part(acc + d, left), now));
    store_part(out + d, Simd::mul(sum, scale), left);
  }
}

// The same for a row of an item, token * heads + head; `acc` is filled up to the stride of values.
inline void add_split(const AttentionHead& head, int row, SoftmaxSum split, const float* acc, bool last,
                      SoftmaxSum& total) {
  const std::size_t token = std::size_t(row / head.heads), h = std::size_t(row % head.heads);
  add_split(split, acc, head.value_dim, last, total,
            head.out + token * head.out_stride + h * std::size_t(head.value_dim));
  if (head.sums) head.sums[token * head.sums_stride + h] = total;
}

void combine_splits(const float* results, std::size_t results_stride, const SoftmaxSum* sums,
                    std::size_t sums_stride, int count, int value_dim, float* out) {
  SoftmaxSum row = {};
  for (int i = 0; i < count; ++i, results += results_stride, sums += sums_stride)
    add_split(*sums, results, value_dim, i + 1 == count, row, out);
}

}  // namespace
}  // namespace metal_prefill::cpu
