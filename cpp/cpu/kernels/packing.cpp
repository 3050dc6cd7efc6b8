#include "packing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "../../model/formats.h"

namespace metal_prefill::cpu {

namespace {

using namespace formats;
static_assert(kSpan == kBlockCols);

// The block that holds all codes and scales of a format; void for floats, which stay in the file.
template <class Format>
struct PackedAs {
  using Block = void;
};
#define METAL_PREFILL_PACKED(Format, PackedBlock) \
  template <>                                     \
  struct PackedAs<Format> {                       \
    using Block = PackedBlock;                    \
  };
METAL_PREFILL_PACKED(Q4_0, NibbleBlock)
METAL_PREFILL_PACKED(Q4_1, NibbleF16MinBlock)
METAL_PREFILL_PACKED(Q5_0, Q5_0Block)
METAL_PREFILL_PACKED(Q5_1, Q5_1Block)
METAL_PREFILL_PACKED(Q8_0, ByteBlock)
METAL_PREFILL_PACKED(Q2_K, Q2_KBlock)
METAL_PREFILL_PACKED(Q3_K, Q3_KBlock)
METAL_PREFILL_PACKED(Q4_K, Q4_KBlock)
METAL_PREFILL_PACKED(Q5_K, Q5_KBlock)
METAL_PREFILL_PACKED(Q6_K, Q6_KBlock)
METAL_PREFILL_PACKED(IQ2_XXS, IQ2_XXSBlock)
METAL_PREFILL_PACKED(IQ2_XS, IQ2_XSBlock)
METAL_PREFILL_PACKED(IQ2_S, IQ2_XSBlock)
METAL_PREFILL_PACKED(IQ3_XXS, IQ4_XSBlock)
METAL_PREFILL_PACKED(IQ3_S, IQ4_XSBlock)
METAL_PREFILL_PACKED(IQ4_NL, IQ4_NLBlock)
METAL_PREFILL_PACKED(IQ4_XS, IQ4_XSBlock)
METAL_PREFILL_PACKED(TQ1_0, TernaryBlock)
METAL_PREFILL_PACKED(TQ2_0, TernaryBlock)
METAL_PREFILL_PACKED(MXFP4, MXFP4Block)
METAL_PREFILL_PACKED(NVFP4, NVFP4Block)
#undef METAL_PREFILL_PACKED

template <class Format>
using BlockOf = typename PackedAs<Format>::Block;
// Spans of a packed block.
template <class Block>
constexpr int spans_of() {
  if constexpr (IsNarrow<Block>)
    return Block::kSpans;
  else
    return 1;
}

// Number of scales of a block per span; one per span or per super-block counts as one.
template <class Block>
constexpr int scales_of_block() {
  if constexpr (requires(Block b) { b.scale_and_min; } || requires(Block b) { b.half_scale; })
    return 2;
  else if constexpr (requires(Block b) { b.scale_code; })
    return int(std::extent_v<decltype(Block::scale_code), 1>);
  else
    return 1;
}

// Rejects, when compiled, rows of METAL_PREFILL_PACKED that lose codes or scales, or write past a block.
template <class Format, class Block>
  requires(!std::is_void_v<Block>)
constexpr bool check_row() {
  constexpr int kSpans = int(Format::kValues) / kSpan;
  static_assert(Format::kValues % kSpan == 0 && kSpans % spans_of<Block>() == 0,
                "a block of the file must fill whole packed blocks: choose a block with fewer spans");
  static_assert(scales_of<Format>() == scales_of_block<Block>(),
                "the packed block must have as many scales for 32 columns as the file");
  static_assert(IsNarrow<Block> || !HasTable<Format>, "codes are indices only in narrow blocks");
  static_assert(
      HasHalfScales<Format> == requires(Block b) { b.half_scale; },
      "the packed block must have float scales of 16 columns exactly if the format has them");
  if constexpr (IsNarrow<Block>) {
    static_assert(Format::kBits == Block::kBits && HasTable<Format> == Block::kIsTable,
                  "the packed block must have codes of as many bits, and a table if the format has one");
  }
  if constexpr (!HasTable<Format>) static_assert(Format::kZero == Block::kZero);
  static_assert(HasMin<Format> == (kHasMin<Block> || requires(Block b) { b.min_unit; }),
                "the packed block must have a minimum exactly if the format has one");
  if constexpr (requires(Block b) { b.scale_and_min; })
    static_assert(Format::kMaxScale <= 15, "scales and minima are nibbles of the packed block");
  else if constexpr (requires(Block b) { b.scale_code; })
    static_assert(Format::kMaxScale <= std::numeric_limits<std::int8_t>::max(),
                  "scales are int8 in the packed block");
  return true;
}
template <class Format, class Block>
  requires std::is_void_v<Block>  // a type that is not packed
constexpr bool check_row() {
  return true;
}
#define METAL_PREFILL_CHECK(shader_name, Name, number) static_assert(check_row<Name, BlockOf<Name>>());
EACH_TENSOR_TYPE(METAL_PREFILL_CHECK)
#undef METAL_PREFILL_CHECK

using Words = std::uint32_t[kSpan / 4];  // codes of a span, four to a word

// Writes a plane of kWidth bits from bit kFrom of the codes on: vector v has steps v, v + kWidth, ...
template <int kWidth, int kFrom>
void put_plane(const Words& codes, std::uint8_t (*vectors)[kPanelRows][4], int lane) {
  constexpr std::uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
  for (int v = 0; v < kWidth; ++v) {
    std::uint32_t word = 0;
    for (int i = 0; i < 8 / kWidth; ++i) word |= (codes[v + kWidth * i] >> kFrom & kMask) << kWidth * i;
    std::memcpy(vectors[v][lane], &word, sizeof word);
  }
}

template <int kBits>
void put_codes(const Words& codes, std::uint8_t (&vectors)[kBits][kPanelRows][4], int lane) {
  constexpr int kLow = low_plane(kBits);
  put_plane<kLow, 0>(codes, vectors, lane);
  if constexpr (kBits > kLow) put_plane<kBits - kLow, kLow>(codes, vectors + kLow, lane);
}

Bfloat16 truncated(float value) {
  return Bfloat16(std::bit_cast<std::uint32_t>(value) >> 16);
}

// Writes the scales of span `span` of the file's block to span `at` of a packed block.
template <class Format, class Block>
void put_scales(const typename Format::Block& from, int span, int r, Block& out, int at) {
  if constexpr (requires { out.scale_and_min; }) {
    for (int half = 0; half < 2; ++half) {
      const int scale = Format::scale_code(from, span, half), min = Format::min_code(from, span, half);
      out.scale_and_min[at][half][r] = std::uint8_t(scale | min << 4);
    }
  } else if constexpr (requires { out.scale_code; }) {
    constexpr int kHalves = int(std::extent_v<decltype(out.scale_code), 1>);
    for (int half = 0; half < kHalves; ++half)
      out.scale_code[at][half][r] = std::int8_t(Format::scale_code(from, span, half));
    if constexpr (HasMin<Format>) out.min_code[at][r] = std::int8_t(Format::min_code(from, span, 0));
  } else if constexpr (requires { out.half_scale; }) {
    for (int half = 0; half < 2; ++half)
      out.half_scale[half][r] = truncated(Format::half_scale(from, span, half));  // 4 significant bits
  } else if constexpr (std::is_same_v<Block, MXFP4Block>) {
    out.scale[r] = truncated(unit_of<Format>(from));  // a power of two
  } else {
    out.scale[r] = Format::scale_bits(from);
    if constexpr (HasMin<Format>) out.min[r] = Format::min_bits(from);
  }
  if constexpr (requires { out.scale_unit; }) {
    if constexpr (std::is_same_v<decltype(out.scale_unit[r]), float&>)
      out.scale_unit[r] = unit_of<Format>(from);
    else
      out.scale_unit[r] = Format::scale_bits(from);
  }
  if constexpr (requires { out.min_unit; }) out.min_unit[r] = Format::min_bits(from);
}

// Writes span `span` of the file's block to span `at` of a packed block, for row `r` of a group.
template <class Format>
void put(const typename Format::Block& from, int span, int r, BlockOf<Format>& out, int at) {
  using Block = BlockOf<Format>;
  const int panel = r / kPanelRows, lane = r % kPanelRows;
  std::uint8_t codes[kSpan];
  Format::codes(from, span, codes);
  Words words;
  std::memcpy(words, codes, sizeof words);
  if constexpr (IsNarrow<Block>) {
    put_codes(words, out.codes[at][panel], lane);
  } else {
    if constexpr (Block::kBits == 4)
      put_codes(words, out.codes[panel], lane);
    else
      for (int j = 0; j < 8; ++j) std::memcpy(out.codes[panel][j][lane], &words[j], 4);
  }
  put_scales<Format>(from, span, r, out, at);
}

template <class Table>
constexpr std::array<std::uint8_t, kTableCodes> biased(const Table& table) {
  std::array<std::uint8_t, kTableCodes> out{};
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::uint8_t(table.values[i] + 128);
  return out;
}

// Packs block by block, so that each is written while it is in the L1 cache. The rows of a group are
// contiguous in the file, so that the next group's rows are prefetched as one stream.
template <class Format>
void pack(const Tensor& tensor, int group, BlockOf<Format>* out) {
  constexpr int kSpans = int(Format::kValues) / kSpan;  // of a block of the file
  constexpr int kPacked = spans_of<BlockOf<Format>>();
  const int rows = std::min(kGroupRows, tensor.rows - group * kGroupRows);
  const std::size_t row_bytes = tensor.bytes / std::size_t(tensor.rows);
  const std::byte* first = tensor.row(group * kGroupRows);
  const std::byte* next = first + std::size_t(kGroupRows) * row_bytes;
  const std::byte* end = tensor.data + tensor.bytes;
  for (int b = 0; b < tensor.cols / int(Format::kValues); ++b) {
    for (int r = 0; r < rows; ++r) {
      for (std::size_t line = 0; line < sizeof(typename Format::Block) && next < end; line += 64, next += 64)
        __builtin_prefetch(next);
      const auto block = block_at<Format>(first + std::size_t(r) * row_bytes, std::size_t(b));
      for (int span = 0; span < kSpans; ++span) {
        const int s = b * kSpans + span;
        put<Format>(block, span, r, out[s / kPacked], s % kPacked);
      }
    }
  }
}

// Rounds to nearest even; NaN stays NaN.
std::uint16_t bfloat16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t(bits >> 16 | 0x40);
  return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class Format>
void to_bfloat16(const std::byte* from, int n, std::uint16_t* out) {
  if constexpr (std::is_same_v<Format, BF16>) {
    std::memcpy(out, from, std::size_t(n) * sizeof *out);
  } else {
    for (int i = 0; i < n; ++i) {
      typename Format::Block element;
      std::memcpy(&element, from + std::size_t(i) * sizeof element, sizeof element);
      out[i] = bfloat16_bits(Format::value(element));
    }
  }
}

// Prefetches the rows of the next group, as pack() does.
template <class Format>
void pack_pairs(const Tensor& tensor, int group, PairBlock* out) {
  const int rows = std::min(kGroupRows, tensor.rows - group * kGroupRows);
  const std::byte* first = tensor.row(group * kGroupRows);
  const std::size_t row_bytes = tensor.bytes / std::size_t(tensor.rows);
  const std::byte* next = first + std::size_t(kGroupRows) * row_bytes;
  const std::byte* end = tensor.data + tensor.bytes;
  for (int col = 0; col < tensor.cols; col += kBlockCols, ++out) {
    const int n = std::min(kBlockCols, tensor.cols - col);
    for (int r = 0; r < rows; ++r) {
      for (std::size_t line = 0; line < kBlockCols * sizeof(typename Format::Block) && next < end;
           line += 64, next += 64)
        __builtin_prefetch(next);
      std::uint16_t values[kBlockCols] = {};
      to_bfloat16<Format>(
          first + std::size_t(r) * row_bytes + std::size_t(col) * sizeof(typename Format::Block), n, values);
      for (int i = 0; i < kBlockCols; i += 2)
        std::memcpy(out->pairs[r / kPanelRows][i / 2][r % kPanelRows], values + i, 2 * sizeof *values);
    }
  }
}

// Q4_0 already has its nibbles in the right order: they are only moved.
template <>
void pack<Q4_0>(const Tensor& tensor, int group, NibbleBlock* out) {
  const int n_spans = tensor.cols / kSpan;
  for (int r = 0; r < kGroupRows && group * kGroupRows + r < tensor.rows; ++r) {
    const auto* row = tensor.row(group * kGroupRows + r);
    for (int s = 0; s < n_spans; ++s) {
      const std::byte* from = row + std::size_t(s) * sizeof(block_q4_0);
      std::memcpy(&out[s].scale[r], from + offsetof(block_q4_0, d), sizeof(fp16_t));
      for (int j = 0; j < 4; ++j)
        std::memcpy(out[s].codes[r / kPanelRows][j][r % kPanelRows], from + offsetof(block_q4_0, qs) + 4 * j,
                    4);
    }
  }
}

}  // namespace

Packing packing_of(TensorType type) {
  return formats::visit(type, []<class Format>(Format) { return kPackingOf<BlockOf<Format>>; });
}

std::size_t block_bytes(Packing packing) {
  std::size_t bytes = in_panels(packing) ? sizeof(PairBlock) : 0;
  visit(packing, [&]<class Block>(std::type_identity<Block>) { bytes = sizeof(Block); });
  return bytes;
}

int block_cols(Packing packing) {
  int cols = packing == Packing::kRotated  ? kRotatedCols
             : packing == Packing::kFloats ? kFloatPad
             : in_panels(packing)          ? kBlockCols
                                           : 0;
  visit(packing, [&]<class Block>(std::type_identity<Block>) { cols = kBlockCols * spans_of<Block>(); });
  return cols;
}

bool is_narrow(Packing packing) {
  bool narrow = false;
  visit_narrow(packing, [&](auto) { narrow = true; });
  return narrow;
}

bool has_integer_scales(Packing packing) {
  bool integers = false;
  visit_narrow(packing, [&]<class Block>(std::type_identity<Block>) { integers = kHasIntegerScales<Block>; });
  return integers;
}

int PackedMatrix::blocks_per_row() const {
  return packing == Packing::kNone ? 0 : ceil_div(cols, block_cols(packing));
}

std::size_t PackedMatrix::group_bytes() const {
  const bool has_scales = packing == Packing::kRotated || packing == Packing::kRotatedWide;
  const std::size_t scales = has_scales ? kGroupRows * sizeof(float) : 0;
  return std::size_t(blocks_per_row()) * block_bytes(packing) + scales;
}

PackedMatrix packed_matrix(const Tensor& tensor) {
  PackedMatrix matrix{packing_of(tensor.type), tensor.rows, tensor.cols};
  matrix.group_stride = matrix.group_bytes();
  formats::visit(tensor.type, [&]<class Format>(Format) {
    if constexpr (HasTable<Format>) {
      static constexpr auto kTable = biased(Format::kTable);
      matrix.table = kTable.data();
    }
  });
  return matrix;
}

PackedMatrix wide_group(const PackedMatrix& narrow, std::byte* blocks) {
  PackedMatrix wide{.rows = kGroupRows, .cols = narrow.cols, .blocks = blocks};
  visit_narrow(narrow.packing, [&]<class Block>(std::type_identity<Block>) {
    wide.packing = kPackingOf<typename Block::Wide>;
  });
  wide.group_stride = wide.group_bytes();
  return wide;
}

void pack_group(const Tensor& tensor, int group, std::byte* out) {
  formats::visit(tensor.type, [&]<class Format>(Format) {
    if constexpr (std::is_void_v<BlockOf<Format>>)
      pack_pairs<Format>(tensor, group, reinterpret_cast<PairBlock*>(out));
    else
      pack<Format>(tensor, group, reinterpret_cast<BlockOf<Format>*>(out));
  });
}

}  // namespace metal_prefill::cpu
