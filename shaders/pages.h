// K and V in pages: where a position is.
#pragma once

#include <metal_stdlib>

#include "args.h"

using namespace metal;

// The page that holds `position`, by the block table of its sequence. `pool` is where K or V of a layer begin
// in the first page.
template <typename T>
static inline device T* page_at(device T* pool, device const uint* block_table, uint position,
                                uint page_stride) {
  return pool + ulong(block_table[position / PAGE_POSITIONS]) * page_stride;
}
