// simdgroup_matrix<T, 8, 8>: each lane holds two neighbouring elements of a row, in the layout seen on Apple
// GPUs.
//
// Products and sums are those of float for every element type; a half or bfloat result is rounded once, at
// the end.
#pragma once

namespace msl {

template <class T>
struct IsMatrixElement {
  MSL_CONSTANT bool value = Same<T, float>::value || Same<T, half>::value
#if __METAL_VERSION__ >= 310
                            || Same<T, bfloat>::value
#endif
      ;
};

// Row and first column of a lane's two elements.
MSL_INLINE int fragment_row(int lane) {
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
}
MSL_INLINE int fragment_column(int lane) {
  return ((lane >> 1) & 4) + ((lane & 1) << 1);
}

}  // namespace msl

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  static_assert(msl::IsMatrixElement<T>::value, "elements of simdgroup matrices are float, half or bfloat");
  typedef ::vec<T, 2> storage_type;
  storage_type elements;
#if MSL_CHECK
  simdgroup_matrix();
  explicit simdgroup_matrix(T diagonal);
  __private storage_type& thread_elements() __private;
  const __private storage_type& thread_elements() const __private;
#else
  simdgroup_matrix() = default;
  MSL_INLINE explicit simdgroup_matrix(T diagonal) {
    const int lane = msl::lane(), offset = msl::fragment_row(lane) - msl::fragment_column(lane);
    elements[0] = offset == 0 ? diagonal : T(0);
    elements[1] = offset == 1 ? diagonal : T(0);
  }
  MSL_INLINE storage_type& thread_elements() { return elements; }
  MSL_INLINE const storage_type& thread_elements() const { return elements; }
#endif
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
#if __METAL_VERSION__ >= 310
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
#endif

#if MSL_CHECK

template <class T, int Rows, int Columns = Rows>
simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value);
template <class T, int Rows, int Columns = Rows>
simdgroup_matrix<T, Rows, Columns> make_diagonal_simdgroup_matrix(T value);
#define MSL_MATRIX_MEMORY(SPACE)                                                                       \
  template <class T>                                                                                   \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& d, const SPACE T* source, ulong stride = 8, \
                      ::ulong2 origin = ::ulong2(0), bool transpose = false);                          \
  template <class T>                                                                                   \
  void simdgroup_store(simdgroup_matrix<T, 8, 8> a, SPACE T* target, ulong stride = 8,                 \
                       ::ulong2 origin = ::ulong2(0), bool transpose = false);
MSL_MATRIX_MEMORY(__global)
MSL_MATRIX_MEMORY(__local)
template <class D, class A, class B>
void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                        simdgroup_matrix<B, 8, 8> b);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c);

#else

template <class T, int Rows, int Columns = Rows>
MSL_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.elements = typename simdgroup_matrix<T, Rows, Columns>::storage_type(value);
  return matrix;
}
template <class T, int Rows, int Columns = Rows>
MSL_INLINE simdgroup_matrix<T, Rows, Columns> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Rows, Columns>(value);
}
// Rows are `stride` elements apart; origin is (column, row); with `transpose`, memory holds the transposed
// matrix.
template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source, ulong stride = 8,
                               ::ulong2 origin = ::ulong2(0), bool transpose = false) {
  const int lane = msl::lane();
  const ulong row = static_cast<ulong>(msl::fragment_row(lane)),
              column = static_cast<ulong>(msl::fragment_column(lane));
  source += origin.y * stride + origin.x;
  if (transpose) {
    d.elements[0] = source[column * stride + row];
    d.elements[1] = source[(column + 1) * stride + row];
  } else {
    d.elements[0] = source[row * stride + column];
    d.elements[1] = source[row * stride + column + 1];
  }
}
template <class T>
MSL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> a, T* target, ulong stride = 8,
                                ::ulong2 origin = ::ulong2(0), bool transpose = false) {
  const int lane = msl::lane();
  const ulong row = static_cast<ulong>(msl::fragment_row(lane)),
              column = static_cast<ulong>(msl::fragment_column(lane));
  target += origin.y * stride + origin.x;
  if (transpose) {
    target[column * stride + row] = a.elements[0];
    target[(column + 1) * stride + row] = a.elements[1];
  } else {
    target[row * stride + column] = a.elements[0];
    target[row * stride + column + 1] = a.elements[1];
  }
}

#endif

}  // namespace metal
