// Simdgroup and quad operations on fibers: a thread leaves its value in the exchange area of its simdgroup
// and waits; the last one to arrive computes the results of all.
//
// Words of the exchange area are accessed atomically with relaxed ordering: ThreadSanitizer then reports no race
// here and assumes no ordering, as Metal's operations order no other accesses.
#pragma once

namespace msl {

using ::metal_emulator::abi::Operation;
using ::metal_emulator::abi::Simdgroup;
typedef ::metal_emulator::abi::u32 Lanes;  // a set of lanes
constexpr int kOk = -1;

#define MSL_SITE const char *msl_file = __builtin_FILE(), int msl_line = __builtin_LINE()
#define MSL_HERE msl_file, msl_line
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
MSL_INLINE T collective(const Operation& operation, T value, uint argument, const char* file, int line) {
  ::metal_emulator::abi::Worker& worker = ::metal_emulator::abi::current_worker();
  ::metal_emulator::abi::Fiber& fiber = ::metal_emulator::abi::current_fiber();
  Simdgroup& simdgroup = *fiber.simdgroup;
  put(simdgroup.in[fiber.lane], value);
  __atomic_store_n(&simdgroup.argument[fiber.lane], argument, __ATOMIC_RELAXED);
  worker.arrive(worker, fiber, operation, file, static_cast<uint>(line));
  return get<T>(simdgroup.out[fiber.lane]);
}

MSL_INLINE int lane() {
  return static_cast<int>(::metal_emulator::abi::current_fiber().lane);
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
  static constexpr Operation operation{F::name, 32, &execute};
};
template <class T, class F>
struct QuadReduce {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    const int base = __builtin_ctz(lanes) & ~3;
    T values[4];
    Lanes have = lanes >> base;
    for (int i = 0; i < 4; ++i) values[i] = get<T>(s.in[base + i]);
    for (int distance = 2; distance > 0; distance >>= 1) {
      for (int i = 0; i < distance; ++i) {
        if (contains(have, i) && contains(have, i + distance)) {
          values[i] = F::apply(values[i], values[i + distance]);
        } else if (contains(have, i + distance)) {
          values[i] = values[i + distance];
          have |= 1u << i;
        }
      }
    }
    for (int i = 0; i < 4; ++i) {
      if (contains(lanes, base + i)) put(s.out[base + i], values[0]);
    }
    return kOk;
  }
  static constexpr Operation operation{F::quad_name, 4, &execute};
};

// Sums or products of the active lanes below (exclusive) or up to (inclusive) each lane; width 32 or 4.
template <class T, class F, bool Inclusive, uint Width>
struct Prefix {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    const int base = Width == 4 ? __builtin_ctz(lanes) & ~3 : 0;
    T running = T(F::identity);
    for (int i = base; i < base + static_cast<int>(Width); ++i) {
      if (!contains(lanes, i)) continue;
      const T value = get<T>(s.in[i]);
      const T next = F::apply(running, value);
      put(s.out[i], Inclusive ? next : running);
      running = next;
    }
    return kOk;
  }
  static constexpr Operation operation{Inclusive ? F::inclusive_name : F::exclusive_name, Width, &execute};
};

// Each lane receives the value of the lane that F computes from its own index and argument.
template <class T, class F, uint Width>
struct Shuffle {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    const int base = Width == 4 ? __builtin_ctz(lanes) & ~3 : 0;
    for (int i = base; i < base + static_cast<int>(Width); ++i) {
      if (!contains(lanes, i)) continue;
      const int source =
          base + F::source(i - base, static_cast<int>(s.argument[i]), static_cast<int>(Width), lanes >> base);
      if (source < base || source >= base + static_cast<int>(Width) || !contains(lanes, source)) return i;
      put(s.out[i], get<T>(s.in[source]));
    }
    return kOk;
  }
  static constexpr Operation operation{Width == 4 ? F::quad_name : F::name, Width, &execute};
};

#define MSL_NAMES(function) \
  static constexpr const char *name = "simd_" #function, *quad_name = "quad_" #function;
#define MSL_COMBINE(Type, function, expression) \
  struct Type {                                 \
    MSL_NAMES(function)                         \
    template <class T>                          \
    MSL_INLINE static T apply(T a, T b) {       \
      return static_cast<T>(expression);        \
    }                                           \
  };
