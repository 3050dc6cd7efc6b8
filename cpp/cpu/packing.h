// Weights in the order in which the kernels read them.
//
// A quantized matrix is cut into groups of 32 rows; the group's blocks of 32 columns follow each other, so
// that a product reads one linear stream. Within a block, codes lie in two panels of 16 rows; a step of a
// panel is 64 bytes with four consecutive columns of each row: what a 4-way dot product instruction consumes,
// whatever its width. A weight is scale * (code - kZero) + min, where formats without a minimum have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../model.h"
#include "../rounding.h"

namespace metal_prefill::cpu {

constexpr int kGroupRows = 32;
constexpr int kPanelRows = 16;
constexpr int kBlockCols = 32;

enum class Packing { kNone, kNibble, kNibbleMin, kByte, kByteMin, kByteHalves };

// Step j holds columns 4j to 4j + 3 in the low nibbles and 16 + 4j to 19 + 4j in the high ones: 4.5 bits a
// weight.
struct alignas(64) NibbleBlock {  // Q4_0
  static constexpr Packing kPacking = Packing::kNibble;
  static constexpr int kBits = 4, kZero = 8;
  std::uint8_t codes[2][4][kPanelRows][4];
  std::uint16_t scale[kGroupRows];  // f16
};

struct alignas(64) NibbleMinBlock {  // Q4_1, Q4_K
  static constexpr Packing kPacking = Packing::kNibbleMin;
  static constexpr int kBits = 4, kZero = 0;
  std::uint8_t codes[2][4][kPanelRows][4];
  float scale[kGroupRows];
  float min[kGroupRows];
};

// Step j holds columns 4j to 4j + 3.
struct alignas(64) ByteBlock {  // Q8_0, Q5_0
  static constexpr Packing kPacking = Packing::kByte;
  static constexpr int kBits = 8, kZero = 128;
  std::uint8_t codes[2][8][kPanelRows][4];
  std::uint16_t scale[kGroupRows];  // f16
};

struct alignas(64) ByteMinBlock {  // Q5_1, Q5_K
  static constexpr Packing kPacking = Packing::kByteMin;
  static constexpr int kBits = 8, kZero = 0;
  std::uint8_t codes[2][8][kPanelRows][4];
  float scale[kGroupRows];
  float min[kGroupRows];
};

struct alignas(64) ByteHalvesBlock {  // Q6_K: a scale for 16 columns
  static constexpr Packing kPacking = Packing::kByteHalves;
  static constexpr int kBits = 8, kZero = 128;
  std::uint8_t codes[2][8][kPanelRows][4];
  float half_scale[2][kGroupRows];
};

static_assert(sizeof(NibbleBlock) == 576 && sizeof(NibbleMinBlock) == 768 && sizeof(ByteBlock) == 1088 &&
              sizeof(ByteMinBlock) == 1280 && sizeof(ByteHalvesBlock) == 1280);

// Calls with_block(std::type_identity<Block>()) for the type of a packing's blocks; not at all for kNone.
template <class Call>
void visit(Packing packing, const Call& with_block) {
  switch (packing) {
    case Packing::kNone:
      return;
    case Packing::kNibble:
      return with_block(std::type_identity<NibbleBlock>());
    case Packing::kNibbleMin:
      return with_block(std::type_identity<NibbleMinBlock>());
    case Packing::kByte:
      return with_block(std::type_identity<ByteBlock>());
    case Packing::kByteMin:
      return with_block(std::type_identity<ByteMinBlock>());
    case Packing::kByteHalves:
      return with_block(std::type_identity<ByteHalvesBlock>());
  }
}

struct PackedMatrix {
  Packing packing = Packing::kNone;  // kNone: stays in the file, multiplied as float32
  int rows = 0;
  int cols = 0;
  std::byte* blocks = nullptr;   // [groups][cols / 32], the last group filled up with rows of zeros
  std::size_t group_stride = 0;  // bytes from one group to the next; another matrix may lie between

  int groups() const { return ceil_div(rows, kGroupRows); }
  int blocks_per_row() const { return cols / kBlockCols; }
  std::size_t group_bytes() const;
  std::byte* group(int index) const { return blocks + std::size_t(index) * group_stride; }
};

Packing packing_of(TensorType type);
std::size_t block_bytes(Packing packing);
// The matrix of a tensor, still without a place; its groups follow each other.
PackedMatrix packed_matrix(const Tensor& tensor);
// Packs rows [32 * group, 32 * group + 32) of the tensor.
void pack_group(const Tensor& tensor, int group, std::byte* out);

}  // namespace metal_prefill::cpu
