// Kernel entries for NVIDIA GPUs; cuda/abi.h describes their parameters.
#pragma once

namespace msl {

namespace abi = ::metal_emulator::cuda;

#define MSL_GLOBAL __attribute__((address_space(1)))
#define MSL_SHARED __attribute__((address_space(3)))
#define MSL_PARAMETER __attribute__((address_space(101)))

// Threadgroup memory, whose size the dispatch sets.
extern "C" MSL_SHARED __attribute__((aligned(16))) char msl_threadgroup_memory[];

// The parameters as the entry declares them, and their form for reading: in their own address space, at the
// address that the entry determines. If kernels read the declared structure, the compiler might copy memory
// that a pointer may refer to.
template <unsigned Bytes>
struct alignas(16) Parameters {
  ulong words[Bytes / 8];
};
struct Given {
  const MSL_PARAMETER char* bytes;
  template <class T>
  MSL_INLINE T read(unsigned offset) const {
    return *reinterpret_cast<const MSL_PARAMETER T*>(bytes + offset);
  }
};

// Memory of an argument, from an address in its own space, which the compiler then knows.
template <class T>
MSL_INLINE T* device_memory(ulong address) {
  return (T*)(T MSL_GLOBAL*)address;
}
template <class T>
MSL_INLINE T* threadgroup_memory(ulong offset) {
  return (T*)(T MSL_SHARED*)(msl_threadgroup_memory + offset);
}

template <class T>
struct Argument {};
template <class T>
struct Argument<T*> {
  MSL_INLINE static T* device(ulong address) { return device_memory<T>(address); }
  MSL_INLINE static T* threadgroup(ulong offset) { return threadgroup_memory<T>(offset); }
};
template <class T>
struct Argument<T&> {
  MSL_INLINE static T& device(ulong address) { return *device_memory<T>(address); }
  MSL_INLINE static T& threadgroup(ulong offset) { return *threadgroup_memory<T>(offset); }
  MSL_INLINE static T& value(const MSL_PARAMETER char* bytes) { return *(T*)(T MSL_PARAMETER*)bytes; }
};

#define MSL_REGISTERS(name) \
  __nvvm_read_ptx_sreg_##name##_x(), __nvvm_read_ptx_sreg_##name##_y(), __nvvm_read_ptx_sreg_##name##_z()
MSL_INLINE abi::Vec3 register_vector(int x, int y, int z) {
  return {static_cast<uint>(x), static_cast<uint>(y), static_cast<uint>(z)};
}

template <class T, class P, bool ByValue, bool Constant>
MSL_INLINE T argument(Given given, abi::Place place) {
  constexpr Role role = P::role;
  static_assert(fits_role<T, P>());
  const abi::Vec3 thread = register_vector(MSL_REGISTERS(tid)), size = register_vector(MSL_REGISTERS(ntid));
  const abi::Vec3 block = register_vector(MSL_REGISTERS(ctaid)), grid = register_vector(MSL_REGISTERS(nctaid));
  if constexpr (role == Role::buffer) {
    if constexpr (ByValue && abi::is_inline(Constant, Pointee<T>::reference, Pointee<T>::bytes)) {
      return Argument<T>::value(given.bytes + place.value);
    } else {
      return Argument<T>::device(given.read<ulong>(place.slot));
    }
  } else if constexpr (role == Role::threadgroup) {
    return Argument<T>::threadgroup(given.read<ulong>(place.slot));
  } else if constexpr (role == Role::thread_position_in_grid) {
    return position<T>(
        abi::Vec3{block.x * size.x + thread.x, block.y * size.y + thread.y, block.z * size.z + thread.z});
  } else if constexpr (role == Role::threads_per_grid) {
    return position<T>(abi::Vec3{grid.x * size.x, grid.y * size.y, grid.z * size.z});
  } else if constexpr (role == Role::threadgroup_position_in_grid) {
    return position<T>(block);
  } else if constexpr (role == Role::threadgroups_per_grid) {
    return position<T>(grid);
  } else if constexpr (role == Role::threads_per_threadgroup) {
    return position<T>(size);
  } else {
    return index_value<T, role>(thread_index(), size.x * size.y * size.z);
  }
}

template <class T, T... I>
struct Indices {};

constexpr bool has_slot(Role role) {
  return role == Role::buffer || role == Role::threadgroup;
}

// A kernel and its parameters. `Constants` has a bit per parameter, set if it is in the constant space.
template <auto Kernel, uint Constants, class... P>
struct Entry;
template <class... T, void (*Kernel)(T...), uint Constants, class... P>
struct Entry<Kernel, Constants, P...> {
  static_assert(sizeof...(T) == sizeof...(P),
                "the scanner and the compiler disagree about a kernel's parameters");
  static_assert(sizeof...(T) <= 32, "a bit for each parameter");

  struct Layout {
    abi::Place places[sizeof...(T) + 1];
    unsigned bytes;
  };
  static constexpr Layout layout() {
    unsigned i = 0;
    const abi::Form forms[] = {
        abi::Form{has_slot(P::role),
                  abi::is_inline(Constants >> i++ & 1, Pointee<T>::reference, Pointee<T>::bytes) &&
                      P::role == Role::buffer,
                  Pointee<T>::bytes}...,
        abi::Form{}};
    Layout result{};
    result.bytes = abi::lay_out(forms, sizeof...(T), result.places);
    return result;
  }
  typedef Parameters<layout().bytes> Declared;

  template <bool ByValue, uint... I>
  MSL_INLINE static void call(Given given, Indices<uint, I...>) {
    constexpr Layout places = layout();
    Kernel(argument<T, P, ByValue, (Constants >> I & 1) != 0>(given, places.places[I])...);
  }
  template <bool ByValue>
  MSL_INLINE static void call(ulong parameters) {
    // If a kernel may start before the previous one has ended, the executor inserts a wait here.
    asm volatile("// await" ::: "memory");
    const Given given{reinterpret_cast<const MSL_PARAMETER char*>(parameters)};
    call<ByValue>(given, __make_integer_seq<Indices, uint, sizeof...(T)>());
  }
};

}  // namespace msl

#define MSL_ENTRY_FOR(name, by_value, ...)                                                    \
  extern "C" __attribute__((nvptx_kernel, flatten)) void name(                                \
      [[maybe_unused]] ::msl::Entry<__VA_ARGS__>::Declared declared) {                        \
    ulong parameters;                                                                         \
    asm("mov.b64 %0, " #name "_param_0;" : "=l"(parameters));                                 \
    ::msl::Entry<__VA_ARGS__>::call<by_value>(parameters);                                    \
  }
#define MSL_ENTRY(number, ...)                               \
  MSL_ENTRY_FOR(kernel_##number##_values, true, __VA_ARGS__) \
  MSL_ENTRY_FOR(kernel_##number##_addresses, false, __VA_ARGS__)

// Aligned so that adjacent elements can be moved together.
#define MSL_THREADGROUP_VARIABLE(variable, dimensions, kernel, ...)                                      \
  static MSL_SHARED __attribute__((loader_uninitialized, aligned(16)))::msl::identity<__VA_ARGS__>       \
      variable##_memory MSL_UNWRAP dimensions;                                                           \
  ::msl::identity<__VA_ARGS__>(&variable) MSL_UNWRAP dimensions =                                        \
      *(::msl::identity<__VA_ARGS__>(*) MSL_UNWRAP dimensions)&variable##_memory
