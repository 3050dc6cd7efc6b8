// Support for tensor operations on NVIDIA GPUs. Only the CPU executor checks sizes, that elements were written, and
// that all threads of the scope execute the operation.
#pragma once

namespace msl {

template <class Tag, uint Simdgroups>
MSL_INLINE void together(int) {}
MSL_INLINE uint thread_of_threadgroup() {
  return thread_index();
}
MSL_INLINE void require_size(const char*, int, int, uint, uint, int) {}
MSL_INLINE void forget(float*, uint) {}
MSL_INLINE void require_written(const float*, uint, const char*, int) {}

template <uint Columns>
class HalfRow {
 public:
  MSL_INLINE explicit HalfRow(const half* row) : row_(row) {}
  MSL_INLINE float dot(const half* other) const {
    float sum = 0;
    for (uint i = 0; i < Columns; ++i) sum += static_cast<float>(row_[i]) * static_cast<float>(other[i]);
    return sum;
  }

 private:
  const half* row_;
};

}  // namespace msl
