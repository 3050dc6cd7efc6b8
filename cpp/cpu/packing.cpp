#include "packing.h"

#include <cstring>

#include "../formats.h"

namespace metal_prefill::cpu {

namespace {

using namespace formats;
static_assert(kSpan == kBlockCols);

// The block that holds all codes and scales of a format, which none does of one with minima of half a span:
// that stays in the file, as floats do.
template <class Format>
constexpr auto block_of() {
  if constexpr (!Quantized<Format>) {
    return std::type_identity<void>();
  } else if constexpr (Format::kHalves) {
    return std::type_identity<std::conditional_t<HasMin<Format>, void, ByteHalvesBlock>>();
  } else if constexpr (Format::kBits == 4) {
    return std::type_identity<std::conditional_t<HasMin<Format>, NibbleMinBlock, NibbleBlock>>();
  } else {
    return std::type_identity<std::conditional_t<HasMin<Format>, ByteMinBlock, ByteBlock>>();
  }
}
template <class Format>
using BlockOf = typename decltype(block_of<Format>())::type;

// Row `r` of a group: a span of 32 columns.
template <class Format>
void put(const typename Format::Block& from, int span, int r, BlockOf<Format>& out) {
  using Block = BlockOf<Format>;
  const int panel = r / kPanelRows, lane = r % kPanelRows;
  std::uint8_t codes[kSpan];
  Format::codes(from, span, codes);
  if constexpr (Block::kBits == 4) {
    static_assert(Block::kZero == Format::kZero);
    std::uint8_t pairs[16];  // computed all at once, before they are spread
    for (int i = 0; i < 16; ++i) pairs[i] = std::uint8_t(codes[i] | codes[i + 16] << 4);
    for (int j = 0; j < 4; ++j) std::memcpy(out.codes[panel][j][lane], pairs + 4 * j, 4);
  } else {
    for (std::uint8_t& code : codes) code = std::uint8_t(code + (Block::kZero - Format::kZero));
    for (int j = 0; j < 8; ++j) std::memcpy(out.codes[panel][j][lane], codes + 4 * j, 4);
  }
  if constexpr (requires { out.half_scale; }) {
    for (int half = 0; half < 2; ++half) out.half_scale[half][r] = Format::scale(from, span, half);
  } else if constexpr (requires { out.min; }) {
    out.scale[r] = Format::scale(from, span, 0);
    out.min[r] = Format::min(from, span);
  } else {
    out.scale[r] = Format::scale_bits(from);
  }
}

template <class Format>
void pack(const Tensor& tensor, int group, BlockOf<Format>* out) {
  constexpr int kSpans = int(Format::kValues) / kSpan;  // of a block
  const int n_spans = tensor.cols / kSpan;
  for (int r = 0; r < kGroupRows && group * kGroupRows + r < tensor.rows; ++r) {
    const std::byte* row = tensor.row(group * kGroupRows + r);
    for (int s = 0; s < n_spans; ++s)
      put<Format>(block_at<Format>(row, std::size_t(s / kSpans)), s % kSpans, r, out[s]);
  }
}

// Q4_0 has its nibbles in the right order already: only moves.
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
  return formats::visit(type, []<class Format>(Format) {
    if constexpr (std::is_void_v<BlockOf<Format>>)
      return Packing::kNone;
    else
      return BlockOf<Format>::kPacking;
  });
}

std::size_t block_bytes(Packing packing) {
  std::size_t bytes = 0;
  visit(packing, [&]<class Block>(std::type_identity<Block>) { bytes = sizeof(Block); });
  return bytes;
}

std::size_t PackedMatrix::group_bytes() const {
  return std::size_t(blocks_per_row()) * block_bytes(packing);
}

PackedMatrix packed_matrix(const Tensor& tensor) {
  PackedMatrix matrix{packing_of(tensor.type), tensor.rows, tensor.cols};
  matrix.group_stride = matrix.group_bytes();
  return matrix;
}

void pack_group(const Tensor& tensor, int group, std::byte* out) {
  formats::visit(tensor.type, [&]<class Format>(Format) {
    if constexpr (!std::is_void_v<BlockOf<Format>>)
      pack<Format>(tensor, group, reinterpret_cast<BlockOf<Format>*>(out));
  });
}

}  // namespace metal_prefill::cpu
