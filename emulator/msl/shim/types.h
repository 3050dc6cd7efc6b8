// Scalars, vectors, their constructors and conversions.
//
// Vectors are clang's ext_vector_type, with Metal's sizes, alignments, swizzles and operators. The scanner rewrites
// constructors to msl::construct, and refuses casts.
//
// Comparisons of vectors return vectors of integers of the same width, 0 or -1, as in OpenCL. There are no vectors
// of bool.
#pragma once

#if !MSL_CHECK
typedef _Float16 half;
#endif
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;

#define MSL_FOR_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define MSL_FOR_FLOATS(X) X(float) X(half)
#define MSL_FOR_NUMBERS(X) MSL_FOR_INTEGERS(X) MSL_FOR_FLOATS(X)
#define MSL_FOR_WIDTHS(X, argument, T) X(argument, T##2) X(argument, T##3) X(argument, T##4)

#define MSL_DEFINE_VECTORS(T)                         \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_FOR_NUMBERS(MSL_DEFINE_VECTORS)

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

namespace msl {

template <class T>
using identity = T;

// Element type and number of elements of scalars (1) and vectors.
template <class T>
struct Shape {
  typedef T element;
  MSL_CONSTANT int width = 1;
};
#define MSL_DEFINE_SHAPE(T, N)  \
  template <>                   \
  struct Shape<T##N> {          \
    typedef T element;          \
    MSL_CONSTANT int width = N; \
  };
#define MSL_DEFINE_SHAPES(T) MSL_DEFINE_SHAPE(T, 2) MSL_DEFINE_SHAPE(T, 3) MSL_DEFINE_SHAPE(T, 4)
MSL_FOR_NUMBERS(MSL_DEFINE_SHAPES)

template <class A, class B>
struct Same {
  MSL_CONSTANT bool value = false;
};
template <class A>
struct Same<A, A> {
  MSL_CONSTANT bool value = true;
};
// Appends the elements of a scalar or vector to a vector.
template <class V, class A>
MSL_INLINE constexpr void append(MSL_THREAD V& vector, MSL_THREAD int& position, A value) {
  if constexpr (Shape<A>::width == 1) {
    vector[position++] = static_cast<typename Shape<V>::element>(value);
  } else {
    for (int i = 0; i < Shape<A>::width; ++i) {
      vector[position++] = static_cast<typename Shape<V>::element>(value[i]);
    }
  }
}

template <class V>
MSL_INLINE constexpr V construct() {
  return V();
}
// Constructs a vector from one scalar or a vector of the same width; other types follow C++.
template <class V, class A>
MSL_INLINE constexpr V construct(A value) {
  if constexpr (Same<V, A>::value) {
    return value;
  } else if constexpr (Shape<V>::width == 1) {
    return V(value);
  } else if constexpr (Shape<A>::width == 1) {
    return V(static_cast<typename Shape<V>::element>(value));
  } else {
    static_assert(Shape<A>::width == Shape<V>::width, "conversion between vectors of different widths");
    return __builtin_convertvector(value, V);
  }
}
// Constructs a vector from scalars and vectors, in order.
template <class V, class A, class B, class... Rest>
MSL_INLINE constexpr V construct(A first, B second, Rest... rest) {
  if constexpr (Shape<V>::width == 1) {
    return V(first, second, rest...);
  } else {
    static_assert(Shape<A>::width + Shape<B>::width + (Shape<Rest>::width + ... + 0) == Shape<V>::width,
                  "wrong number of components in a vector constructor");
    if constexpr (sizeof...(Rest) + 2 == Shape<V>::width) {  // scalars only: a constant expression
      typedef typename Shape<V>::element E;
      return V{static_cast<E>(first), static_cast<E>(second), static_cast<E>(rest)...};
    } else {
      V vector = V();
      int position = 0;
      append(vector, position, first);
      append(vector, position, second);
      (append(vector, position, rest), ...);
      return vector;
    }
  }
}

}  // namespace msl

namespace metal {

using ::vec;
#define MSL_USE_VECTORS(T) \
  using ::T##2;            \
  using ::T##3;            \
  using ::T##4;
MSL_FOR_NUMBERS(MSL_USE_VECTORS)

template <class T, class A>
MSL_INLINE T as_type(A value) {
  static_assert(sizeof(T) == sizeof(A), "as_type between types of different size");
#if MSL_CHECK
  return T();
#else
  return __builtin_bit_cast(T, value);
#endif
}

}  // namespace metal
using metal::as_type;
