// Attention over the cache layouts that every instruction set supports.
#pragma once

#include "tile_attention_f32.h"
#include "tile_attention_lanes.h"
#include "tile_attention_q8.h"

namespace metal_prefill::cpu {
namespace {

void attention(const AttentionHead& head, int first, int count) {
  if (head.layout == KvLayout::kFloat)
    attention_of<StoredSpan<float>, StoredSpan<float>>(head, first, count);
  else if (head.layout == KvLayout::kHalf)
    attention_of<StoredSpan<std::uint16_t>, WidenedSpan>(head, first, count);
  else
    attention_q8(head, first, count);
}

}  // namespace
}  // namespace metal_prefill::cpu
