// Matrices of C columns with R rows: `floatCxR`, stored column by column.
#pragma once

namespace metal {

template <class T, int C, int R = C>
struct matrix {
  static_assert(C >= 2 && C <= 4 && R >= 2 && R <= 4, "matrices have 2 to 4 columns and rows");
  typedef ::vec<T, R> column;
  column columns[C];
#if MSL_CHECK
#define MSL_MATRIX_ACCESS(SPACE)         \
  SPACE column& operator[](int i) SPACE; \
  const SPACE column& operator[](int i) const SPACE;
  matrix();
  explicit matrix(T diagonal);
  template <class... A>
  explicit matrix(A... a);
  template <class U>
  explicit matrix(matrix<U, C, R> other);
  matrix(const __global matrix& other);
  matrix(const __local matrix& other);
  matrix(const __private matrix& other);
  matrix(const __constant matrix& other);
  MSL_MATRIX_ACCESS(__global)
  MSL_MATRIX_ACCESS(__local)
  MSL_MATRIX_ACCESS(__private)
  const __constant column& operator[](int i) const __constant;
  void operator=(matrix other) __global;
  void operator=(matrix other) __local;
  void operator=(matrix other) __private;
#else
  matrix() = default;
  MSL_INLINE explicit constexpr matrix(T diagonal) : columns{} {
    for (int i = 0; i < C && i < R; ++i) columns[i][i] = diagonal;
  }
  template <class U>
  MSL_INLINE explicit constexpr matrix(const matrix<U, C, R>& other) {
    for (int i = 0; i < C; ++i) columns[i] = __builtin_convertvector(other.columns[i], column);
  }
  // Constructs a matrix from columns, or from all elements in column-major order.
  template <class... A>
  MSL_INLINE constexpr matrix(column first, column second, A... rest) : columns{first, second, rest...} {
    static_assert(sizeof...(A) + 2 == C, "wrong number of columns in a matrix constructor");
  }
  template <class... A>
  MSL_INLINE constexpr matrix(T first, T second, T third, T fourth, A... rest) {
    static_assert(sizeof...(A) + 4 == C * R, "wrong number of elements in a matrix constructor");
    const T all[] = {first, second, third, fourth, T(rest)...};
    for (int i = 0; i < C * R; ++i) columns[i / R][i % R] = all[i];
  }
  MSL_INLINE constexpr column& operator[](int i) { return columns[i]; }
  MSL_INLINE constexpr const column& operator[](int i) const { return columns[i]; }
#endif
};

#if MSL_CHECK
template <class T, int C, int R>
::vec<T, R> operator*(matrix<T, C, R> m, ::vec<T, C> v);
template <class T, int C, int R>
::vec<T, C> operator*(::vec<T, R> v, matrix<T, C, R> m);
template <class T, int K, int C, int R>
matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b);
template <class T, int C, int R>
matrix<T, C, R> operator*(matrix<T, C, R> m, T factor);
template <class T, int C, int R>
matrix<T, C, R> operator*(T factor, matrix<T, C, R> m);
template <class T, int C, int R>
matrix<T, C, R> operator+(matrix<T, C, R> a, matrix<T, C, R> b);
template <class T, int C, int R>
matrix<T, C, R> operator-(matrix<T, C, R> a, matrix<T, C, R> b);
template <class T, int C, int R>
matrix<T, R, C> transpose(matrix<T, C, R> m);
#else
template <class T, int C, int R>
MSL_INLINE ::vec<T, R> operator*(const matrix<T, C, R>& m, ::vec<T, C> v) {
  ::vec<T, R> sum = m[0] * v[0];
  for (int i = 1; i < C; ++i) sum += m[i] * v[i];
  return sum;
}
template <class T, int C, int R>
MSL_INLINE ::vec<T, C> operator*(::vec<T, R> v, const matrix<T, C, R>& m) {
  ::vec<T, C> result;
  for (int i = 0; i < C; ++i) result[i] = dot(v, m[i]);
  return result;
}
template <class T, int K, int C, int R>
MSL_INLINE matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  matrix<T, C, R> result;
  for (int i = 0; i < C; ++i) result[i] = a * b[i];
  return result;
}
template <class T, int C, int R>
MSL_INLINE matrix<T, C, R> operator*(matrix<T, C, R> m, T factor) {
  for (int i = 0; i < C; ++i) m[i] *= factor;
  return m;
}
template <class T, int C, int R>
MSL_INLINE matrix<T, C, R> operator*(T factor, const matrix<T, C, R>& m) {
  return m * factor;
}
template <class T, int C, int R>
MSL_INLINE matrix<T, C, R> operator+(matrix<T, C, R> a, const matrix<T, C, R>& b) {
  for (int i = 0; i < C; ++i) a[i] += b[i];
  return a;
}
template <class T, int C, int R>
MSL_INLINE matrix<T, C, R> operator-(matrix<T, C, R> a, const matrix<T, C, R>& b) {
  for (int i = 0; i < C; ++i) a[i] -= b[i];
  return a;
}
template <class T, int C, int R>
MSL_INLINE matrix<T, R, C> transpose(const matrix<T, C, R>& m) {
  matrix<T, R, C> result;
  for (int i = 0; i < C; ++i) {
    for (int j = 0; j < R; ++j) result[j][i] = m[i][j];
  }
  return result;
}
#endif

}  // namespace metal

#define MSL_MATRIX_NAMES(T)              \
  typedef metal::matrix<T, 2, 2> T##2x2; \
  typedef metal::matrix<T, 2, 3> T##2x3; \
  typedef metal::matrix<T, 2, 4> T##2x4; \
  typedef metal::matrix<T, 3, 2> T##3x2; \
  typedef metal::matrix<T, 3, 3> T##3x3; \
  typedef metal::matrix<T, 3, 4> T##3x4; \
  typedef metal::matrix<T, 4, 2> T##4x2; \
  typedef metal::matrix<T, 4, 3> T##4x3; \
  typedef metal::matrix<T, 4, 4> T##4x4;
MSL_FOR_FLOATS(MSL_MATRIX_NAMES)
namespace metal {
MSL_FOR_FLOATS(MSL_MATRIX_NAMES)
}
