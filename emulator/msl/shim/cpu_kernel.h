// Kernel entries for the fiber executor.
#pragma once

namespace msl {

namespace abi = ::metal_emulator::abi;

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
  } else if constexpr (role == Role::thread_position_in_threadgroup) {
    return position<T>(i.thread_position_in_threadgroup);
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

template <class T>
struct ConstantTypeOf {
  static_assert(sizeof(T) == 0, "a function constant is a scalar: no other type is modelled");
};
#define MSL_CONSTANT_TYPE(T, number)         \
  template <>                                \
  struct ConstantTypeOf<T> {                 \
    static constexpr abi::u8 value = number; \
  };
MSL_CONSTANT_TYPE(bool, 0)
MSL_CONSTANT_TYPE(char, 1)
MSL_CONSTANT_TYPE(uchar, 2)
MSL_CONSTANT_TYPE(short, 3) MSL_CONSTANT_TYPE(ushort, 4) MSL_CONSTANT_TYPE(int, 5) MSL_CONSTANT_TYPE(uint, 6)
    MSL_CONSTANT_TYPE(long, 7) MSL_CONSTANT_TYPE(ulong, 8) MSL_CONSTANT_TYPE(half, 9)
        MSL_CONSTANT_TYPE(float, 10)

    // Function constants are variables of the host thread: each thread sets them before it runs a kernel, in
    // the order of their declarations, so pipelines with different constants can run concurrently.
    struct Specializer {
  void (*set)(abi::ConstantValues values);
  Specializer* next = nullptr;
  [[clang::require_constant_initialization]] static inline Specializer *first = nullptr, *last = nullptr;
  explicit Specializer(void (*function)(abi::ConstantValues)) : set(function) {
    (last ? last->next : first) = this;
    last = this;
  }
  static void set_all(abi::ConstantValues values) {
    for (Specializer* s = first; s; s = s->next) s->set(values);
  }
};
template <class T>
MSL_INLINE bool find_constant(abi::ConstantValues values, int index, T& result) {
  result = T();
  for (ulong i = 0; i < values.count; ++i) {
    if (values.values[i].index == index) {
      __builtin_memcpy(&result, &values.values[i].bits, sizeof(T));
      return true;
    }
  }
  return false;
}

}  // namespace msl

#define MSL_FUNCTION_CONSTANT(type, name, index)                                           \
  thread_local type name;                                                                  \
  thread_local bool name##_is_defined;                                                     \
  ::msl::Specializer name##_specializer([](::metal_emulator::abi::ConstantValues values) { \
    name##_is_defined = ::msl::find_constant(values, index, name);                         \
  })
#define MSL_COMPUTED_CONSTANT(name, value, ...) \
  thread_local __VA_ARGS__ name;                \
  ::msl::Specializer name##_specializer(        \
      [](::metal_emulator::abi::ConstantValues) { name = MSL_UNWRAP value; })
#define is_function_constant_defined(name) (name##_is_defined)

#define MSL_THREADGROUP_VARIABLE(variable, dimensions, kernel, ...)                                   \
  struct variable##_tag {                                                                             \
    static const char* name() {                                                                       \
      return #variable;                                                                               \
    }                                                                                                 \
  };                                                                                                  \
  ::msl::identity<__VA_ARGS__>(&variable) MSL_UNWRAP dimensions =                                     \
      ::msl::threadgroup_variable<::msl::identity<__VA_ARGS__> MSL_UNWRAP dimensions, variable##_tag, \
                                  &MSL_UNWRAP kernel>()
