// Simdgroup and quad operations on NVIDIA GPUs, where a simdgroup is a warp.
#pragma once

namespace msl {

#define MSL_SITE [[maybe_unused]] int msl_site = 0
#define MSL_HERE msl_site

MSL_INLINE uint thread_index() {
  return static_cast<uint>(
      __nvvm_read_ptx_sreg_tid_x() +
      __nvvm_read_ptx_sreg_ntid_x() *
          (__nvvm_read_ptx_sreg_tid_y() + __nvvm_read_ptx_sreg_ntid_y() * __nvvm_read_ptx_sreg_tid_z()));
}
MSL_INLINE int lane() {
  return static_cast<int>(thread_index() & 31);
}

// Whether a threadgroup's last simdgroup may have fewer than 32 threads. The executor substitutes a constant for
// this register, and the driver compiles each kernel for the required case.
MSL_INLINE bool is_partial() {
  return __nvvm_read_ptx_sreg_nsmid() != 0;
}
// Threads of this simdgroup.
MSL_INLINE uint lane_count() {
  const uint threads = static_cast<uint>(__nvvm_read_ptx_sreg_ntid_x() * __nvvm_read_ptx_sreg_ntid_y() *
                                         __nvvm_read_ptx_sreg_ntid_z());
  const uint left = threads - (thread_index() & ~31u);
  return is_partial() && left < 32 ? left : 32;
}
MSL_INLINE uint lanes() {
  return is_partial() ? ~0u >> (32 - lane_count()) : ~0u;
}
MSL_INLINE uint quad_lanes() {
  return lanes() & (15u << (lane() & ~3));
}

// Applies a function of 32-bit words to a value of any size.
template <class T, class F>
MSL_INLINE T by_words(T value, F function) {
  constexpr int kWords = (sizeof(T) + 3) / 4;
  int words[kWords] = {};
  __builtin_memcpy(words, &value, sizeof(T));
  for (int i = 0; i < kWords; ++i) words[i] = function(words[i]);
  T result;
  __builtin_memcpy(&result, words, sizeof(T));
  return result;
}
template <class T>
MSL_INLINE T from_lane(uint mask, T value, int source) {
  return by_words(value, [=](int word) { return __nvvm_shfl_sync_idx_i32(mask, word, source, 31); });
}
template <class T>
MSL_INLINE T from_other(uint mask, T value, int distance) {
  return by_words(value, [=](int word) { return __nvvm_shfl_sync_bfly_i32(mask, word, distance, 31); });
}
template <class T>
MSL_INLINE T from_below(uint mask, T value, int distance) {
  return by_words(value, [=](int word) { return __nvvm_shfl_sync_up_i32(mask, word, distance, 0); });
}
template <class T>
MSL_INLINE T from_above(uint mask, T value, int distance) {
  return by_words(value, [=](int word) { return __nvvm_shfl_sync_down_i32(mask, word, distance, 31); });
}

// Computes one result for all lanes, combined in the order of an exclusive-or butterfly.
template <class T, class F>
MSL_INLINE T reduce(T value, F combine) {
  const uint mask = lanes();
  for (int distance = 16; distance > 0; distance /= 2) {
    const T other = from_other(mask, value, distance);
    if (!is_partial() || static_cast<uint>(lane() ^ distance) < lane_count()) value = combine(value, other);
  }
  return is_partial() ? from_lane(mask, value, 0) : value;
}
template <class T, class F>
MSL_INLINE T quad_reduce(T value, F combine) {
  const uint mask = quad_lanes();
  for (int distance = 2; distance > 0; distance /= 2) {
    const T other = from_other(mask, value, distance);
    if (mask >> (lane() ^ distance) & 1) value = combine(value, other);
  }
  return is_partial() ? from_lane(mask, value, lane() & ~3) : value;
}
// Combines the lanes up to each one, in groups of `Width`.
template <int Width, class T, class F>
MSL_INLINE T scan(T value, F combine) {
  const uint mask = Width == 4 ? quad_lanes() : lanes();
  for (int distance = 1; distance < Width; distance *= 2) {
    const T other = from_below(mask, value, distance);
    if ((lane() & (Width - 1)) >= distance) value = combine(other, value);
  }
  return value;
}
template <int Width, class T, class F>
MSL_INLINE T exclusive_scan(T value, T identity, F combine) {
  const T below = from_below(Width == 4 ? quad_lanes() : lanes(), scan<Width>(value, combine), 1);
  return (lane() & (Width - 1)) == 0 ? identity : below;
}

}  // namespace msl

namespace metal {

MSL_INLINE void threadgroup_barrier(mem_flags) {
  __syncthreads();
}
MSL_INLINE void simdgroup_barrier(mem_flags) {
  __nvvm_bar_warp_sync(msl::lanes());
}

#define MSL_REDUCTION(function, expression)                                               \
  template <class T>                                                                      \
  MSL_INLINE T simd_##function(T value, MSL_SITE) {                                       \
    return msl::reduce(value, [](T a, T b) { return static_cast<T>(expression); });       \
  }                                                                                       \
  template <class T>                                                                      \
  MSL_INLINE T quad_##function(T value, MSL_SITE) {                                       \
    return msl::quad_reduce(value, [](T a, T b) { return static_cast<T>(expression); });  \
  }
