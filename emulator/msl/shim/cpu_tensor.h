// Tensor operations on the fiber executor: synchronization of the threads of a scope, and errors.
#pragma once

namespace msl {

template <class Tag>
struct OfThreadgroup {
  static int execute(Simdgroup&, Lanes lanes) { return lanes == ~0u ? kOk : __builtin_ctz(~lanes); }
  static constexpr Operation operation{Tag::name, &execute};
};
// Executes the operation on all `Simdgroups` simdgroups of the threadgroup.
template <class Tag, uint Simdgroups>
MSL_INLINE void together(Place place) {
  abi::Worker& worker = abi::current_worker();
  worker.together(worker, abi::current_fiber(), OfThreadgroup<Tag>::operation, Simdgroups, place);
}
MSL_INLINE uint thread_of_threadgroup() {
  return abi::current_fiber().thread;
}

MSL_INLINE void require_size(const char* what, int columns, int rows, uint wanted_columns, uint wanted_rows,
                             Place place) {
  if (columns == static_cast<int>(wanted_columns) && rows == static_cast<int>(wanted_rows)) return;
  abi::Worker& worker = abi::current_worker();
  worker.wrong_size(worker, what, columns, rows, static_cast<int>(wanted_columns),
                    static_cast<int>(wanted_rows), place);
}
// Checks the floats of a cooperative tensor that an operation reads. Unwritten floats have all bits set: a
// NaN that no operation produces.
constexpr uint kUnwritten = 0xffffffffu;
MSL_INLINE void forget(float* elements, uint count) {
  __builtin_memset(elements, 0xff, count * sizeof(float));
}
MSL_INLINE void require_written(const float* elements, uint count, const char* what, Place place) {
  for (uint i = 0; i < count; ++i) {
    if (__builtin_bit_cast(uint, elements[i]) != kUnwritten) continue;
    abi::Worker& worker = abi::current_worker();
    worker.unwritten(worker, what, place);
  }
}

typedef half EightHalves __attribute__((vector_size(16), aligned(2), may_alias));
typedef float EightFloats __attribute__((vector_size(32)));

// A row of halves, an operand of products.
template <uint Columns>
class HalfRow {
 public:
  MSL_INLINE explicit HalfRow(const half* row) {
    for (uint i = 0; i < Columns / 8; ++i) values_[i] = widened(row + 8 * i);
  }
  MSL_INLINE float dot(const half* other) const {
    EightFloats sums{};
    for (uint i = 0; i < Columns / 8; ++i) sums += values_[i] * widened(other + 8 * i);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  }

 private:
  MSL_INLINE static EightFloats widened(const half* eight) {
    return __builtin_convertvector(*reinterpret_cast<const EightHalves*>(eight), EightFloats);
  }
  EightFloats values_[Columns / 8];
};

}  // namespace msl
