// Kernel entries for the fiber executor.
#pragma once

namespace msl {

template <class T, class P>
MSL_INLINE T argument(const abi::Invocation& i) {
  constexpr Role role = P::role;
  static_assert(fits_role<T, P>());
  if constexpr (role == Role::buffer) {
    return Pointee<T>::from(i.buffers[P::index]);
  } else if constexpr (role == Role::threadgroup) {
    return Pointee<T>::from(i.threadgroup[P::index]);
  } else if constexpr (role == Role::thread_position_in_grid) {
    return position<T>(i.thread_position_in_grid);
  } else if constexpr (role == Role::threads_per_grid) {
    return position<T>(i.threads_per_grid);
  } else if constexpr (role == Role::threadgroup_position_in_grid) {
    return position<T>(i.threadgroup_position_in_grid);
  } else if constexpr (role == Role::threadgroups_per_grid) {
    return position<T>(i.threadgroups_per_grid);
  } else if constexpr (role == Role::threads_per_threadgroup) {
    return position<T>(i.threads_per_threadgroup);
  } else {
    const abi::Vec3 size = i.threads_per_threadgroup;
    return index_value<T, role>(i.thread_index_in_threadgroup, size.x * size.y * size.z);
  }
}

template <auto Kernel>
struct Layout {
  [[clang::require_constant_initialization]] static inline abi::ThreadgroupLayout variables{};
};
// The offset of a variable in its kernel's threadgroup memory is computed before main.
template <class T, class Tag, auto Kernel>
struct ThreadgroupVariable {
  static inline const abi::u64 offset = Layout<Kernel>::variables.add(Tag::name(), sizeof(T));
};
template <class T, class Tag, auto Kernel>
MSL_INLINE T& threadgroup_variable() {
  return *reinterpret_cast<T*>(abi::current_worker().threadgroup_memory +
                               ThreadgroupVariable<T, Tag, Kernel>::offset);
}

template <auto Kernel, class... P>
struct Entry;
template <class... T, void (*Kernel)(T...), class... P>
struct Entry<Kernel, P...> {
  static_assert(sizeof...(T) == sizeof...(P),
                "the scanner and the compiler disagree about a kernel's parameters");
  static void call(const abi::Invocation& invocation) { Kernel(argument<T, P>(invocation)...); }
  static constexpr bool writable[] = {Pointee<T>::writable..., false};
  static constexpr bool reference[] = {Pointee<T>::reference..., false};
  static constexpr ulong bytes[] = {Pointee<T>::bytes..., 0};
  static constexpr ulong alignment[] = {Pointee<T>::alignment..., 0};
  static constexpr const abi::ThreadgroupLayout* layout = &Layout<Kernel>::variables;
};

}  // namespace msl

#define MSL_THREADGROUP_VARIABLE(variable, dimensions, kernel, ...)                                   \
  struct variable##_tag {                                                                             \
    static const char* name() {                                                                       \
      return #variable;                                                                               \
    }                                                                                                 \
  };                                                                                                  \
  ::msl::identity<__VA_ARGS__>(&variable) MSL_UNWRAP dimensions =                                     \
      ::msl::threadgroup_variable<::msl::identity<__VA_ARGS__> MSL_UNWRAP dimensions, variable##_tag, \
                                  &MSL_UNWRAP kernel>()
