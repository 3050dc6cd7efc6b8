// Splits of the positions of a sequence, each with its own softmax.
//
// Splits begin at fixed positions, and their results are combined in order, so that a token's attention is
// bit-identical for one thread, as in a prompt, and for several that share its positions.
#pragma once

#include <algorithm>
#include <limits>

#include "row_ops.h"

namespace metal_prefill::cpu {
namespace {

// Calls body(positions, last) for each requested split, with its visible positions.
template <typename Body>
inline void each_split(const AttentionHead& head, VisibleRange visible, Body&& body) {
  const auto of_split = [&](int split) {
    return VisibleRange{std::max(visible.begin, split * kSplitPositions),
                        std::min(visible.end, (split + 1) * kSplitPositions)};
  };
  if (head.sums) return body(of_split(head.split), false);
  for (int split = visible.begin / kSplitPositions; split * kSplitPositions < visible.end; ++split)
    body(of_split(split), (split + 1) * kSplitPositions >= visible.end);
}

// Inverse of a sum of weights. The sum is 0 in rows that see no position, whose results are 0.
inline F inverse_sum(F sum) {
  return 1.0f / Simd::max(Simd::set(std::numeric_limits<float>::min()), sum);
}

// The sum of weights before the first position. A sink counts as an earlier score without a value; null:
// there is none.
inline SoftmaxSum first_sum(const float* sink) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (!sink) return {-kLargest, 0};
  return {std::clamp(*sink * kLog2E, -kLargest, kLargest), 1};
}

// The first sum of query head h of the group. Sums of a single split have no sinks.
inline SoftmaxSum first_sum(const AttentionHead& head, std::size_t h) {
  return first_sum(head.sinks && !head.sums ? head.sinks + h : nullptr);
}

// Combined splits of kRows rows so far, one row per lane.
template <int kRows>
struct SplitSums {
  static constexpr int kPadded = round_up(kRows, Simd::kLanes);
  float shift[kPadded] = {}, sum[kPadded] = {};  // of the softmax
  float before[kPadded], now[kPadded];           // factors of a row's previous sums, and of the split's
  float scale[kPadded];                          // of both: 1, or after the last split the inverse of the sum
  float* out[kRows];                             // weights times values

  void begin_row(int r, float* to, int dim, SoftmaxSum first) {
    shift[r] = first.shift;
    sum[r] = first.sum;
    out[r] = to;
    std::fill_n(to, dim, 0.0f);
  }

  // Adds the sums of a split for the first `rows` rows; lanes after those are ignored.
  void add(const float* split_shift, const float* split_sum, int rows, bool last) {
    for (int r = 0; r < rows; r += Simd::kLanes) {
      const F old_shift = Simd::load(shift + r), next_shift = Simd::load(split_shift + r);
      const F new_shift = Simd::max(next_shift, old_shift);
      const F old_factor = exp2(old_shift - new_shift);
      const F next_factor = exp2(next_shift - new_shift);
      const F weights = Simd::fma(Simd::load(sum + r), old_factor, Simd::load(split_sum + r) * next_factor);
      Simd::store(shift + r, new_shift);
      Simd::store(sum + r, weights);
      Simd::store(before + r, old_factor);
      Simd::store(now + r, next_factor);
      Simd::store(scale + r, last ? inverse_sum(weights) : Simd::set(1));
    }
  }

