#include "packing.h"

#include <cstring>

namespace metal_prefill::cpu {

namespace {

// Codes and scales of 32 columns of a row, before they are spread over a packed block.
struct RowBlock {
  std::uint8_t codes[kBlockCols] = {};
  std::uint16_t half_scale = 0;  // formats whose scale is one f16
  float scale[2] = {};           // of each half; formats with one scale use the first
  float min = 0;
};

template <typename T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

std::uint32_t high_bits(const u8_t qh[4]) {
  return std::uint32_t(qh[0]) | std::uint32_t(qh[1]) << 8 | std::uint32_t(qh[2]) << 16 |
         std::uint32_t(qh[3]) << 24;
}

// Reads block `b` (32 columns) of a row.
RowBlock unpack_q4_1(const std::byte* row, int b) {
  const auto block = load<block_q4_1>(row + std::size_t(b) * sizeof(block_q4_1));
  RowBlock out;
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = block.qs[i] & 15;
    out.codes[i + 16] = block.qs[i] >> 4;
  }
  out.scale[0] = half_to_float(block.d);
  out.min = half_to_float(block.m);
  return out;
}

RowBlock unpack_q5_0(const std::byte* row, int b) {
  const auto block = load<block_q5_0>(row + std::size_t(b) * sizeof(block_q5_0));
  const std::uint32_t high = high_bits(block.qh);
  RowBlock out;
  for (int i = 0; i < 16; ++i) {  // codes count from -128, values from -16
    out.codes[i] = std::uint8_t(((block.qs[i] & 15) | (high >> i & 1) << 4) + 112);
    out.codes[i + 16] = std::uint8_t(((block.qs[i] >> 4) | (high >> (i + 16) & 1) << 4) + 112);
  }
  out.half_scale = block.d;
  return out;
}

RowBlock unpack_q5_1(const std::byte* row, int b) {
  const auto block = load<block_q5_1>(row + std::size_t(b) * sizeof(block_q5_1));
  const std::uint32_t high = high_bits(block.qh);
  RowBlock out;
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = std::uint8_t((block.qs[i] & 15) | (high >> i & 1) << 4);
    out.codes[i + 16] = std::uint8_t((block.qs[i] >> 4) | (high >> (i + 16) & 1) << 4);
  }
  out.scale[0] = half_to_float(block.d);
  out.min = half_to_float(block.m);
  return out;
}

RowBlock unpack_q8_0(const std::byte* row, int b) {
  const auto block = load<block_q8_0>(row + std::size_t(b) * sizeof(block_q8_0));
  RowBlock out;
  for (int i = 0; i < 32; ++i) out.codes[i] = std::uint8_t(block.qs[i] + 128);
  out.half_scale = block.d;
  return out;
}

