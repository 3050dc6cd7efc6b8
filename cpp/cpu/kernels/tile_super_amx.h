// Products with the integer scales of super-blocks, such as K-quants, on the matrix unit.
//
// A weight is unit * (code - zero) * scale - min_unit * min, where all but the units are integers. The
// integers (code - zero) * scale take 16 bits at most: two planes of bytes, high * 2^n + low. Activations
// have one scale for the 256 columns of a super-block, so that a plane is summed in its tile over all of
// them, 16 tokens by 16 rows, and stored once. They also have a zero point, which makes their steps smaller
// and adds the sum of the weights times a factor of the token to a product. Sums of both planes are joined as
// integers. Minima multiply the sums of activations; these are integers below 2^24, which products of
// bfloat16 add up exactly. Results therefore do not depend on the order of sums, and are the same for few
// tokens, which vectors multiply.
//
// Two tiles of tokens share each load of weights. docs/cpu_kernels.md has the measurements.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "amx_tiles.h"
#include "simd_avx512.h"
#include "tile_narrow.h"

namespace metal_prefill::cpu {
namespace {

constexpr int kFewSuperTokens = 7;     // maximum tokens for which unpacking costs more than it saves
constexpr int kSuperTokens = 4;        // tokens that vectors multiply together
constexpr int kSuperTokenBlock = 192;  // tokens whose sums are in memory together

// Division of a type's integers into planes.
enum class Planes {
  kOne,      // a single plane of bytes
  kByScale,  // codes times the lowest three bits of scales, and codes times the other bits
  kByBytes,  // low and high bytes
};
template <class Block>
constexpr Planes planes_of() {
  constexpr int kCodes = (1 << Block::kBits) - 1;
  if constexpr (Block::kIsTable || Block::kZero != 0) {
    return Planes::kByBytes;
  } else if constexpr (requires(Block b) { b.scale_and_min; }) {
    static_assert(kCodes * 15 <= 255);
    return Planes::kOne;
  } else {
    static_assert(kCodes * 7 <= 255);
    return Planes::kByScale;
  }
}
template <class Block>
constexpr Planes kPlanesOf = planes_of<Block>();
template <class Block>
constexpr int kPlanes = kPlanesOf<Block> == Planes::kOne ? 1 : 2;

// Weights of 16 rows and a super-block of columns.
struct alignas(64) SuperPanel {
  std::uint8_t planes[2][kSuperCols / kTileRowBytes][kTileRowBytes / 4][kPanelRows][4];
  std::uint16_t mins[kSuperSums][kPanelRows][2];  // bfloat16, repeated
  float unit[kPanelRows], minus_min_unit[kPanelRows];
  float weight_sum[kPanelRows];
};

template <class Block>
inline F minus_min_units(const Block& block, int row) {
  if constexpr (kNarrowMin<Block>)
    return 0.0f - load_floats(block.min_unit + row);
  else
    return Simd::set(0);
}

// Computes both planes of four columns of 16 rows. `scales` has a scale in the lowest byte of each lane.
template <class Block>
struct PlaneFactors {
  I first, second;  // factors of codes for both planes, or for even and odd columns
  I zero;           // the scale times the zero point of codes, in 16 bits

