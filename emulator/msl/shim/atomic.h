// Atomic integers and floats in device and threadgroup memory. All operations are relaxed, as in Metal.
#pragma once

namespace metal {

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

#if MSL_CHECK
#define MSL_ATOMIC(SPACE)                                                                                   \
  template <class T>                                                                                        \
  T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order order);                       \
  template <class T>                                                                                        \
  void atomic_store_explicit(volatile SPACE atomic<T>* object, msl::identity<T> value, memory_order order); \
  template <class T>                                                                                        \
  T atomic_exchange_explicit(volatile SPACE atomic<T>* object, msl::identity<T> value, memory_order order); \
  template <class T>                                                                                        \
  bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* object, __private T* expected,       \
                                             msl::identity<T> desired, memory_order success,                \
                                             memory_order failure);                                         \
  MSL_ATOMIC_FETCH(SPACE, add)                                                                              \
  MSL_ATOMIC_FETCH(SPACE, sub)                                                                              \
  MSL_ATOMIC_FETCH(SPACE, max)                                                                              \
  MSL_ATOMIC_FETCH(SPACE, min) MSL_ATOMIC_FETCH(SPACE, and) MSL_ATOMIC_FETCH(SPACE, or)                     \
      MSL_ATOMIC_FETCH(SPACE, xor)
#define MSL_ATOMIC_FETCH(SPACE, name)                                                        \
  template <class T>                                                                         \
  T atomic_fetch_##name##_explicit(volatile SPACE atomic<T>* object, msl::identity<T> value, \
                                   memory_order order);
MSL_ATOMIC(__global)
MSL_ATOMIC(__local)
#else
template <class T>
MSL_INLINE T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  T result;
  __atomic_load(&object->value, &result, __ATOMIC_RELAXED);
  return result;
}
template <class T>
MSL_INLINE void atomic_store_explicit(volatile atomic<T>* object, msl::identity<T> value, memory_order) {
  __atomic_store(&object->value, &value, __ATOMIC_RELAXED);
}
template <class T>
MSL_INLINE T atomic_exchange_explicit(volatile atomic<T>* object, msl::identity<T> value, memory_order) {
  T result;
  __atomic_exchange(&object->value, &value, &result, __ATOMIC_RELAXED);
  return result;
}
template <class T>
MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                      msl::identity<T> desired, memory_order, memory_order) {
  return __atomic_compare_exchange(&object->value, expected, &desired, false, __ATOMIC_RELAXED,
                                   __ATOMIC_RELAXED);
}
// Implements a read-modify-write operation by a compare-and-exchange loop, which also handles float.
template <class T, class F>
MSL_INLINE T atomic_update(volatile atomic<T>* object, F change) {
  T old;
  __atomic_load(&object->value, &old, __ATOMIC_RELAXED);
  for (;;) {
    T next = change(old);
    if (__atomic_compare_exchange(&object->value, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return old;
  }
}
#define MSL_ATOMIC_FETCH(name, expression)                                                        \
  template <class T>                                                                              \
  MSL_INLINE T atomic_fetch_##name##_explicit(volatile atomic<T>* object, msl::identity<T> value, \
                                              memory_order) {                                     \
    return atomic_update(object, [=](T old) { return static_cast<T>(expression); });              \
  }
MSL_ATOMIC_FETCH(add, old + value)
MSL_ATOMIC_FETCH(sub, old - value)
MSL_ATOMIC_FETCH(max, old < value ? value : old)
MSL_ATOMIC_FETCH(min, value < old ? value : old)
MSL_ATOMIC_FETCH(and, old& value)
MSL_ATOMIC_FETCH(or, old | value)
MSL_ATOMIC_FETCH(xor, old ^ value)
#endif

MSL_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

}  // namespace metal