  // Adds the split's sum of weights times values of row r, `acc`.
  void add_row(int r, const float* acc, int dim) const {
    const F old_factor = Simd::set(before[r]), next_factor = Simd::set(now[r]), both = Simd::set(scale[r]);
    for (int d = 0; d < dim; d += Simd::kLanes) {
      const F old = load_part(out[r] + d, dim - d), next = load_part(acc + d, dim - d);
      const F weighted = Simd::fma(old, old_factor, next * next_factor);
      store_part(out[r] + d, weighted * both, dim - d);
    }
  }
};

// Token and head of a row of an item: row = token * heads + head.
struct TokenAndHead {
  std::size_t token, head;
};
inline TokenAndHead token_and_head(const AttentionHead& of, int row) {
  return {std::size_t(row / of.heads), std::size_t(row % of.heads)};
}

// Whether the scores of an item are more than q.k.
inline bool has_score_terms(const AttentionHead& head) {
  return head.cap != 0 || head.slopes || head.bias || head.added;
}

// Caps the scores of a row of an item for `n` positions of a span, and adds the other terms. Not inlined: few
// models have such terms, and each copy would take registers from a loop over all spans.
[[gnu::noinline]] void add_score_terms(const AttentionHead& head, int row, int span, int n, float* scores) {
  const auto [token, h] = token_and_head(head, row);
  const int first = span * kKeySpan, own = head.position + int(token) - first;
  const auto add = [&](const float* terms) {
    for (int i = 0; i < n; ++i) scores[i] += terms[i];
  };
  if (head.cap != 0) soft_cap(scores, head.cap * kLog2E, n);
  if (head.slopes) {
    const float slope = head.slopes[h] * kLog2E;
    for (int i = 0; i < n; ++i) scores[i] -= slope * std::fabs(float(i - own));
  }
  if (head.bias) add(head.bias + h * kBiasRow + std::clamp(-own, -kBiasMargin, BIAS_REACH));
  if (head.added) add(head.added + std::size_t(row) * head.added_stride + first);
}

// Begins `rows` rows of an item, from `row` on.
template <int kRows>
void begin_rows(const AttentionHead& head, int row, int rows, SplitSums<kRows>& splits) {
  for (int r = 0; r < rows; ++r) {
    const auto [token, h] = token_and_head(head, row + r);
    splits.begin_row(r, head.out + token * head.out_stride + h * std::size_t(head.value_dim), head.value_dim,
                     first_sum(head, h));
  }
}

// Adds a split of these rows: shifts and sums of the softmax, and `acc`, [rows][acc_stride], sums of weights
// times values.
template <int kRows>
void add_split(const AttentionHead& head, int row, int rows, const float* shift, const float* sum,
               const float* acc, int acc_stride, bool last, SplitSums<kRows>& splits) {
  splits.add(shift, sum, rows, last);
  for (int r = 0; r < rows; ++r) splits.add_row(r, acc + r * acc_stride, head.value_dim);
  if (!head.sums) return;
  for (int r = 0; r < rows; ++r) {
    const auto [token, h] = token_and_head(head, row + r);
    head.sums[token * head.sums_stride + h] = {splits.shift[r], splits.sum[r]};
  }
}

// Stores the rows of an item that has only one split, with the same bits as begin_rows() and add_split().
inline void divide_split(const AttentionHead& head, int row, int rows, const float* sum, const float* acc,
                         int acc_stride) {
  float scales[Simd::kLanes];
  for (int r = 0; r < rows; ++r, acc += acc_stride) {
    if (r % Simd::kLanes == 0) Simd::store(scales, inverse_sum(load_part(sum + r, rows - r)));
    const auto [token, h] = token_and_head(head, row + r);
    float* out = head.out + token * head.out_stride + h * std::size_t(head.value_dim);
    const F scale = Simd::set(scales[r % Simd::kLanes]);
    for (int d = 0; d < head.value_dim; d += Simd::kLanes) {
      const int left = head.value_dim - d;
      store_part(out + d, (load_part(acc + d, left) + 0.0f) * scale, left);
    }
  }
}

void combine_splits(const float* results, std::size_t results_stride, const SoftmaxSum* sums,
                    std::size_t sums_stride, int count, int value_dim, const float* sink, float* out) {
  SplitSums<1> row;
  row.begin_row(0, out, value_dim, first_sum(sink));
  for (int i = 0; i < count; ++i, results += results_stride, sums += sums_stride) {
    const float shift[Simd::kLanes] = {sums->shift}, sum[Simd::kLanes] = {sums->sum};
    row.add(shift, sum, 1, i + 1 == count);
    row.add_row(0, results, value_dim);
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