#define MSL_SCAN(Type, function, expression, start)                                   \
  struct Type {                                                                       \
    MSL_NAMES(function)                                                               \
    static constexpr const char *inclusive_name = "simd_prefix_inclusive_" #function, \
                                *exclusive_name = "simd_prefix_exclusive_" #function; \
    static constexpr int identity = start;                                            \
    template <class T>                                                                \
    MSL_INLINE static T apply(T a, T b) {                                             \
      if constexpr (Shape<T>::width > 1)                                              \
        return expression;                                                            \
      else                                                                            \
        return static_cast<T>(expression);                                            \
    }                                                                                 \
  };
MSL_SCAN(Sum, sum, a + b, 0)
MSL_SCAN(Product, product, a* b, 1)
MSL_COMBINE(Max, max, metal::max(widened(a), widened(b)))
MSL_COMBINE(Min, min, metal::min(widened(a), widened(b)))
MSL_COMBINE(And, and, a& b)
MSL_COMBINE(Or, or, a | b)
MSL_COMBINE(Xor, xor, a ^ b)
MSL_COMBINE(Any, any, a || b)
MSL_COMBINE(All, all, a&& b)

#define MSL_SOURCE(Type, function, expression)                                     \
  struct Type {                                                                    \
    MSL_NAMES(function)                                                            \
    MSL_INLINE static int source(int lane, int argument, int width, Lanes lanes) { \
      (void)lane, (void)argument, (void)width, (void)lanes;                        \
      return expression;                                                           \
    }                                                                              \
  };
MSL_SOURCE(ToLane, shuffle, argument)
MSL_SOURCE(Broadcast, broadcast, argument)
MSL_SOURCE(BroadcastFirst, broadcast_first, __builtin_ctz(lanes))
MSL_SOURCE(ShuffleXor, shuffle_xor, lane ^ argument)
MSL_SOURCE(ShuffleUp, shuffle_up, lane < argument ? lane : lane - argument)
MSL_SOURCE(ShuffleDown, shuffle_down, lane + argument >= width ? lane : lane + argument)
MSL_SOURCE(RotateUp, shuffle_rotate_up, (lane - argument) & (width - 1))
MSL_SOURCE(RotateDown, shuffle_rotate_down, (lane + argument) & (width - 1))

struct Ballot {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    ulong bits = 0;
    for (int i = 0; i < 32; ++i) {
      if (contains(lanes, i) && get<bool>(s.in[i])) bits |= 1ul << i;
    }
    for (int i = 0; i < 32; ++i) {
      if (contains(lanes, i)) put(s.out[i], bits);
    }
    return kOk;
  }
  static constexpr Operation operation{"simd_ballot", 32, &execute};
};
struct QuadBallot {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    const int base = __builtin_ctz(lanes) & ~3;
    ulong bits = 0;
    for (int i = 0; i < 4; ++i) {
      if (contains(lanes, base + i) && get<bool>(s.in[base + i])) bits |= 1ul << i;
    }
    for (int i = 0; i < 4; ++i) {
      if (contains(lanes, base + i)) put(s.out[base + i], bits);
    }
    return kOk;
  }
  static constexpr Operation operation{"quad_ballot", 4, &execute};
};

}  // namespace msl

namespace metal {

MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  ::metal_emulator::abi::Worker& worker = ::metal_emulator::abi::current_worker();
  worker.threadgroup_barrier(worker, ::metal_emulator::abi::current_fiber(), static_cast<uint>(flags),
                             msl_file, static_cast<uint>(msl_line));
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  ::metal_emulator::abi::Worker& worker = ::metal_emulator::abi::current_worker();
  worker.simdgroup_barrier(worker, ::metal_emulator::abi::current_fiber(), static_cast<uint>(flags), msl_file,
                           static_cast<uint>(msl_line));
}

#define MSL_REDUCTION(function, F)                                                     \
  template <class T>                                                                   \
  MSL_INLINE T simd_##function(T value, MSL_SITE) {                                    \
    return msl::collective(msl::Reduce<T, msl::F>::operation, value, 0, MSL_HERE);     \
  }                                                                                    \
  template <class T>                                                                   \
  MSL_INLINE T quad_##function(T value, MSL_SITE) {                                    \
    return msl::collective(msl::QuadReduce<T, msl::F>::operation, value, 0, MSL_HERE); \
  }
