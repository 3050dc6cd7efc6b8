// Matrix products on fibers: lanes write their elements into three 8x8 matrices of floats, the last one
// multiplies.
#pragma once

namespace msl {

typedef float Row __attribute__((vector_size(32)));

template <bool Accumulate>
struct MatrixProduct {
  static MSL_EXECUTE execute(Simdgroup& s, Lanes lanes) {
    if (lanes != ~0u) return __builtin_ctz(~lanes);
    const Row* b = reinterpret_cast<const Row*>(s.b);
    const Row* c = reinterpret_cast<const Row*>(s.c);
    Row* d = reinterpret_cast<Row*>(s.d);
    for (int i = 0; i < 8; ++i) {
      Row sum = Accumulate ? c[i] : Row{};
      for (int k = 0; k < 8; ++k) sum += s.a[i * 8 + k] * b[k];
      d[i] = sum;
    }
    return kOk;
  }
  static constexpr Operation operation{Accumulate ? "simdgroup_multiply_accumulate" : "simdgroup_multiply",
                                       32, &execute};
};

template <class T>
MSL_INLINE void put_fragment(float* matrix, int position, ::vec<T, 2> elements) {
  const float pair[2] = {static_cast<float>(elements[0]), static_cast<float>(elements[1])};
  ulong word;
  __builtin_memcpy(&word, pair, 8);
  __atomic_store_n(reinterpret_cast<ulong*>(matrix + position), word, __ATOMIC_RELAXED);
}
template <class T>
MSL_INLINE ::vec<T, 2> get_fragment(const float* matrix, int position) {
  const ulong word = __atomic_load_n(reinterpret_cast<const ulong*>(matrix + position), __ATOMIC_RELAXED);
  float pair[2];
  __builtin_memcpy(pair, &word, 8);
  return ::vec<T, 2>{static_cast<T>(pair[0]), static_cast<T>(pair[1])};
}

}  // namespace msl

namespace metal {

template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                              MSL_SITE) {
  ::metal_emulator::abi::Worker& worker = ::metal_emulator::abi::current_worker();
  ::metal_emulator::abi::Fiber& fiber = ::metal_emulator::abi::current_fiber();
  msl::Simdgroup& s = *fiber.simdgroup;
  const int lane = static_cast<int>(fiber.lane),
            position = msl::fragment_row(lane) * 8 + msl::fragment_column(lane);
  msl::put_fragment<A>(s.a, position, a.elements);
  msl::put_fragment<B>(s.b, position, b.elements);
  msl::put_fragment<C>(s.c, position, c.elements);
  worker.arrive(worker, fiber, msl::MatrixProduct<true>::operation, msl_file, static_cast<uint>(msl_line));
  d.elements = msl::get_fragment<D>(s.d, position);
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, MSL_SITE) {
  ::metal_emulator::abi::Worker& worker = ::metal_emulator::abi::current_worker();
  ::metal_emulator::abi::Fiber& fiber = ::metal_emulator::abi::current_fiber();
  msl::Simdgroup& s = *fiber.simdgroup;
  const int lane = static_cast<int>(fiber.lane),
            position = msl::fragment_row(lane) * 8 + msl::fragment_column(lane);
  msl::put_fragment<A>(s.a, position, a.elements);
  msl::put_fragment<B>(s.b, position, b.elements);
  worker.arrive(worker, fiber, msl::MatrixProduct<false>::operation, msl_file, static_cast<uint>(msl_line));
  d.elements = msl::get_fragment<D>(s.d, position);
}

}  // namespace metal
