// Simdgroup operations on fibers: a thread stores its value in the exchange area of its simdgroup and waits;
// the last one to arrive computes the results of all.
//
// Words of the exchange area are accessed atomically with relaxed ordering: ThreadSanitizer then reports no race
// here and assumes no ordering, as Metal's operations order no other accesses.
#pragma once

namespace msl {

namespace abi = ::metal_emulator::abi;
using abi::Operation;
using abi::Place;
using abi::Simdgroup;
typedef abi::u32 Lanes;  // a set of lanes
constexpr int kOk = -1;

#define MSL_SITE ::metal_emulator::abi::Place msl_site = {__builtin_FILE(), __builtin_LINE()}
#define MSL_EXECUTE __attribute__((no_sanitize("thread"))) int

template <class T>
MSL_INLINE void put(ulong (&slot)[2], T value) {
  static_assert(sizeof(T) <= 16, "simdgroup operations take at most 16 bytes");
  ulong words[2] = {0, 0};
  __builtin_memcpy(words, &value, sizeof(T));
  __atomic_store_n(&slot[0], words[0], __ATOMIC_RELAXED);
  if constexpr (sizeof(T) > 8) __atomic_store_n(&slot[1], words[1], __ATOMIC_RELAXED);
}
template <class T>
MSL_INLINE T get(const ulong (&slot)[2]) {
  ulong words[2] = {__atomic_load_n(&slot[0], __ATOMIC_RELAXED), 0};
  if constexpr (sizeof(T) > 8) words[1] = __atomic_load_n(&slot[1], __ATOMIC_RELAXED);
  T value;
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}
MSL_INLINE bool contains(Lanes lanes, int lane) {
  return lanes >> lane & 1;
}

template <class T>
MSL_INLINE T collective(const Operation& operation, T value, uint argument, Place place) {
  abi::Worker& worker = abi::current_worker();
  abi::Fiber& fiber = abi::current_fiber();
  Simdgroup& simdgroup = *fiber.simdgroup;
  put(simdgroup.in[fiber.lane], value);
  __atomic_store_n(&simdgroup.argument[fiber.lane], argument, __ATOMIC_RELAXED);
  worker.arrive(worker, fiber, operation, place);
  return get<T>(simdgroup.out[fiber.lane]);
}

MSL_INLINE int lane() {
  return static_cast<int>(abi::current_fiber().lane);
}

// Computes one result for all lanes, combining values in the order of an exclusive-or butterfly, as on a GPU.
template <class T, class F>
struct Reduce {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    T values[32];
    Lanes have = lanes;
    for (int i = 0; i < 32; ++i) values[i] = get<T>(s.in[i]);
    for (int distance = 16; distance > 0; distance >>= 1) {
      if (have == ~0u) {
        for (int i = 0; i < distance; ++i) values[i] = F::apply(values[i], values[i + distance]);
        continue;
      }
      for (int i = 0; i < distance; ++i) {
        if (contains(have, i) && contains(have, i + distance)) {
          values[i] = F::apply(values[i], values[i + distance]);
        } else if (contains(have, i + distance)) {
          values[i] = values[i + distance];
          have |= 1u << i;
        }
      }
    }
    for (int i = 0; i < 32; ++i) {
      if (contains(lanes, i)) put(s.out[i], values[0]);
    }
    return kOk;
  }
  static constexpr Operation operation{F::name, &execute};
};

// Each lane receives the value of the lane whose index differs in the bits of its argument.
template <class T>
struct ShuffleXor {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    for (int i = 0; i < 32; ++i) {
      if (!contains(lanes, i)) continue;
      const uint source = static_cast<uint>(i) ^ s.argument[i];
      if (source >= 32 || !contains(lanes, static_cast<int>(source))) return i;
      put(s.out[i], get<T>(s.in[source]));
    }
    return kOk;
  }
  static constexpr Operation operation{"simd_shuffle_xor", &execute};
};

#define MSL_COMBINE(Type, function, expression)             \
  struct Type {                                             \
    static constexpr const char* name = "simd_" #function;  \
    template <class T>                                      \
    MSL_INLINE static T apply(T a, T b) {                   \
      return static_cast<T>(expression);                    \
    }                                                       \
  };
MSL_COMBINE(Sum, sum, a + b)
MSL_COMBINE(Max, max, metal::max(a, b))
MSL_COMBINE(Min, min, metal::min(a, b))
MSL_COMBINE(Any, any, a || b)

}  // namespace msl

namespace metal {

MSL_INLINE void threadgroup_barrier(mem_flags, MSL_SITE) {
  msl::abi::Worker& worker = msl::abi::current_worker();
  worker.threadgroup_barrier(worker, msl::abi::current_fiber(), msl_site);
}
MSL_INLINE void simdgroup_barrier(mem_flags, MSL_SITE) {
  msl::abi::Worker& worker = msl::abi::current_worker();
  worker.simdgroup_barrier(worker, msl::abi::current_fiber(), msl_site);
}

#define MSL_REDUCTION(function, F)                                                 \
  template <class T>                                                               \
  MSL_INLINE T simd_##function(T value, MSL_SITE) {                                \
    return msl::collective(msl::Reduce<T, msl::F>::operation, value, 0, msl_site); \
  }
MSL_REDUCTION(sum, Sum)
MSL_REDUCTION(max, Max)
MSL_REDUCTION(min, Min)
MSL_INLINE bool simd_any(bool value, MSL_SITE) {
  return msl::collective(msl::Reduce<bool, msl::Any>::operation, value, 0, msl_site);
}
template <class T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask, MSL_SITE) {
  return msl::collective(msl::ShuffleXor<T>::operation, value, mask, msl_site);
}

}  // namespace metal
