// The stacked rows of a tile of attention_prefill: their tokens, heads and visible keys, ALiBi, and sinks.
#pragma once

#include <metal_stdlib>

#include "args.h"
#include "position_bias.h"
#include "soft_cap.h"

using namespace metal;

constant constexpr float kLowest = -1e30f;  // below every score, and finite, so that differences are numbers
// The score of a key that a row does not see. Its weight is 0, even if the row sees no key and the maximum is
// kLowest. It is finite, as the fast exponential does not support infinities.
constant constexpr float kUnseen = 2.0f * kLowest;

// Row `first + i` of a run is head `row % heads` of token `row / heads`, if `heads` share a KV head.
struct StackedRow {
  uint token, head, position;
  uint first_key, last_key;  // keys that the row sees
  float cap;                 // soft limit of base-2 logarithms; 0 if there is none
  float slope;               // of ALiBi: decrease of a base-2 logarithm per position between query and key
  bool inside;               // whether the row exists; otherwise it repeats the last row
  device const float* bias;  // of relative positions for this head, [BIAS_BUCKETS][n_heads]; null: none
  uint bias_stride;
  device const float* added;  // addends of the scores of keys; null: none
  float sink;                 // base-2 logarithm of a weight without a value

  // Score of a key, from its scaled product with the query.
  float score(float product, uint key) const {
    if (key < first_key || key > last_key) return kUnseen;
    if (cap > 0.0f) product = soft_cap(product, cap);
    const int distance = int(key) - int(position);
    if (bias) product += M_LOG2E_F * bias[uint(position_bucket(distance)) * bias_stride];
    if (added) product += added[key];
    return product - slope * abs(float(distance));
  }

  // The divisor of weighted values, given the sum of the weights, which are relative to the score `best`. A
  // row that sees no key is divided by infinity. `best` is the maximum over keys alone: relative to a larger
  // sink, weights in half precision would lose digits. Beyond the limit of 2^120 the quotient is about 0.
  float divisor(float sum, float best) const {
    const float power = sink - best;  // NaN passes through
    return first_key <= last_key ? sum + fast::exp2(power > 120.0f ? 120.0f : power) : INFINITY;
  }
};

struct StackedRows {
  AttentionTile tile;
  uint heads, count;  // count: rows of the run
  device const float *bias, *added, *sinks;
  uint before, after;  // keys that a row sees before and after its own; both bounds ascend from row to row

  // `additions` is a bias of relative positions, or an addend of the score of each key.
  void begin(AttentionTile of, constant AttentionArgs& args, device const float* additions,
             device const float* sinks_of_heads) {
    tile = of;
    sinks = args.has_sinks ? sinks_of_heads : nullptr;
    bias = args.position_bias ? additions : nullptr;
    added = args.added_keys > 0 ? additions : nullptr;
    heads = args.n_heads / args.n_kv_heads;
    count = heads * tile.tokens;
    before = args.window == 0 ? tile.position + tile.tokens
             : args.both_ways ? args.window / 2
                              : args.window - 1;
    after = !args.both_ways ? 0 : args.window == 0 ? tile.end : args.window / 2;
  }

  StackedRow row(uint i, uint kv_head, constant AttentionArgs& args) const {
    StackedRow found;
    const uint r = min(tile.first + i, count - 1);
    found.inside = tile.first + i < count;
    found.token = r / heads;
    found.head = kv_head * heads + r % heads;
    found.position = tile.position + found.token;
    found.first_key = found.position > before ? found.position - before : 0;
    found.last_key = min(found.position + after, tile.end - 1);
    found.bias = bias ? bias + found.head : nullptr;
    found.bias_stride = args.n_heads;
    found.cap = args.score_cap * M_LOG2E_F;
    const ulong head = ulong(tile.row + found.token) * args.n_heads + found.head;
    found.added = added ? added + head * args.added_keys : nullptr;
    found.sink = sinks ? M_LOG2E_F * sinks[found.head] : kUnseen;
    found.slope = 0.0f;
    if (args.alibi_heads > 0) {
      const float steps =
          found.head < args.alibi_heads ? float(found.head + 1) : float(found.head - args.alibi_heads) + 0.5f;
      found.slope = M_LOG2E_F * fast::exp2(-args.max_alibi_bias * steps / float(args.alibi_heads));
    }
    return found;
  }

  // The first key that any row of the tile sees, and the end of the keys that the last of `rows` rows sees.
  uint first_key() const {
    const uint position = tile.position + tile.first / heads;
    return position > before ? position - before : 0;
  }
  uint end_key(uint rows) const {
    const uint last = last_token(rows);
    return min(tile.position + last + after, tile.end - 1) + 1;
  }
  // The keys that every row sees: the first, and the end.
  uint2 seen_by_all(uint rows) const {
    const uint position = tile.position + last_token(rows);
    return uint2(position > before ? position - before : 0,
                 min(tile.position + tile.first / heads + after, tile.end - 1) + 1);
  }

 private:
  uint last_token(uint rows) const { return min(tile.first + rows - 1, count - 1) / heads; }
};
