// simdgroup_matrix<T, 8, 8>.
//
// Products are summed in float. The backend's Fragment stores a lane's elements and multiplies them.
#pragma once

namespace msl {

template <class T>
struct IsMatrixElement {
  MSL_CONSTANT bool value = Same<T, float>::value || Same<T, half>::value;
};

}  // namespace msl

namespace metal {

#if MSL_CHECK

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  static_assert(msl::IsMatrixElement<T>::value, "elements of simdgroup matrices are float or half");
  typedef ::vec<T, Rows * Columns> storage_type;  // a lane uses the first two elements
  storage_type elements;
  simdgroup_matrix();
  __private storage_type& thread_elements() __private;
  storage_type thread_elements() const __private;
};
template <class T, int Rows, int Columns = Rows>
simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value);
#define MSL_MATRIX_MEMORY(SPACE)                                                                       \
  template <class T>                                                                                   \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& d, const SPACE T* source, ulong stride = 8, \
                      ::ulong2 origin = ::ulong2(0), bool transpose = false);                          \
  template <class T>                                                                                   \
  void simdgroup_store(simdgroup_matrix<T, 8, 8> a, SPACE T* target, ulong stride = 8);
MSL_MATRIX_MEMORY(__global)
MSL_MATRIX_MEMORY(__local)
template <class A, class B>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<float, 8, 8> c);

#else

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  static_assert(msl::IsMatrixElement<T>::value, "elements of simdgroup matrices are float or half");
  typedef ::vec<T, 2> storage_type;
  msl::Fragment<T> fragment;

  MSL_INLINE storage_type& thread_elements() { return fragment.reference(); }
  MSL_INLINE storage_type thread_elements() const { return fragment.get(); }
};

template <class T, int Rows, int Columns = Rows>
MSL_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.fragment.set(::vec<T, 2>(value));
  return matrix;
}

// Rows begin at multiples of `stride` elements. `origin` is (column, row). With `transpose`, memory contains
// the transposed matrix.
template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source, ulong stride = 8,
                               ::ulong2 origin = ::ulong2(0), bool transpose = false) {
  source += origin.y * stride + origin.x;
#if MSL_PTX
  const ulong place = static_cast<ulong>(msl::fragment_place(msl::lane(), 0));
  const ::vec<T, 2> pair = msl::load_pair(source + place / 8 * stride + place % 8);
  transpose ? d.fragment.set_transposed(pair) : d.fragment.set(pair);
#else
  const int lane = msl::lane();
  ::vec<T, 2> elements;
  for (int i = 0; i < 2; ++i) {
    const ulong place = static_cast<ulong>(msl::fragment_place(lane, i)), row = place / 8, column = place % 8;
    elements[i] = source[transpose ? column * stride + row : row * stride + column];
  }
  d.fragment.set(elements);
#endif
}
template <class T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& a, T* target, ulong stride = 8) {
  const int lane = msl::lane();
  const ::vec<T, 2> elements = a.fragment.get();
  for (int i = 0; i < 2; ++i) {
    const ulong place = static_cast<ulong>(msl::fragment_place(lane, i));
    target[place / 8 * stride + place % 8] = elements[i];
  }
}

template <class A, class B>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d,
                                              const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<float, 8, 8>& c, MSL_SITE) {
  msl::multiply(d.fragment, a.fragment, b.fragment, c.fragment, msl_site);
}

#endif

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;

}  // namespace metal
