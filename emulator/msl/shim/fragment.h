// Which elements of an 8x8 matrix a lane holds: in the layout that the executor's options select, or in that of
// NVIDIA's tensor cores.
#pragma once

namespace msl {

// Place of the first or second element of a lane, of 64 row by row.
MSL_INLINE int fragment_place(int lane, int element) {
#if MSL_PTX
  return lane * 2 + element;
#else
  return ::metal_emulator::abi::current_worker().matrix_places[lane][element];
#endif
}

}  // namespace msl
