// Type traits, numeric_limits and small utilities.
#pragma once

namespace metal {

template <class T, T V>
struct integral_constant {
  MSL_CONSTANT T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class... T>
struct _disjunction : bool_constant<(T::value || ...)> {};  // the name in Apple's headers

#define MSL_TRANSFORM(name, result) \
  template <class T>                \
  struct name {                     \
    typedef result type;            \
  };                                \
  template <class T>                \
  using name##_t = typename name<T>::type;
MSL_TRANSFORM(remove_cv, __remove_cv(T))
MSL_TRANSFORM(remove_const, __remove_const(T))
MSL_TRANSFORM(remove_volatile, __remove_volatile(T))
MSL_TRANSFORM(remove_reference, __remove_reference_t(T))
MSL_TRANSFORM(remove_pointer, __remove_pointer(T))
MSL_TRANSFORM(remove_extent, __remove_extent(T))
MSL_TRANSFORM(remove_addrspace, __remove_cv(T))
MSL_TRANSFORM(decay, __decay(T))
MSL_TRANSFORM(make_signed, __make_signed(T))
MSL_TRANSFORM(make_unsigned, __make_unsigned(T))
MSL_TRANSFORM(underlying_type, __underlying_type(T))

template <class T>
struct is_floating_point : bool_constant<__is_floating_point(T) || is_same<__remove_cv(T), half>::value> {};
#if __METAL_VERSION__ >= 310
template <>
struct is_floating_point<bfloat> : true_type {};
template <>
struct is_floating_point<const bfloat> : true_type {};
#endif
#define MSL_PREDICATE(name, condition) \
  template <class T>                   \
  struct name : bool_constant<(condition)> {};
MSL_PREDICATE(is_integral, __is_integral(T))
MSL_PREDICATE(is_arithmetic, __is_integral(T) || is_floating_point<T>::value)
MSL_PREDICATE(is_scalar, __is_integral(T) || is_floating_point<T>::value || __is_enum(T) || __is_pointer(T))
MSL_PREDICATE(is_signed, is_floating_point<T>::value || __is_signed(T))
MSL_PREDICATE(is_unsigned, __is_unsigned(T))
MSL_PREDICATE(is_void, __is_void(T))
MSL_PREDICATE(is_pointer, __is_pointer(T))
MSL_PREDICATE(is_reference, __is_reference(T))
MSL_PREDICATE(is_array, __is_array(T))
MSL_PREDICATE(is_enum, __is_enum(T))
MSL_PREDICATE(is_class, __is_class(T))
MSL_PREDICATE(is_union, __is_union(T))
MSL_PREDICATE(is_const, __is_const(T))
MSL_PREDICATE(is_trivial, __is_trivial(T))
MSL_PREDICATE(is_trivially_copyable, __is_trivially_copyable(T))
MSL_PREDICATE(is_vector, msl::Shape<__remove_cv(T)>::width > 1)
#define MSL_PREDICATE2(name, condition) \
  template <class A, class B>           \
  struct name : bool_constant<(condition)> {};
MSL_PREDICATE2(is_convertible, __is_convertible_to(A, B))
MSL_PREDICATE2(is_base_of, __is_base_of(A, B))
#define MSL_VARIABLE(name) \
  template <class... T>    \
  MSL_CONSTANT bool name##_v = name<T...>::value;
MSL_VARIABLE(is_same)
MSL_VARIABLE(is_convertible)
MSL_VARIABLE(is_base_of)
MSL_VARIABLE(is_integral) MSL_VARIABLE(is_floating_point) MSL_VARIABLE(is_arithmetic) MSL_VARIABLE(is_scalar)
    MSL_VARIABLE(is_signed) MSL_VARIABLE(is_unsigned) MSL_VARIABLE(is_void) MSL_VARIABLE(is_pointer)
        MSL_VARIABLE(is_reference) MSL_VARIABLE(is_array) MSL_VARIABLE(is_enum) MSL_VARIABLE(is_class)
            MSL_VARIABLE(is_union) MSL_VARIABLE(is_const) MSL_VARIABLE(is_trivial)
                MSL_VARIABLE(is_trivially_copyable) MSL_VARIABLE(is_vector)