RowBlock unpack_q4_K(const std::byte* row, int b) {
  const auto block = load<block_q4_K>(row + std::size_t(b / 8) * sizeof(block_q4_K));
  const int group = b % 8;
  RowBlock out;
  for (int i = 0; i < 32; ++i) out.codes[i] = block.qs[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
  const ScaleMin scale_min = k_scale_min(block.scales, group);
  out.scale[0] = half_to_float(block.d) * float(scale_min.scale);
  out.min = -(half_to_float(block.dmin) * float(scale_min.min));
  return out;
}

RowBlock unpack_q5_K(const std::byte* row, int b) {
  const auto block = load<block_q5_K>(row + std::size_t(b / 8) * sizeof(block_q5_K));
  const int group = b % 8;
  RowBlock out;
  for (int i = 0; i < 32; ++i) {
    const int low = block.qs[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
    out.codes[i] = std::uint8_t(low | (block.qh[i] >> group & 1) << 4);
  }
  const ScaleMin scale_min = k_scale_min(block.scales, group);
  out.scale[0] = half_to_float(block.d) * float(scale_min.scale);
  out.min = -(half_to_float(block.dmin) * float(scale_min.min));
  return out;
}

RowBlock unpack_q6_K(const std::byte* row, int b) {
  const auto block = load<block_q6_K>(row + std::size_t(b / 8) * sizeof(block_q6_K));
  const int group = b % 8;
  const u8_t* ql = block.ql + group / 4 * 64 + group % 2 * 32;
  const u8_t* qh = block.qh + group / 4 * 32;
  RowBlock out;
  for (int i = 0; i < 32; ++i) {  // codes count from -128, values from -32
    const int q = (ql[i] >> (group % 4 / 2 * 4) & 15) | (qh[i] >> (group % 4 * 2) & 3) << 4;
    out.codes[i] = std::uint8_t(q + 96);
  }
  for (int half = 0; half < 2; ++half) {
    out.scale[half] = half_to_float(block.d) * float(block.scales[group * 2 + half]);
  }
  return out;
}

template <typename Block>
void put_codes(const RowBlock& in, int r, Block& out) {
  const int panel = r / kPanelRows, lane = r % kPanelRows;
  if constexpr (Block::kBits == 4) {
    std::uint8_t pairs[16];  // computed all at once, before they are spread
    for (int i = 0; i < 16; ++i) pairs[i] = std::uint8_t(in.codes[i] | in.codes[i + 16] << 4);
    for (int j = 0; j < 4; ++j) std::memcpy(out.codes[panel][j][lane], pairs + 4 * j, 4);
  } else {
    for (int j = 0; j < 8; ++j) std::memcpy(out.codes[panel][j][lane], in.codes + 4 * j, 4);
  }
}

template <typename Block>
void put(const RowBlock& in, int r, Block& out) {
  put_codes(in, r, out);
  if constexpr (requires { out.half_scale; }) {
    for (int half = 0; half < 2; ++half) out.half_scale[half][r] = in.scale[half];
  } else if constexpr (requires { out.min; }) {
    out.scale[r] = in.scale[0];
    out.min[r] = in.min;
  } else {
    out.scale[r] = in.half_scale;
  }
}

template <typename Block, RowBlock (*kUnpack)(const std::byte*, int)>
void pack(const Tensor& tensor, int group, std::byte* blocks) {
  const int n_blocks = tensor.cols / kBlockCols;
  Block* out = reinterpret_cast<Block*>(blocks);
  for (int r = 0; r < kGroupRows && group * kGroupRows + r < tensor.rows; ++r) {
    const std::byte* row = tensor.row(group * kGroupRows + r);
    for (int b = 0; b < n_blocks; ++b) put(kUnpack(row, b), r, out[b]);
  }
}

// Q4_0 has its nibbles in the right order already: only moves.
void pack_q4_0(const Tensor& tensor, int group, std::byte* blocks) {
  const int n_blocks = tensor.cols / kBlockCols;
  auto* out = reinterpret_cast<NibbleBlock*>(blocks);
  for (int r = 0; r < kGroupRows && group * kGroupRows + r < tensor.rows; ++r) {
    const std::byte* row = tensor.row(group * kGroupRows + r);
    for (int b = 0; b < n_blocks; ++b) {
      const std::byte* in = row + std::size_t(b) * sizeof(block_q4_0);
      std::memcpy(&out[b].scale[r], in, 2);
      for (int j = 0; j < 4; ++j)
        std::memcpy(out[b].codes[r / kPanelRows][j][r % kPanelRows], in + 2 + 4 * j, 4);
    }
  }
}

}  // namespace

Packing packing_of(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0:
      return Packing::kNibble;
    case TensorType::kQ4_1:
    case TensorType::kQ4_K:
      return Packing::kNibbleMin;
    case TensorType::kQ5_0:
    case TensorType::kQ8_0:
      return Packing::kByte;
    case TensorType::kQ5_1:
    case TensorType::kQ5_K:
      return Packing::kByteMin;
    case TensorType::kQ6_K:
      return Packing::kByteHalves;
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16:
      return Packing::kNone;
  }
  return Packing::kNone;
}

std::size_t block_bytes(Packing packing) {
  switch (packing) {
    case Packing::kNone:
      return 0;
    case Packing::kNibble:
      return sizeof(NibbleBlock);
    case Packing::kNibbleMin:
      return sizeof(NibbleMinBlock);
    case Packing::kByte:
      return sizeof(ByteBlock);
    case Packing::kByteMin:
      return sizeof(ByteMinBlock);
    case Packing::kByteHalves:
      return sizeof(ByteHalvesBlock);
  }
  return 0;
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
  switch (tensor.type) {
    case TensorType::kQ4_0:
      return pack_q4_0(tensor, group, out);
    case TensorType::kQ4_1:
      return pack<NibbleMinBlock, unpack_q4_1>(tensor, group, out);
    case TensorType::kQ4_K:
      return pack<NibbleMinBlock, unpack_q4_K>(tensor, group, out);
    case TensorType::kQ5_0:
      return pack<ByteBlock, unpack_q5_0>(tensor, group, out);
    case TensorType::kQ8_0:
      return pack<ByteBlock, unpack_q8_0>(tensor, group, out);
    case TensorType::kQ5_1:
      return pack<ByteMinBlock, unpack_q5_1>(tensor, group, out);
    case TensorType::kQ5_K:
      return pack<ByteMinBlock, unpack_q5_K>(tensor, group, out);
    case TensorType::kQ6_K:
      return pack<ByteHalvesBlock, unpack_q6_K>(tensor, group, out);
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16:
      return;
  }
}

}  // namespace metal_prefill::cpu
