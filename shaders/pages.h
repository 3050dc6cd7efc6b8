// Addresses of positions in pages of K and V.
#pragma once

#include <metal_stdlib>

#include "args.h"

using namespace metal;

// The page that contains `position`, by the block table of its sequence. `pool` points to K or V of a layer
// in the first page.
template <typename T>
static inline device T* page_at(device T* pool, device const uint* block_table, uint position,
                                uint page_stride) {
  return pool + ulong(block_table[position / PAGE_POSITIONS]) * page_stride;
}
