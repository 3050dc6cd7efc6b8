// The places of a lane's elements of a simdgroup_matrix, for each MatrixLayout.
#pragma once

#include "../executor.h"

namespace metal_emulator::cpu {

// Of the first or second element of a lane; places are numbered row by row.
constexpr unsigned matrix_place(MatrixLayout layout, unsigned lane, unsigned element) {
  switch (layout) {
    case MatrixLayout::kApple:
      break;
    case MatrixLayout::kConsecutive:
      return lane * 2 + element;
    case MatrixLayout::kShifted:
      return (lane + 1) % 32 * 2 + element;
    case MatrixLayout::kColumns:
      return lane / 8 * 16 + lane % 8 + element * 8;
  }
  const unsigned row = (lane >> 2 & 4) + (lane >> 1 & 3), column = (lane >> 1 & 4) + (lane & 1) * 2;
  return row * 8 + column + element;
}

}  // namespace metal_emulator::cpu