  explicit PlaneFactors(I scales) {
    const auto in_words = [](I x) { return Simd::or_int(x, _mm512_slli_epi32(x, 16)); };
    if constexpr (kPlanesOf<Block> == Planes::kOne) {
      first = in_words(scales);
    } else if constexpr (kPlanesOf<Block> == Planes::kByScale) {
      first = in_words(Simd::field<3, 0, 0>(scales));
      second = in_words(_mm512_srli_epi32(scales, 3));
    } else {
      first = in_words(_mm512_and_si512(scales, Simd::set_int(255)));
      second = _mm512_slli_epi16(first, 8);
      zero = _mm512_maddubs_epi16(_mm512_set1_epi8(char(Block::kZero)), first);
    }
  }
  // Products of unsigned bytes below 256 do not carry into the other byte of a word.
  void store(I codes, std::uint8_t* low, std::uint8_t* high) const {
    if constexpr (kPlanesOf<Block> != Planes::kByBytes) {
      Simd::store_codes(low, _mm512_mullo_epi16(codes, first));
      if constexpr (kPlanes<Block> == 2) Simd::store_codes(high, _mm512_mullo_epi16(codes, second));
    } else {
      constexpr int kSelect = 0xca;  // bits of the second operand if the first has a 1, else of the third
      const I low_bytes = _mm512_set1_epi16(255);
      const I even = _mm512_sub_epi16(_mm512_maddubs_epi16(codes, first), zero);
      const I odd = _mm512_sub_epi16(_mm512_maddubs_epi16(codes, second), zero);
      Simd::store_codes(low, _mm512_ternarylogic_epi32(low_bytes, even, _mm512_slli_epi16(odd, 8), kSelect));
      Simd::store_codes(high, _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(even, 8), odd, kSelect));
    }
  }
};

// Sums the weights of 16 rows in a super-block, one row per lane.
template <class Block>
class WeightSum {
 public:
  // Adds codes of four columns in half `half` of the current span.
  void add_codes(int half, I codes) { codes_[half] = Simd::dot<Block::kZero>(codes_[half], codes, ones()); }
  void end_span(const I (&scales)[2]) {
    if constexpr (kBlockSums<typename Block::Wide> == 2) {
      for (int half = 0; half < 2; ++half)
        sum_ = Simd::add_int(sum_, _mm512_mullo_epi32(codes_[half], scales[half]));
    } else {
      sum_ = Simd::add_int(sum_, _mm512_mullo_epi32(Simd::add_int(codes_[0], codes_[1]), scales[0]));
    }
    codes_[0] = codes_[1] = start();
  }
  void add_mins(I first, I second) { mins_ = Simd::add_int(mins_, Simd::add_int(first, second)); }

  F times(F unit, F minus_min_unit) const {
    const F sum = Simd::to_float(sum_) * unit;
    if constexpr (!kNarrowMin<Block>) return sum;
    return Simd::fma(Simd::to_float(Simd::shift_left<4>(mins_)), minus_min_unit, sum);  // of 16 columns
  }

 private:
  static I ones() { return _mm512_set1_epi8(1); }
  static I start() { return Simd::set_int(-16 * Block::kZero); }

