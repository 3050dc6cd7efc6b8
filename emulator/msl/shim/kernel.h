// The kernel table. The scanner provides the roles of arguments, the function provides their types.
#pragma once

namespace msl {

enum class Role : int {
  buffer,
  threadgroup,
  thread_position_in_grid,
  threads_per_grid,
  threadgroup_position_in_grid,
  threadgroups_per_grid,
  threads_per_threadgroup,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup
};
template <Role R, int Index>
struct Parameter {
  MSL_CONSTANT Role role = R;
  MSL_CONSTANT int index = Index;
};

// Number of components of a type that can represent a position; 0 for other types.
template <class T>
struct Components {
  MSL_CONSTANT int count = 0;
};
#define MSL_COMPONENTS(T)       \
  template <>                   \
  struct Components<T> {        \
    MSL_CONSTANT int count = 1; \
  };                            \
  template <>                   \
  struct Components<T##2> {     \
    MSL_CONSTANT int count = 2; \
  };                            \
  template <>                   \
  struct Components<T##3> {     \
    MSL_CONSTANT int count = 3; \
  };
MSL_COMPONENTS(uint)
MSL_COMPONENTS(ushort)
template <class T>
struct Components<const T> : Components<T> {};

constexpr bool is_position(Role role) {
  return role >= Role::thread_position_in_grid && role <= Role::threads_per_threadgroup;
}
constexpr bool is_index(Role role) {
  return role >= Role::thread_index_in_threadgroup;
}

template <class T, class P>
constexpr bool fits_role() {
  static_assert(!is_position(P::role) || Components<T>::count > 0,
                "a position is a uint or ushort, or a vector of two or three of them");
  static_assert(!is_index(P::role) || Components<T>::count == 1, "an index is a uint or ushort");
  return true;
}

}  // namespace msl

#if !MSL_CHECK

namespace msl {

// Converts a structure with x, y and z to a position.
template <class T, class V>
MSL_INLINE T position(V v) {
  if constexpr (Components<T>::count == 1) {
    return static_cast<T>(v.x);
  } else if constexpr (Components<T>::count == 2) {
    return T{static_cast<typename Shape<T>::element>(v.x), static_cast<typename Shape<T>::element>(v.y)};
  } else {
    return T{static_cast<typename Shape<T>::element>(v.x), static_cast<typename Shape<T>::element>(v.y),
             static_cast<typename Shape<T>::element>(v.z)};
  }
}

// Computes an index from the thread's index and the size of its threadgroup.
template <class T, Role role>
MSL_INLINE T index_value(uint index, uint threads) {
  if constexpr (role == Role::thread_index_in_threadgroup) return static_cast<T>(index);
  if constexpr (role == Role::thread_index_in_simdgroup) return static_cast<T>(index % 32);
  if constexpr (role == Role::simdgroup_index_in_threadgroup) return static_cast<T>(index / 32);
  if constexpr (role == Role::simdgroups_per_threadgroup) return static_cast<T>((threads + 31) / 32);
}

// The type that a pointer or reference parameter refers to.
template <class T>
struct Pointee {
  typedef char type;
  static constexpr bool writable = false, reference = false;
  static constexpr ulong bytes = 0, alignment = 0;
  MSL_INLINE static T from(void*) { return T(); }
};
template <class T>
struct Pointee<T*> {
  static constexpr bool writable = !__is_const(T), reference = false;
  static constexpr ulong bytes = sizeof(T), alignment = alignof(T);
  MSL_INLINE static T* from(void* memory) { return static_cast<T*>(memory); }
};
template <class T>
struct Pointee<T&> {
  static constexpr bool writable = !__is_const(T), reference = true;
  static constexpr ulong bytes = sizeof(T), alignment = alignof(T);
  MSL_INLINE static T& from(void* memory) { return *static_cast<T*>(memory); }
};

}  // namespace msl

#else

namespace msl {
template <class F, class... P>
struct Checked;
template <class... T, class... P>
struct Checked<void(T...), P...> {
  static_assert(sizeof...(T) == sizeof...(P),
                "the scanner and the compiler disagree about a kernel's parameters");
  MSL_CONSTANT bool value = (fits_role<T, P>() && ...);
};
template <class T>
__local T& threadgroup_variable();
}  // namespace msl
#define MSL_THREADGROUP_VARIABLE(name, dimensions, kernel, ...)       \
  __local ::msl::identity<__VA_ARGS__>(&name) MSL_UNWRAP dimensions = \
      ::msl::threadgroup_variable<::msl::identity<__VA_ARGS__> MSL_UNWRAP dimensions>()

#endif
