// The tile registers of AMX. The instructions are written out, because the compilers' own intrinsics do not
// name all the memory that they touch: according to GCC its _tile_loadconfig reads 8 bytes, so that stores to
// the other 56 may be dropped and the processor faults, and its _tile_loadd reads nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "unroll.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kTiles = 8;
constexpr int kTileRowBytes = 64;

// The 64 bytes that `ldtilecfg` reads.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0 to 3: C, 16 x 16 sums. 4 and 5: A, 16 tokens x depth. 6 and 7: B, depth x 16 weight rows, four of
// them in a row of the tile. `depth`: columns of a step.
constexpr TileConfig tile_config(int depth) {
  TileConfig config;
  for (int i = 0; i < kTiles; ++i) {
    config.row_bytes[i] = std::uint16_t(i == 4 || i == 5 ? depth : kTileRowBytes);
    config.rows[i] = std::uint8_t(i < 6 ? 16 : depth / 4);
  }
  return config;
}

// Read-only memory of the program: there are no stores that could be dropped.
template <int kDepth>
constexpr TileConfig kTileConfig = tile_config(kDepth);

// Not inlined, so that the instruction names the configuration itself and tests find it.
template <int kDepth>
__attribute__((noinline)) void load_tile_config() {
  asm volatile("ldtilecfg %0" : : "m"(kTileConfig<kDepth>));
}

// Columns of a step that the tiles of this thread are configured for; 0: released.
thread_local int tile_depth = 0;

// Configures the tiles of this thread, unless the last call did. `drop_tile_config` must follow before other
// code may use them.
template <int kDepth>
inline void keep_tile_config() {
  if (tile_depth == kDepth) return;
  load_tile_config<kDepth>();
  tile_depth = kDepth;
}
// Releases the tiles, which slow down context switches and the core while a thread keeps them.
inline void drop_tile_config() {
  if (tile_depth == 0) return;
  asm volatile("tilerelease");
  tile_depth = 0;
}

template <int kTile>
inline ALWAYS_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Loads kRows rows of kBytes bytes, kStride bytes apart.
template <int kTile, int kRows, int kBytes, int kStride = kBytes>
inline ALWAYS_INLINE void load_tile(const void* from) {
  using Memory = const char[(kRows - 1) * kStride + kBytes];
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(std::ptrdiff_t(kStride)), "i"(kTile), "m"(*static_cast<Memory*>(from)));
}

template <int kTile>
inline ALWAYS_INLINE void store_tile(std::int32_t (&to)[16][16]) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)"
               : "=m"(to)
               : "r"(to), "r"(std::ptrdiff_t(kTileRowBytes)), "i"(kTile));
}

// Loads sixteen full rows, `stride` bytes apart.
template <int kTile>
inline ALWAYS_INLINE void load_tile_rows(const void* from, std::size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline ALWAYS_INLINE void store_tile_rows(void* to, std::size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// C += A * B, pairs of bfloat16.
template <int kC, int kA, int kB>
inline ALWAYS_INLINE void multiply_pair_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// C += A * B, signed bytes.
template <int kC, int kA, int kB>
inline ALWAYS_INLINE void multiply_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// C += A * B, signed bytes by unsigned ones.
template <int kC, int kA, int kB>
inline ALWAYS_INLINE void multiply_unsigned_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace metal_prefill::cpu
