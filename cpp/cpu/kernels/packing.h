// Weights in the order in which the kernels read them.
//
// A quantized matrix is divided into groups of 32 rows; the group's blocks are contiguous, so that a product
// reads one linear stream. Within a span of 32 columns, codes are in two panels of 16 rows; a step of a panel
// is 64 bytes with four consecutive columns of each row, the operands of a 4-way dot product of any width. A
// weight is scale * (code - kZero) + min; some formats have no minimum.
//
// There are two kinds of blocks. Products of any number of tokens read wide ones. Narrow ones are about as
// large as the blocks of the file, so that a single token reads little; for more tokens they are widened
// first, once for all tokens.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../../base/rounding.h"
#include "../../model/model.h"

namespace metal_prefill::cpu {

constexpr int kGroupRows = 32;
constexpr int kPanelRows = 16;
constexpr int kBlockCols = 32;    // columns that share a scale of the activations
constexpr int kSuperSpans = 8;    // spans of 32 columns in a super-block
constexpr int kTableCodes = 16;   // integers that codes of 4 bits or fewer can select
constexpr int kSignedCodes = -1;  // replaces the zero point of codes
constexpr int kFloatPad = 16;     // columns of a block of floats
constexpr int kRotatedCols = 64;  // columns of a block of rotated rows
// Integer sums over this many columns fit: 127 * 127 * 131072 < 2^31.
constexpr int kMaxRotatedCols = 1 << 17;
// Largest 16-bit code with which sums of products over `cols` columns fit 32 bits.
inline int widest_code(int cols) {
  const double code = std::sqrt(2147483647.0 / round_up(cols, kRotatedCols));
  return code < 32767 ? int(code) : 32767;
}

// Every packed block, wide ones first: B(Name) for the enumerator kName and the struct NameBlock.
// clang-format off
#define METAL_PREFILL_EACH_BLOCK(B) \
  B(Nibble) B(NibbleMin) B(NibbleF16Min) B(Byte) B(ByteFloat) B(FiveBitByte) B(ByteMin) B(ByteHalves) \
  B(SixBitByteHalves) B(ByteHalvesMin) \
  B(Q5_0) B(Q5_1) B(IQ4_NL) B(MXFP4) B(Ternary) B(Q2_K) B(Q3_K) B(Q4_K) B(Q5_K) B(Q6_K) B(IQ4_XS) \
  B(IQ2_XXS) B(IQ2_XS) B(NVFP4)
// clang-format on

enum class Packing {
  kNone,
  kFloats,
  kPairs,
  kRotated,
  kRotatedWide,
#define METAL_PREFILL_BLOCK(Name) k##Name,
  METAL_PREFILL_EACH_BLOCK(METAL_PREFILL_BLOCK)
#undef METAL_PREFILL_BLOCK
};

enum class Bfloat16 : std::uint16_t {};

// Base of wide blocks. With 4 bits, step j holds columns 4j to 4j + 3 in the low nibbles and 16 + 4j to
// 19 + 4j in the high ones; with 8 bits, columns 4j to 4j + 3.
template <int kBitsOf, int kZeroOf, int kMaxCodeOf>
struct WideCodes {
  static constexpr int kBits = kBitsOf, kZero = kZeroOf;
  static constexpr int kMaxCode = kMaxCodeOf;  // the largest that occurs
  std::uint8_t codes[2][kBits][kPanelRows][4];
};

struct alignas(64) NibbleBlock : WideCodes<4, 8, 15> {  // Q4_0: 4.5 bits per weight
  std::uint16_t scale[kGroupRows];                      // f16
};
struct alignas(64) NibbleMinBlock : WideCodes<4, 0, 15> {
  float scale[kGroupRows], min[kGroupRows];
};
struct alignas(64) NibbleF16MinBlock : WideCodes<4, 0, 15> {  // Q4_1
  std::uint16_t scale[kGroupRows], min[kGroupRows];           // f16
};
struct alignas(64) ByteBlock : WideCodes<8, 128, 255> {  // Q8_0
  std::uint16_t scale[kGroupRows];                       // f16
};
struct alignas(64) ByteFloatBlock : WideCodes<8, 128, 255> {
  float scale[kGroupRows];
};
struct alignas(64) FiveBitByteBlock : WideCodes<8, 16, 31> {
  std::uint16_t scale[kGroupRows];  // f16
};
struct alignas(64) ByteMinBlock : WideCodes<8, 0, 31> {
  float scale[kGroupRows], min[kGroupRows];
};
// Scales and minima per 16 columns.
struct alignas(64) ByteHalvesBlock : WideCodes<8, 128, 255> {
  float half_scale[2][kGroupRows];
};
// Scales are also integers times a float, for sets that add both halves of a block as integers.
struct alignas(64) SixBitByteHalvesBlock : WideCodes<8, 32, 63> {
  float half_scale[2][kGroupRows];  // for other sets
  std::int8_t scale_code[2][kGroupRows];
  float scale_unit[kGroupRows];
};
struct alignas(64) ByteHalvesMinBlock : WideCodes<8, 0, 3> {
  float half_scale[2][kGroupRows], half_min[2][kGroupRows];
};

static_assert(sizeof(NibbleBlock) == 576 && sizeof(NibbleMinBlock) == 768 &&
              sizeof(NibbleF16MinBlock) == 640 && sizeof(ByteBlock) == 1088 &&
              sizeof(FiveBitByteBlock) == 1088 && sizeof(ByteFloatBlock) == 1152 &&
              sizeof(ByteMinBlock) == 1280 && sizeof(ByteHalvesBlock) == 1280 &&
              sizeof(SixBitByteHalvesBlock) == 1472 && sizeof(ByteHalvesMinBlock) == 1536);

// float32. Columns are padded with zeros.
struct alignas(64) FloatBlock {
  float values[2][kFloatPad][kPanelRows];
};

// Not quantized: bfloat16, in pairs of columns, as in a tile of AMX. Columns are padded with zeros.
struct alignas(64) PairBlock {
  std::uint16_t pairs[2][kBlockCols / 2][kPanelRows][2];
};

// Any type in w8a8: 64 columns of rotated and rounded rows, as in a tile of AMX. Columns are padded with
// zeros. After its last block, a group has a float scale per row. With 16-bit codes, a block is 32 columns of
// signed integers.
struct alignas(64) RotatedBlock {
  std::uint8_t codes[2][kRotatedCols / 4][kPanelRows][4];
};
static_assert(sizeof(RotatedBlock) == sizeof(PairBlock) && sizeof(FloatBlock) == sizeof(PairBlock));

// Width of the first of two bit planes of codes: the widest of 4, 2 or 1 that fits; the rest is in the other.
// A plane of w bits is w vectors; vector v has steps v, v + w, v + 2w, ... from its lowest bits upwards.
constexpr int low_plane(int bits) {
  return bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
}

// Base of narrow blocks. Products of a single token perform the inexact operations of Wide in the same order,
// so that results are bit-identical.
template <class WideBlock, int kBitsOf, int kZeroOf, int kSpansOf = 1, bool kTableOf = false>
struct Narrow {
  using Wide = WideBlock;
  static constexpr int kBits = kBitsOf;
  static constexpr int kZero = kZeroOf;       // of codes, or of their values in the table
  static constexpr int kSpans = kSpansOf;     // of 32 columns
  static constexpr bool kIsTable = kTableOf;  // codes are indices into the table of the matrix
  std::uint8_t codes[kSpans][2][kBits][kPanelRows][4];
};

struct alignas(64) Q5_0Block : Narrow<FiveBitByteBlock, 5, 16> {
  std::uint16_t scale[kGroupRows];  // f16
};
struct alignas(64) Q5_1Block : Narrow<ByteMinBlock, 5, 0> {
  std::uint16_t scale[kGroupRows], min[kGroupRows];  // f16
};
struct alignas(64) IQ4_NLBlock : Narrow<ByteBlock, 4, 128, 1, true> {
  std::uint16_t scale[kGroupRows];  // f16
};
struct alignas(64) MXFP4Block : Narrow<ByteFloatBlock, 4, 128, 1, true> {
  Bfloat16 scale[kGroupRows];
};

struct alignas(64) NVFP4Block : Narrow<ByteHalvesBlock, 4, 128, 1, true> {
  Bfloat16 half_scale[2][kGroupRows];
};

// Scales and minima of a super-block are integers times a float of the super-block.
struct alignas(64) TernaryBlock
    : Narrow<FiveBitByteBlock, 2, 1, kSuperSpans> {  // TQ1_0, TQ2_0: one scale for all
  std::uint16_t scale[kGroupRows];                   // f16
};
struct alignas(64) Q2_KBlock : Narrow<ByteHalvesMinBlock, 2, 0, kSuperSpans> {
  std::uint8_t scale_and_min[kSuperSpans][2][kGroupRows];      // low and high nibble
  std::uint16_t scale_unit[kGroupRows], min_unit[kGroupRows];  // f16
};
struct alignas(64) Q3_KBlock : Narrow<SixBitByteHalvesBlock, 3, 4, kSuperSpans> {
  std::int8_t scale_code[kSuperSpans][2][kGroupRows];
  std::uint16_t scale_unit[kGroupRows];  // f16
};
struct alignas(64) Q4_KBlock : Narrow<NibbleMinBlock, 4, 0, kSuperSpans> {
  std::int8_t scale_code[kSuperSpans][1][kGroupRows], min_code[kSuperSpans][kGroupRows];
  std::uint16_t scale_unit[kGroupRows], min_unit[kGroupRows];  // f16
};
struct alignas(64) Q5_KBlock : Narrow<ByteMinBlock, 5, 0, kSuperSpans> {
  std::int8_t scale_code[kSuperSpans][1][kGroupRows], min_code[kSuperSpans][kGroupRows];
  std::uint16_t scale_unit[kGroupRows], min_unit[kGroupRows];  // f16
};
struct alignas(64) Q6_KBlock : Narrow<SixBitByteHalvesBlock, 6, 32, kSuperSpans> {
  std::int8_t scale_code[kSuperSpans][2][kGroupRows];
  std::uint16_t scale_unit[kGroupRows];  // f16
};
struct alignas(64) IQ4_XSBlock
    : Narrow<ByteFloatBlock, 4, 128, kSuperSpans, true> {  // also of IQ3_XXS and IQ3_S
  std::int8_t scale_code[kSuperSpans][1][kGroupRows];
  float scale_unit[kGroupRows];
};
struct alignas(64) IQ2_XXSBlock : Narrow<ByteFloatBlock, 3, 128, kSuperSpans, true> {
  std::int8_t scale_code[kSuperSpans][1][kGroupRows];
  float scale_unit[kGroupRows];
};
struct alignas(64) IQ2_XSBlock : Narrow<ByteHalvesBlock, 3, 128, kSuperSpans, true> {  // also of IQ2_S
  std::int8_t scale_code[kSuperSpans][2][kGroupRows];
  float scale_unit[kGroupRows];
};

template <class Block>
concept IsNarrow = requires { typename Block::Wide; };

// Whether the scales of a narrow block are integers times a float of the super-block.
template <class Block>
constexpr bool kHasIntegerScales = IsNarrow<Block> && requires(Block b) { b.scale_unit; };

// Whether a wide block has integer or float scales per 16 columns, minima per 32 columns, minima per 16.
template <class Block>
constexpr bool kHasIntegerHalves = requires(Block b) { b.scale_code; };
template <class Block>
constexpr bool kHasHalves = requires(Block b) { b.half_scale; };
template <class Block>
constexpr bool kHasMin = requires(Block b) { b.min; };
template <class Block>
constexpr bool kHasHalfMins = requires(Block b) { b.half_min; };

template <class Block>
constexpr Packing kPackingOf = Packing::kNone;
#define METAL_PREFILL_BLOCK(Name) \
  template <>                     \
  inline constexpr Packing kPackingOf<Name##Block> = Packing::k##Name;
METAL_PREFILL_EACH_BLOCK(METAL_PREFILL_BLOCK)
#undef METAL_PREFILL_BLOCK

// Calls with_block(std::type_identity<Block>()) for the type of a quantized packing's blocks; not at all for
// packings whose blocks have no scale.
template <class Call>
void visit(Packing packing, const Call& with_block) {
  switch (packing) {
    case Packing::kNone:
    case Packing::kFloats:
    case Packing::kPairs:
    case Packing::kRotated:
    case Packing::kRotatedWide:
      return;
#define METAL_PREFILL_BLOCK(Name) \
  case Packing::k##Name:          \
    return with_block(std::type_identity<Name##Block>());
      METAL_PREFILL_EACH_BLOCK(METAL_PREFILL_BLOCK)
#undef METAL_PREFILL_BLOCK
  }
}

// visit for wide or for narrow blocks only.
template <class Call>
void visit_wide(Packing packing, const Call& with_block) {
  visit(packing, [&]<class Block>(std::type_identity<Block> block) {
    if constexpr (!IsNarrow<Block>) with_block(block);
  });
}
template <class Call>
void visit_narrow(Packing packing, const Call& with_block) {
  visit(packing, [&]<class Block>(std::type_identity<Block> block) {
    if constexpr (IsNarrow<Block>) with_block(block);
  });
}

struct PackedMatrix {
  Packing packing = Packing::kNone;  // kNone: stays in the file, multiplied in float32
  int rows = 0;
  int cols = 0;
  std::byte* blocks = nullptr;          // [groups][cols / block_cols], the last group padded with zero rows
  std::size_t group_stride = 0;         // bytes between groups; another matrix may be in between
  const std::uint8_t* table = nullptr;  // [kTableCodes]: 128 + the integer of a code, if codes are indices

  int groups() const { return ceil_div(rows, kGroupRows); }
  int blocks_per_row() const;
  std::size_t group_bytes() const;
  std::byte* group(int index) const { return blocks + std::size_t(index) * group_stride; }
  const FloatBlock* floats(int index) const { return reinterpret_cast<const FloatBlock*>(group(index)); }
  const PairBlock* pairs(int index) const { return reinterpret_cast<const PairBlock*>(group(index)); }
  // Scales of a group of rotated rows, [kGroupRows].
  float* scales(int index) const {
    return reinterpret_cast<float*>(group(index) + group_bytes() - kGroupRows * sizeof(float));
  }
};

Packing packing_of(TensorType type);
// Whether a group is multiplied by panels, as it was packed.
inline bool in_panels(Packing packing) {
  return Packing::kNone < packing && packing <= Packing::kRotatedWide;
}
std::size_t block_bytes(Packing packing);
int block_cols(Packing packing);
bool is_narrow(Packing packing);
bool has_integer_scales(Packing packing);
// The packed matrix of a tensor, with contiguous groups but without memory yet.
PackedMatrix packed_matrix(const Tensor& tensor);
// A widened group of a narrow matrix, as a separate matrix at `blocks`.
PackedMatrix wide_group(const PackedMatrix& narrow, std::byte* blocks);
// Packs rows [32 * group, 32 * group + 32) of the tensor; those of floats become pairs, rounded to nearest.
void pack_group(const Tensor& tensor, int group, std::byte* out);

}  // namespace metal_prefill::cpu