MSL_REDUCTION(sum, Sum)
MSL_REDUCTION(product, Product)
MSL_REDUCTION(max, Max)
MSL_REDUCTION(min, Min) MSL_REDUCTION(and, And) MSL_REDUCTION(or, Or) MSL_REDUCTION(xor, Xor)
#define MSL_VOTE(function, F)                                                             \
  MSL_INLINE bool simd_##function(bool value, MSL_SITE) {                                 \
    return msl::collective(msl::Reduce<bool, msl::F>::operation, value, 0, MSL_HERE);     \
  }                                                                                       \
  MSL_INLINE bool quad_##function(bool value, MSL_SITE) {                                 \
    return msl::collective(msl::QuadReduce<bool, msl::F>::operation, value, 0, MSL_HERE); \
  }
    MSL_VOTE(any, Any) MSL_VOTE(all, All)

#define MSL_PREFIX(function, F)                                                               \
  template <class T>                                                                          \
  MSL_INLINE T simd_prefix_inclusive_##function(T value, MSL_SITE) {                          \
    return msl::collective(msl::Prefix<T, msl::F, true, 32>::operation, value, 0, MSL_HERE);  \
  }                                                                                           \
  template <class T>                                                                          \
  MSL_INLINE T simd_prefix_exclusive_##function(T value, MSL_SITE) {                          \
    return msl::collective(msl::Prefix<T, msl::F, false, 32>::operation, value, 0, MSL_HERE); \
  }                                                                                           \
  template <class T>                                                                          \
  MSL_INLINE T quad_prefix_inclusive_##function(T value, MSL_SITE) {                          \
    return msl::collective(msl::Prefix<T, msl::F, true, 4>::operation, value, 0, MSL_HERE);   \
  }                                                                                           \
  template <class T>                                                                          \
  MSL_INLINE T quad_prefix_exclusive_##function(T value, MSL_SITE) {                          \
    return msl::collective(msl::Prefix<T, msl::F, false, 4>::operation, value, 0, MSL_HERE);  \
  }
        MSL_PREFIX(sum, Sum) MSL_PREFIX(product, Product)

#define MSL_SHUFFLE(function, F)                                                               \
  template <class T>                                                                           \
  MSL_INLINE T simd_##function(T value, ushort argument, MSL_SITE) {                           \
    return msl::collective(msl::Shuffle<T, msl::F, 32>::operation, value, argument, MSL_HERE); \
  }                                                                                            \
  template <class T>                                                                           \
  MSL_INLINE T quad_##function(T value, ushort argument, MSL_SITE) {                           \
    return msl::collective(msl::Shuffle<T, msl::F, 4>::operation, value, argument, MSL_HERE);  \
  }
            MSL_SHUFFLE(shuffle, ToLane) MSL_SHUFFLE(broadcast, Broadcast)
                MSL_SHUFFLE(shuffle_xor, ShuffleXor) MSL_SHUFFLE(shuffle_up, ShuffleUp)
                    MSL_SHUFFLE(shuffle_down, ShuffleDown) MSL_SHUFFLE(shuffle_rotate_up, RotateUp)
                        MSL_SHUFFLE(shuffle_rotate_down, RotateDown) template <class T>
                        MSL_INLINE T simd_broadcast_first(T value, MSL_SITE) {
  return msl::collective(msl::Shuffle<T, msl::BroadcastFirst, 32>::operation, value, 0, MSL_HERE);
}
template <class T>
MSL_INLINE T quad_broadcast_first(T value, MSL_SITE) {
  return msl::collective(msl::Shuffle<T, msl::BroadcastFirst, 4>::operation, value, 0, MSL_HERE);
}

}  // namespace metal

#include "simdgroup_votes.h"

namespace metal {

MSL_INLINE simd_vote simd_ballot(bool value, MSL_SITE) {
  return simd_vote(msl::collective<ulong>(msl::Ballot::operation, value, 0, MSL_HERE));
}
MSL_INLINE simd_vote simd_active_threads_mask(MSL_SITE) {
  return simd_ballot(true, MSL_HERE);
}
MSL_INLINE quad_vote quad_ballot(bool value, MSL_SITE) {
  return quad_vote(msl::collective<ulong>(msl::QuadBallot::operation, value, 0, MSL_HERE));
}
MSL_INLINE quad_vote quad_active_threads_mask(MSL_SITE) {
  return quad_ballot(true, MSL_HERE);
}
MSL_INLINE bool simd_is_first(MSL_SITE) {
  return __builtin_ctzl(static_cast<ulong>(simd_ballot(true, MSL_HERE))) == msl::lane();
}
MSL_INLINE bool quad_is_first(MSL_SITE) {
  return __builtin_ctzl(static_cast<ulong>(quad_ballot(true, MSL_HERE))) == (msl::lane() & 3);
}
MSL_INLINE bool simd_is_helper_thread() {
  return false;
}

}  // namespace metal
