// Which elements of an 8x8 matrix a lane holds: two neighbours in a row, in the layout seen on Apple GPUs.
#pragma once

namespace msl {

// Row and first column of a lane's two elements.
MSL_INLINE int fragment_row(int lane) {
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
}
MSL_INLINE int fragment_column(int lane) {
  return ((lane >> 1) & 4) + ((lane & 1) << 1);
}

}  // namespace msl
