// Simdgroup operations on NVIDIA GPUs, where a simdgroup is a warp.
#pragma once

namespace msl {

#define MSL_SITE [[maybe_unused]] int msl_site = 0

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
// Number of threads of this simdgroup.
MSL_INLINE uint lane_count() {
  const uint threads = static_cast<uint>(__nvvm_read_ptx_sreg_ntid_x() * __nvvm_read_ptx_sreg_ntid_y() *
                                         __nvvm_read_ptx_sreg_ntid_z());
  const uint left = threads - (thread_index() & ~31u);
  return is_partial() && left < 32 ? left : 32;
}
MSL_INLINE uint lanes() {
  return is_partial() ? ~0u >> (32 - lane_count()) : ~0u;
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

}  // namespace msl

namespace metal {

MSL_INLINE void threadgroup_barrier(mem_flags) {
  __syncthreads();
}
MSL_INLINE void simdgroup_barrier(mem_flags) {
  __nvvm_bar_warp_sync(msl::lanes());
}

#define MSL_REDUCTION(function, expression)                                         \
  template <class T>                                                                \
  MSL_INLINE T simd_##function(T value, MSL_SITE) {                                 \
    return msl::reduce(value, [](T a, T b) { return static_cast<T>(expression); }); \
  }
MSL_REDUCTION(sum, a + b)
MSL_REDUCTION(max, metal::max(a, b))
MSL_REDUCTION(min, metal::min(a, b))
MSL_INLINE bool simd_any(bool value, MSL_SITE) {
  return __nvvm_vote_any_sync(msl::lanes(), value);
}
template <class T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask, MSL_SITE) {
  return msl::from_other(msl::lanes(), value, mask);
}

}  // namespace metal
