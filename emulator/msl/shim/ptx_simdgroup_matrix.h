// Matrix products on NVIDIA GPUs: 8x8 matrices in the upper half of the tensor cores' 16x8x8 products.
//
// A lane holds two adjacent elements of a row, as mma.m16n8k8 expects in the first operand and the result. It expects
// the second operand transposed, so a matrix may be stored as its transpose: a matrix that simdgroup_load transposes
// and that is then the right operand is never moved between lanes.
#pragma once

namespace msl {

// Index of the first or second element of a lane among the 64 elements in row-major order.
MSL_INLINE int fragment_place(int lane, int element) {
  return lane * 2 + element;
}

// Transposes pairs of 16-bit elements, a row of eight in each quad of lanes.
MSL_INLINE uint transpose_halves(uint pair) {
  uint result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
template <class T>
MSL_INLINE ::vec<T, 2> transpose(::vec<T, 2> pair) {
  if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(::vec<T, 2>, transpose_halves(__builtin_bit_cast(uint, pair)));
  } else {  // low and high halves separately
    const ::uint2 bits = __builtin_bit_cast(::uint2, pair);
    const uint low = transpose_halves((bits.x & 0xffffu) | bits.y << 16);
    const uint high = transpose_halves(bits.x >> 16 | (bits.y & 0xffff0000u));
    return __builtin_bit_cast(::vec<T, 2>,
                              ::uint2{(low & 0xffffu) | high << 16, low >> 16 | (high & 0xffff0000u)});
  }
}

template <class T>
class Fragment {
 public:
  typedef ::vec<T, 2> Pair;

  MSL_INLINE void set(Pair elements) {
    elements_ = elements;
    transposed_ = false;
  }
  MSL_INLINE void set_transposed(Pair elements) {
    elements_ = elements;
    transposed_ = true;
  }
  // Two adjacent elements of a row of the matrix or of its transpose.
  MSL_INLINE Pair get() const { return transposed_ ? transpose(elements_) : elements_; }
  MSL_INLINE Pair get_transposed() const { return transposed_ ? elements_ : transpose(elements_); }
  MSL_INLINE Pair& reference() {
    set(get());
    return elements_;
  }

 private:
  Pair elements_;
  bool transposed_ = false;
};

// Two adjacent elements in memory. Pairs of 16-bit elements are read as one word, so shaders must align such matrices
// to even elements.
template <class T>
MSL_INLINE ::vec<T, 2> load_pair(const T* source) {
  if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(::vec<T, 2>, *reinterpret_cast<const uint*>(source));
  } else {
    return ::vec<T, 2>{source[0], source[1]};
  }
}

template <class A>
MSL_INLINE ::float2 to_floats(::vec<A, 2> pair) {
  return ::float2{static_cast<float>(pair[0]), static_cast<float>(pair[1])};
}

// d = a b + c on tensor cores, whose lower eight rows are unused; b is transposed. Products of halves are
// exact, and summed in float.
MSL_INLINE ::float2 tensor_product(::half2 a, ::half2 b, ::float2 c) {
  float first, second;
  asm("{\n"
      ".reg .b32 zero;\n"
      ".reg .f32 none, unused<2>;\n"
      "mov.b32 zero, 0;\n"
      "mov.f32 none, 0f00000000;\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, unused0, unused1}, {%2, zero}, {%3}, "
      "{%4, %5, none, none};\n"
      "}"
      : "=f"(first), "=f"(second)
      : "r"(__builtin_bit_cast(uint, a)), "r"(__builtin_bit_cast(uint, b)), "f"(c[0]), "f"(c[1]));
  return ::float2{first, second};
}

// tensor_product of floats with eleven significant bits. The tensor cores pair elements k and k + 4 of a
// lane; using 2k and 2k + 1 instead, in both operands, yields the same sum.
MSL_INLINE ::float2 short_float_product(::uint2 a, ::uint2 b, ::float2 c) {
  float first, second;
  asm("{\n"
      ".reg .b32 zero;\n"
      ".reg .f32 none, unused<2>;\n"
      "mov.b32 zero, 0;\n"
      "mov.f32 none, 0f00000000;\n"
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, unused0, unused1}, {%2, zero, %3, zero}, "
      "{%4, %5}, {%6, %7, none, none};\n"
      "}"
      : "=f"(first), "=f"(second)
      : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y), "f"(c[0]), "f"(c[1]));
  return ::float2{first, second};
}
// Splits a float into two with eleven significant bits each; the rest is below 2^-22 of it.
struct ShortFloats {
  ::uint2 high, low;
  MSL_INLINE static uint rounded(float x) {
    uint bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
  }
  MSL_INLINE static float rest(float x, uint high) {
    const float value = __builtin_bit_cast(float, high);
    return __builtin_fabsf(value) < __builtin_inff() ? x - value : 0.0f;
  }
  MSL_INLINE explicit ShortFloats(::float2 x) {
    high = ::uint2{rounded(x[0]), rounded(x[1])};
    low = ::uint2{rounded(rest(x[0], high.x)), rounded(rest(x[1], high.y))};
  }
};
// Product of floats: adds the small parts first, and omits the product of the low parts.
MSL_INLINE ::float2 float_product(::float2 a, ::float2 b, ::float2 c) {
  const ShortFloats left(a), right(b);
  c = short_float_product(left.low, right.high, c);
  c = short_float_product(left.high, right.low, c);
  return short_float_product(left.high, right.high, c);
}

// d = a b + c.
template <class A, class B>
MSL_INLINE void multiply(Fragment<float>& d, const Fragment<A>& a, const Fragment<B>& b,
                         const Fragment<float>& c, int) {
  if constexpr (Same<A, B>::value && sizeof(A) == 2) {
    d.set(tensor_product(a.get(), b.get_transposed(), c.get()));
  } else {
    d.set(float_product(to_floats<A>(a.get()), to_floats<B>(b.get_transposed()), c.get()));
  }
}

}  // namespace msl