  I codes_[2] = {start(), start()};
  I sum_ = Simd::set_int(0), mins_ = Simd::set_int(0);
};

// Unpacks 16 rows of a super-block. Calls fetch(span) before each span.
template <class Block, typename Fetch>
void unpack(const Block& block, int panel, I table, SuperPanel& out, Fetch&& fetch) {
  const int row = panel * kPanelRows;
  WeightSum<Block> weight_sum;
#pragma GCC unroll 1
  for (int span = 0; span < kSuperSpans; ++span) {
    fetch(span);
    // Computed before the first store: if both halves are equal, compilers load and compute them once.
    const I scales[2] = {scale_codes(block, span, 0, row), scale_codes(block, span, 1, row)};
    const PlaneFactors<Block> factors[2] = {PlaneFactors<Block>(scales[0]), PlaneFactors<Block>(scales[1])};
    if constexpr (kNarrowMin<Block>) {
      const I mins[2] = {min_codes(block, span, 0, row), min_codes(block, span, 1, row)};
      weight_sum.add_mins(mins[0], mins[1]);
      for (int half = 0; half < 2; ++half) {
        const I bits = _mm512_castps_si512(Simd::to_float(mins[half]));
        _mm512_store_si512(out.mins[2 * span + half], Simd::or_int(bits, _mm512_srli_epi32(bits, 16)));
      }
    }
    unrolled<8>([&](auto step) ALWAYS_INLINE {
      const int quad = span * 8 + step;
      const I codes = narrow_codes<Block, step>(block.codes[span][panel], 0, table);
      weight_sum.add_codes(step / 4, codes);
      factors[step / 4].store(codes, out.planes[0][quad / 16][quad % 16][0],
                              out.planes[1][quad / 16][quad % 16][0]);
    });
    weight_sum.end_span(scales);
  }
  const F unit = load_floats(block.scale_unit + row), minus_min_unit = minus_min_units(block, row);
  Simd::store(out.unit, unit);
  Simd::store(out.minus_min_unit, minus_min_unit);
  Simd::store(out.weight_sum, weight_sum.times(unit, minus_min_unit));
}

// before + scale * (the sums of a super-block, of its minima, and of its weights times the zero point), for
// token `t` of a tile.
template <class Block>
inline ALWAYS_INLINE F add_super(F before, I sum, F unit, F min_sum, F minus_min_unit, F weight_sum,
                                 const SuperTile& tile, int t) {
  F total = Simd::to_float(sum) * unit;
  if constexpr (kNarrowMin<Block>) total = Simd::fma(min_sum, minus_min_unit, total);
  total = Simd::fma(weight_sum, Simd::set(tile.minus_zero[t]), total);
  return Simd::fma(total, Simd::set(tile.scale[t]), before);
}

// Adds the products of a panel and `tiles` tiles of tokens to acc[t][r]. Tiles are `step` apart in x.
template <class Block>
void multiply_panel(const SuperPanel& panel, const SuperTile* x, std::size_t step, int tiles,
                    float (*acc)[kPanelRows]) {
  // Tiles 0 to 3: sums of both planes, of two tiles of tokens. Products of minima are stored while the unit
  // multiplies other tiles; those of the next two tiles are then in the other half of min_sums.
  constexpr int kA = 4, kMins = 5, kLow = 6, kHigh = 7;
  constexpr int kSteps = kSuperCols / kTileRowBytes;
  constexpr int kShift = kPlanesOf<Block> == Planes::kByScale ? 3 : 8;
  alignas(64) std::int32_t sums[2][2][kTileTokens][kPanelRows];
  alignas(64) float min_sums[2][2][kTileTokens][kPanelRows];
  const auto zero = []() ALWAYS_INLINE { unrolled<4>([](auto tile) ALWAYS_INLINE { zero_tile<tile>(); }); };
  const auto multiply_tile = [&]<int kSecond>(const SuperTile& tile, int part,
                                              std::integral_constant<int, kSecond>) ALWAYS_INLINE {
    constexpr int kC = 2 * kSecond;
    load_tile<kA, kTileTokens, kTileRowBytes>(tile.q[part]);
    multiply_unsigned_tiles<kC, kA, kLow>();
    if constexpr (kPlanesOf<Block> == Planes::kByScale)
      multiply_unsigned_tiles<kC + 1, kA, kHigh>();
    else if constexpr (kPlanes<Block> == 2)
      multiply_tiles<kC + 1, kA, kHigh>();
  };
  constexpr std::integral_constant<int, 0> kFirst;
  constexpr std::integral_constant<int, 1> kSecond;
  const auto multiply_mins = [&](const SuperTile& tile) ALWAYS_INLINE {
    zero_tile<kMins>();
    load_tile<kA, kTileTokens, kTileRowBytes>(tile.pair_sums);
    load_tile<kLow, kTileRowBytes / 4, kTileRowBytes>(panel.mins);
    multiply_pair_tiles<kMins, kA, kLow>();
  };
  const auto start = [&](const SuperTile* pair, int part, bool two, auto& sums_of_mins) ALWAYS_INLINE {
    if constexpr (kNarrowMin<Block>) {
      if (part == 0) multiply_mins(*pair);
      if (part == 1) store_tile_rows<kMins>(sums_of_mins[0], kTileRowBytes);
      if (part == 2 && two) multiply_mins(pair[step]);
      if (part == 3 && two) store_tile_rows<kMins>(sums_of_mins[1], kTileRowBytes);
    }
    load_tile<kLow, kTileRowBytes / 4, kTileRowBytes>(panel.planes[0][part]);
    if constexpr (kPlanes<Block> == 2)
      load_tile<kHigh, kTileRowBytes / 4, kTileRowBytes>(panel.planes[1][part]);
    multiply_tile(*pair, part, kFirst);
    if (two) multiply_tile(pair[step], part, kSecond);
  };
  const auto finish = [&]<int kSecond>(std::integral_constant<int, kSecond>) ALWAYS_INLINE {
    store_tile<2 * kSecond>(sums[kSecond][0]);
    if constexpr (kPlanes<Block> == 2) store_tile<2 * kSecond + 1>(sums[kSecond][1]);
  };
  const F unit = Simd::load(panel.unit);
  zero();
  unrolled<kSteps>([&](auto part) ALWAYS_INLINE { start(x, part, tiles > 1, min_sums[0]); });
  for (int half = 0; tiles > 0; tiles -= 2, x += 2 * step, acc += 2 * kTileTokens, half ^= 1) {
    const bool two = tiles > 1;
    finish(kFirst);
    if (two) finish(kSecond);
    if (tiles > 2) zero();
    // The unit multiplies the next two tiles while the sums of these are added.
    unrolled<kSteps>([&](auto part) ALWAYS_INLINE {
      if (tiles > 2) start(x + 2 * step, part, tiles > 3, min_sums[half ^ 1]);
      constexpr int kSecond = part / 2, kTokens = kTileTokens / 2;
      if (kSecond == 1 && !two) return;
      unrolled<kTokens>([&](auto i) ALWAYS_INLINE {
        constexpr int t = part % 2 * kTokens + i;
        I sum = _mm512_load_si512(sums[kSecond][0][t]);
        if constexpr (kPlanes<Block> == 2)
          sum = Simd::add_int(Simd::shift_left<kShift>(_mm512_load_si512(sums[kSecond][1][t])), sum);
        float* total = acc[kSecond * kTileTokens + t];
        Simd::store(total,
                    add_super<Block>(Simd::load(total), sum, unit, Simd::load(min_sums[half][kSecond][t]),
                                     Simd::load(panel.minus_min_unit), Simd::load(panel.weight_sum),
                                     x[kSecond * step], t));
      });
    });
  }
}

// Multiplies tokens [first, first + count) in whole tiles, at most kSuperTokenBlock with skipped ones.
template <class Block>
void super_tiles(const PackedMatrix& weight, int group, const SuperRows& x, int first, int count, float* out,
                 std::size_t stride) {
  keep_tile_config<kTileRowBytes>();
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  const int n_blocks = weight.blocks_per_row(), skipped = first % kTileTokens;
  const int tiles = ceil_div(skipped + count, kTileTokens);
  const I table = load_table(weight.table);
  SuperPanel panel;
  alignas(64) float acc[2][kSuperTokenBlock][kPanelRows];
  for (auto& sums : acc) std::memset(sums, 0, std::size_t(tiles) * sizeof(float[kTileTokens][kPanelRows]));
  for (int b = 0; b < n_blocks; ++b)
    for (int p = 0; p < 2; ++p) {
      // Prefetches the next group, which is read after the products of this one, a few lines at a time: more
      // would delay each other.
      unpack(block[b], p, table, panel,
             [&](int span) { prefetch_span<2>(block + b, 2 * span + p, weight.group_bytes()); });
      multiply_panel<Block>(panel, x.tile(first) + b, std::size_t(n_blocks), tiles, acc[p]);
    }
  for (int t = 0; t < count; ++t, out += stride)
    for (int p = 0; p < 2; ++p) Simd::store(out + p * kPanelRows, Simd::load(acc[p][skipped + t]));
}

// Multiplies tokens [token, token + kTokens) of a tile, with the same integers in vectors. Lanes are rows.
template <class Block, int kTokens>
void super_tokens(const PackedMatrix& weight, int group, const SuperRows& x, int token, float* out,
                  std::size_t stride) {
  constexpr int kSums = kBlockSums<typename Block::Wide>;
  const auto* block = reinterpret_cast<const Block*>(weight.group(group));
  const SuperTile* tile = x.tile(token);
  const int lane = token % kTileTokens;
  const I table = load_table(weight.table);
  F acc[kTokens][2];
  unrolled<kTokens>([&](auto t) ALWAYS_INLINE { acc[t][0] = acc[t][1] = Simd::set(0); });
  for (int b = 0; b < weight.blocks_per_row(); ++b, ++block, ++tile) {
    I total[kTokens][2], mins[kTokens][2];
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < 2; ++p) total[t][p] = mins[t][p] = Simd::set_int(0);
    WeightSum<Block> weight_sum[2];
#pragma GCC unroll 1
    for (int span = 0; span < kSuperSpans; ++span) {
      prefetch_span(block, span, kFetchAhead);
      const auto* q = tile->q[span / 2] + lane;
      const std::int16_t(*sums)[kSuperSums] = tile->sums + lane;
      FOR_UNROLL (int p = 0; p < 2; ++p) {
        const int row = p * kPanelRows;
        I sum[kTokens][2];
        unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
          for (int half = 0; half < 2; ++half)
            sum[t][half] = Simd::set_int(-Block::kZero * sums[t][2 * span + half]);
        });
        unrolled<8>([&](auto step) ALWAYS_INLINE {
          const I codes = narrow_codes<Block, step>(block->codes[span][p], 0, table);
          weight_sum[p].add_codes(step / 4, codes);
          unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
            sum[t][step / 4] = Simd::dot<Block::kZero>(
                sum[t][step / 4], codes, Simd::broadcast4(q[t] + span % 2 * kBlockCols + 4 * step));
          });
        });
        const I scales[2] = {scale_codes(*block, span, 0, row), scale_codes(*block, span, 1, row)};
        weight_sum[p].end_span(scales);
        unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
          if constexpr (kSums == 2) {
            for (int half = 0; half < 2; ++half)
              total[t][p] = Simd::add_int(total[t][p], _mm512_mullo_epi32(sum[t][half], scales[half]));
          } else {
            const I both = Simd::add_int(sum[t][0], sum[t][1]);
            total[t][p] = Simd::add_int(total[t][p], _mm512_mullo_epi32(both, scales[0]));
          }
        });
        if constexpr (kNarrowMin<Block>) {
          // Pairs of 16-bit integers: the minima of both halves, times their sums.
          const I mins_of[2] = {min_codes(*block, span, 0, row), min_codes(*block, span, 1, row)};
          weight_sum[p].add_mins(mins_of[0], mins_of[1]);
          const I pair = Simd::or_int(mins_of[0], Simd::shift_left<16>(mins_of[1]));
          unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
            const I both = Simd::broadcast4(reinterpret_cast<const std::int8_t*>(sums[t] + 2 * span));
            mins[t][p] = _mm512_dpwssd_epi32(mins[t][p], pair, both);
          });
        }
      }
    }
    FOR_UNROLL (int p = 0; p < 2; ++p) {
      const F unit = load_floats(block->scale_unit + p * kPanelRows);
      const F minus_min_unit = minus_min_units(*block, p * kPanelRows);
      const F weights = weight_sum[p].times(unit, minus_min_unit);
      unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
        acc[t][p] = add_super<Block>(acc[t][p], total[t][p], unit, Simd::to_float(mins[t][p]), minus_min_unit,
                                     weights, *tile, lane + t);
      });
    }
  }
  unrolled<kTokens>([&](auto t) ALWAYS_INLINE {
    for (int p = 0; p < 2; ++p) Simd::store(out + std::size_t(t) * stride + p * kPanelRows, acc[t][p]);
  });
}

