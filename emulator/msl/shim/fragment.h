// Maps lanes to elements of an 8x8 matrix: in the layout that the executor's options select, or in that of
// NVIDIA's tensor cores.
#pragma once

namespace msl {

// Index of the first or second element of a lane among the 64 elements in row-major order.
MSL_INLINE int fragment_place(int lane, int element) {
#if MSL_PTX
  return lane * 2 + element;
#else
  return ::metal_emulator::abi::current_worker().matrix_places[lane][element];
#endif
}

}  // namespace msl
