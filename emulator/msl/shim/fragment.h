// Which elements of an 8x8 matrix a lane holds: two neighbours in a row, in the layout seen on Apple GPUs, or in
// that of NVIDIA's tensor cores.
#pragma once

namespace msl {

// Row and first column of a lane's two elements.
MSL_INLINE int fragment_row(int lane) {
#if MSL_PTX
  return lane >> 2;
#else
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
#endif
}
MSL_INLINE int fragment_column(int lane) {
#if MSL_PTX
  return (lane & 3) << 1;
#else
  return ((lane >> 1) & 4) + ((lane & 1) << 1);
#endif
}

}  // namespace msl