void multiply_super(const PackedMatrix& weight, int group, const SuperRows& x, int first, int count,
                    float* out, std::size_t stride) {
  visit_narrow(weight.packing, [&]<class Block>(std::type_identity<Block>) {
    if constexpr (kHasIntegerScales<Block>) {
      const bool few = count <= kFewSuperTokens;
      for (int done = 0, n; done < count; done += n) {
        const int token = first + done, left = count - done, skipped = token % kTileTokens;
        float* to = out + std::size_t(done) * stride;
        if (few) {
          const int share = ceil_div(left, ceil_div(left, kSuperTokens));  // as even as possible
          n = std::min(share, kTileTokens - skipped);
          with_count<kSuperTokens>(
              n, [&](auto tokens) { super_tokens<Block, tokens>(weight, group, x, token, to, stride); });
        } else {
          n = std::min(left, kSuperTokenBlock - skipped);
          super_tiles<Block>(weight, group, x, token, n, to, stride);
        }
      }
    }
  });
}

// Maps the values from the lowest to the highest, extended to include 0, to the integers from -128 to 127.
// NaN or infinity makes the scale NaN.
void quantize_super(const float* x, int token, int n_blocks, SuperTile* out) {
  constexpr int kVectors = kSuperCols / Simd::kLanes, kLowest = -128, kHighest = 127;
  for (int b = 0; b < n_blocks; ++b, ++out, x += kSuperCols) {
    F least = Simd::set(0), greatest = least, not_finite = least;
    for (int i = 0; i < kVectors; ++i) {
      const F value = Simd::load(x + i * Simd::kLanes);
      least = _mm512_min_ps(least, value);
      greatest = _mm512_max_ps(greatest, value);
      not_finite = Simd::fma(value, Simd::set(0), not_finite);
    }
    const float lowest = _mm512_reduce_min_ps(least);
    const float range = _mm512_reduce_max_ps(greatest) - lowest + _mm512_reduce_add_ps(not_finite);
    const F inverse = Simd::set(range > 0 ? (kHighest - kLowest) / range : 0.0f);
    const I zero = Simd::sub_int(Simd::set_int(kLowest), Simd::round(lowest * inverse));
    out->scale[token] = range / (kHighest - kLowest);
    out->minus_zero[token] = -_mm512_cvtss_f32(Simd::to_float(zero));
    std::int32_t sums[kSuperSums];
    for (int i = 0; i < kVectors; i += 4) {
      I rounded[4];
      for (int j = 0; j < 4; ++j) {
        const I steps = Simd::round(Simd::load(x + (i + j) * Simd::kLanes) * inverse);
        // If both ends of the range are ties, rounding may make them differ by 256.
        rounded[j] = _mm512_min_epi32(Simd::add_int(steps, zero), Simd::set_int(kHighest));
        Simd::store_int8(out->q[i / 4][token] + j * Simd::kLanes, rounded[j]);
      }
      std::int32_t four[4];
      Simd::reduce_add4(rounded, four);
      std::copy_n(four, 4, sums + i);
    }
    // Splits a sum into a multiple of 128 and the remainder, which bfloat16 holds exactly.
    const I sum = _mm512_loadu_si512(sums);
    const I low = Simd::sub_int(_mm512_and_si512(Simd::add_int(sum, Simd::set_int(64)), Simd::set_int(127)),
                                Simd::set_int(64));
    const I low_bits = _mm512_castps_si512(Simd::to_float(low)),
            high_bits = _mm512_castps_si512(Simd::to_float(Simd::sub_int(sum, low)));
    _mm512_store_si512(out->pair_sums[token], Simd::or_int(high_bits, _mm512_srli_epi32(low_bits, 16)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out->sums[token]), _mm512_cvtepi32_epi16(sum));
  }
}

}  // namespace
}  // namespace metal_prefill::cpu