MSL_REDUCTION(sum, a + b)
MSL_REDUCTION(product, a* b)
MSL_REDUCTION(max, metal::max(msl::widened(a), msl::widened(b)))
MSL_REDUCTION(min, metal::min(msl::widened(a), msl::widened(b)))
MSL_REDUCTION(and, a& b)
MSL_REDUCTION(or, a | b)
MSL_REDUCTION(xor, a ^ b)

#define MSL_PREFIX(function, expression, identity)                                                            \
  template <class T>                                                                                          \
  MSL_INLINE T simd_prefix_inclusive_##function(T value, MSL_SITE) {                                          \
    return msl::scan<32>(value, [](T a, T b) { return static_cast<T>(expression); });                         \
  }                                                                                                           \
  template <class T>                                                                                          \
  MSL_INLINE T simd_prefix_exclusive_##function(T value, MSL_SITE) {                                          \
    return msl::exclusive_scan<32>(value, T(identity), [](T a, T b) { return static_cast<T>(expression); });  \
  }                                                                                                           \
  template <class T>                                                                                          \
  MSL_INLINE T quad_prefix_inclusive_##function(T value, MSL_SITE) {                                          \
    return msl::scan<4>(value, [](T a, T b) { return static_cast<T>(expression); });                          \
  }                                                                                                           \
  template <class T>                                                                                          \
  MSL_INLINE T quad_prefix_exclusive_##function(T value, MSL_SITE) {                                          \
    return msl::exclusive_scan<4>(value, T(identity), [](T a, T b) { return static_cast<T>(expression); });   \
  }
MSL_PREFIX(sum, a + b, 0)
MSL_PREFIX(product, a* b, 1)

// Reads the lane that `source` computes from this lane's index in a group of `width`, and from `argument`.
#define MSL_SHUFFLE_IN(name, lanes, width, source)                                  \
  template <class T>                                                                \
  MSL_INLINE T name(T value, ushort argument, MSL_SITE) {                           \
    const int base = msl::lane() & ~(width - 1), lane = msl::lane() & (width - 1);  \
    return msl::from_lane(lanes, value, base + (source));                           \
  }
#define MSL_SHUFFLE(function, simd_result, source)                          \
  template <class T>                                                        \
  MSL_INLINE T simd_##function(T value, ushort argument, MSL_SITE) {        \
    return simd_result;                                                     \
  }                                                                         \
  MSL_SHUFFLE_IN(quad_##function, msl::quad_lanes(), 4, source)
MSL_SHUFFLE(shuffle, msl::from_lane(msl::lanes(), value, argument), argument + 0 * lane)
MSL_SHUFFLE(broadcast, msl::from_lane(msl::lanes(), value, argument), argument + 0 * lane)
MSL_SHUFFLE(shuffle_xor, msl::from_other(msl::lanes(), value, argument), lane ^ argument)
MSL_SHUFFLE(shuffle_up, msl::from_below(msl::lanes(), value, argument),
            lane < argument ? lane : lane - argument)
MSL_SHUFFLE(shuffle_down, msl::from_above(msl::lanes(), value, argument),
            lane + argument >= 4 ? lane : lane + argument)
MSL_SHUFFLE_IN(simd_shuffle_rotate_up, msl::lanes(), 32, (lane - argument) & 31)
MSL_SHUFFLE_IN(quad_shuffle_rotate_up, msl::quad_lanes(), 4, (lane - argument) & 3)
MSL_SHUFFLE_IN(simd_shuffle_rotate_down, msl::lanes(), 32, (lane + argument) & 31)
MSL_SHUFFLE_IN(quad_shuffle_rotate_down, msl::quad_lanes(), 4, (lane + argument) & 3)
template <class T>
MSL_INLINE T simd_broadcast_first(T value, MSL_SITE) {
  return msl::from_lane(msl::lanes(), value, 0);
}
template <class T>
MSL_INLINE T quad_broadcast_first(T value, MSL_SITE) {
  return msl::from_lane(msl::quad_lanes(), value, msl::lane() & ~3);
}

MSL_INLINE bool simd_any(bool value, MSL_SITE) {
  return __nvvm_vote_any_sync(msl::lanes(), value);
}
MSL_INLINE bool simd_all(bool value, MSL_SITE) {
  return __nvvm_vote_all_sync(msl::lanes(), value);
}
MSL_INLINE bool quad_any(bool value, MSL_SITE) {
  return __nvvm_vote_any_sync(msl::quad_lanes(), value);
}
MSL_INLINE bool quad_all(bool value, MSL_SITE) {
  return __nvvm_vote_all_sync(msl::quad_lanes(), value);
}

}  // namespace metal

#include "simdgroup_votes.h"

namespace metal {

MSL_INLINE simd_vote simd_ballot(bool value, MSL_SITE) {
  return simd_vote(__nvvm_vote_ballot_sync(msl::lanes(), value));
}
MSL_INLINE simd_vote simd_active_threads_mask(MSL_SITE) {
  return simd_ballot(true);
}
MSL_INLINE quad_vote quad_ballot(bool value, MSL_SITE) {
  return quad_vote(static_cast<uint>(__nvvm_vote_ballot_sync(msl::quad_lanes(), value)) >> (msl::lane() & ~3));
}
MSL_INLINE quad_vote quad_active_threads_mask(MSL_SITE) {
  return quad_ballot(true);
}
MSL_INLINE bool simd_is_first(MSL_SITE) {
  return msl::lane() == 0;
}
MSL_INLINE bool quad_is_first(MSL_SITE) {
  return (msl::lane() & 3) == 0;
}
MSL_INLINE bool simd_is_helper_thread() {
  return false;
}

}  // namespace metal