                    template <class T>
                    struct make_scalar {
  typedef typename msl::Shape<T>::element type;
};
template <class T>
using make_scalar_t = typename make_scalar<T>::type;

// Number of elements, and limits that libraries specialize, under the names of Apple's headers.
template <class T>
struct vec_elements : integral_constant<int, msl::Shape<T>::width> {};
template <class T>
struct _numeric_limits_impl;

template <class T>
struct numeric_limits : _numeric_limits_impl<T> {};
#define MSL_INTEGER_LIMITS(T, low, high)     \
  template <>                                \
  struct numeric_limits<T> {                 \
    MSL_CONSTANT bool is_specialized = true; \
    MSL_CONSTANT bool is_integer = true;     \
    MSL_CONSTANT bool is_signed = low < 0;   \
    MSL_CONSTANT bool has_infinity = false;  \
    static constexpr T min() {               \
      return low;                            \
    }                                        \
    static constexpr T max() {               \
      return high;                           \
    }                                        \
    static constexpr T lowest() {            \
      return low;                            \
    }                                        \
    static constexpr T epsilon() {           \
      return 0;                              \
    }                                        \
    static constexpr T infinity() {          \
      return 0;                              \
    }                                        \
  };
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
MSL_INTEGER_LIMITS(uint, 0, UINT_MAX)
MSL_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX)
MSL_INTEGER_LIMITS(ulong, 0, ULONG_MAX)
#define MSL_FLOAT_LIMITS(T, largest, smallest, distance, bits) \
  template <>                                                  \
  struct numeric_limits<T> {                                   \
    MSL_CONSTANT bool is_specialized = true;                   \
    MSL_CONSTANT bool is_integer = false;                      \
    MSL_CONSTANT bool is_signed = true;                        \
    MSL_CONSTANT bool has_infinity = true;                     \
    MSL_CONSTANT int digits = bits;                            \
    static constexpr T min() {                                 \
      return T(smallest);                                      \
    }                                                          \
    static constexpr T max() {                                 \
      return T(largest);                                       \
    }                                                          \
    static constexpr T lowest() {                              \
      return T(-largest);                                      \
    }                                                          \
    static constexpr T epsilon() {                             \
      return T(distance);                                      \
    }                                                          \
    static constexpr T infinity() {                            \
      return T(__builtin_inff());                              \
    }                                                          \
    static constexpr T quiet_NaN() {                           \
      return T(__builtin_nanf(""));                            \
    }                                                          \
    static constexpr T signaling_NaN() {                       \
      return T(__builtin_nanf(""));                            \
    }                                                          \
    static constexpr T denorm_min() {                          \
      return T(smallest * distance);                           \
    }                                                          \
  };
MSL_FLOAT_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24)
MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f, 11)
#if __METAL_VERSION__ >= 310
MSL_FLOAT_LIMITS(bfloat, 3.38953139e38f, FLT_MIN, 0.0078125f, 8)
#endif

template <class T>
using uniform = T;  // a hint for the compiler, without effect here
template <class T>
MSL_INLINE constexpr T make_uniform(T value) {
  return value;
}

#if !MSL_CHECK
template <class T, size_t N>
struct array {
  T elements[N];
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
  constexpr size_t size() const { return N; }
  T* data() { return elements; }
  const T* data() const { return elements; }
  T* begin() { return elements; }
  T* end() { return elements + N; }
  const T* begin() const { return elements; }
  const T* end() const { return elements + N; }
  void fill(T value) {
    for (T& element : elements) element = value;
  }
};
template <class T>
MSL_INLINE void swap(T& a, T& b) {
  T kept = a;
  a = b;
  b = kept;
}
#else
#define MSL_ARRAY_ACCESS(SPACE)        \
  SPACE T& operator[](size_t i) SPACE; \
  const SPACE T& operator[](size_t i) const SPACE;
template <class T, size_t N>
struct array {
  T elements[N];
  MSL_ARRAY_ACCESS(__global)
  MSL_ARRAY_ACCESS(__local)
  MSL_ARRAY_ACCESS(__private)
  constexpr size_t size() const { return N; }
};
template <class T>
void swap(__private T& a, __private T& b);
#endif

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}
enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

}  // namespace metal
