// Attention over a cache of each layout that every instruction set takes.
#pragma once

#include "tile_attention_f32.h"
#include "tile_attention_q8.h"

namespace metal_prefill::cpu {
namespace {

void attention(const AttentionHead& head, int first, int count) {
  const int row = first * head.heads, end = (first + count) * head.heads;
  if (head.layout == KvLayout::kFloat)
    attention_rows<StoredSpan<float>, StoredSpan<float>>(head, row, end);
  else if (head.layout == KvLayout::kHalf)
    attention_rows<StoredSpan<std::uint16_t>, WidenedSpan>(head, row, end);
  else
    attention_q8(head, first, count);
}

}  // namespace
}  // namespace metal_prefill::cpu
