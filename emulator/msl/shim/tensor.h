// Tensors and matmul2d, the part of Metal 4 through which kernels use matrix units: half tensors in rows of any stride,
// multiplied into a cooperative tensor of floats by all simdgroups of a threadgroup. docs/kernels.md of the project
// lists the documented facts on which this file is based. Other tensor features of Metal do not compile.
//
// Metal does not specify how a cooperative tensor is distributed over threads. Here a thread holds adjacent elements
// of a row. Products are exact and summed in float.
#pragma once

namespace metal {

// Elements along dimension 0 are adjacent in memory: (columns, rows).
template <class Index, ulong Rank>
struct dextents {
  static_assert(msl::Same<Index, int32_t>::value && Rank == 2, "modelled: dextents<int32_t, 2>");
  int32_t sizes[2];
  MSL_INLINE constexpr dextents(int32_t columns, int32_t rows) : sizes{columns, rows} {}
  MSL_INLINE constexpr int32_t extent(ulong dimension) const { return sizes[dimension]; }
};

struct tensor_inline {};

// Threads that execute an operation together: N simdgroups, all those of a threadgroup.
template <uint N>
struct execution_simdgroups {
  static_assert(N >= 1 && N <= 32, "a threadgroup has 1 to 32 simdgroups");
  MSL_CONSTANT uint simdgroups = N;
};

// A view of memory with packed or strided rows. T has an address space.
template <class T, class Extents, class Kind>
class tensor {
  static_assert(msl::Same<Extents, dextents<int32_t, 2>>::value && msl::Same<Kind, tensor_inline>::value,
                "modelled: tensor<T, dextents<int32_t, 2>, tensor_inline>");

 public:
  MSL_INLINE tensor(T* data, Extents extents) : tensor(data, extents, extents.extent(0)) {}
  // Strides of both dimensions, in elements. Only a first stride of 1 is modelled.
  MSL_INLINE tensor(T* data, Extents extents, array<int32_t, 2> strides)
      : tensor(data, extents, strides.elements[1]) {}
  MSL_INLINE T* data() const { return data_; }
  MSL_INLINE Extents extents() const { return extents_; }
  MSL_INLINE T* row(uint i) const { return data_ + static_cast<ulong>(i) * static_cast<ulong>(row_stride_); }

 private:
  MSL_INLINE tensor(T* data, Extents extents, int32_t row_stride)
      : data_(data), extents_(extents), row_stride_(row_stride) {}
  T* data_;
  Extents extents_;
  int32_t row_stride_;
};

}  // namespace metal

namespace msl {

template <class T>
struct WithoutSpace {
  typedef T type;
};
#if MSL_CHECK
template <class T>
struct WithoutSpace<__global T> {
  typedef T type;
};
template <class T>
struct WithoutSpace<__local T> {
  typedef T type;
};
#endif
template <class T>
struct Element;
template <class T>
struct Element<::metal::tensor<T, ::metal::dextents<int32_t, 2>, ::metal::tensor_inline>> {
  typedef typename WithoutSpace<T>::type type;
};

#if !MSL_CHECK
// Operations that all threads of a scope execute together.
struct Matmul2d {
  static constexpr const char* name = "matmul2d";
};
struct CooperativeStore {
  static constexpr const char* name = "cooperative_tensor::store";
};
#endif

}  // namespace msl

namespace metal {

// Rows x Columns floats, distributed over the threads of Simdgroups simdgroups.
template <uint Rows, uint Columns, uint Simdgroups>
class cooperative_tensor_of_floats {
  MSL_CONSTANT uint kElements = Rows * Columns / (32 * Simdgroups);
  static_assert(kElements * 32 * Simdgroups == Rows * Columns && Columns % kElements == 0,
                "modelled: tiles whose rows are a whole number of threads");

 public:
  MSL_INLINE uint16_t get_capacity() const { return kElements; }
  MSL_INLINE bool is_valid_element(uint16_t index) const { return index < kElements; }
  // (column, row) of an element of the calling thread.
  MSL_INLINE array<int32_t, 2> get_multidimensional_index(uint16_t index) const {
#if MSL_CHECK
    const uint place = index;
#else
    const uint place = msl::thread_of_threadgroup() * kElements + index;
#endif
    return array<int32_t, 2>{{static_cast<int32_t>(place % Columns), static_cast<int32_t>(place / Columns)}};
  }
#if MSL_CHECK
  __private float& operator[](uint16_t index) __private;
  template <class T>
  void store(tensor<T, dextents<int32_t, 2>, tensor_inline> target) const {
    static_assert(msl::Same<typename msl::WithoutSpace<T>::type, float>::value, "modelled: stores of floats");
  }
#else
  MSL_INLINE cooperative_tensor_of_floats() { msl::forget(elements_, kElements); }
  MSL_INLINE float& operator[](uint16_t index) { return elements_[index]; }
  template <class T>
  MSL_INLINE void store(const tensor<T, dextents<int32_t, 2>, tensor_inline>& target, MSL_SITE) const {
    static_assert(msl::Same<T, float>::value, "modelled: stores of floats");
    msl::together<msl::CooperativeStore, Simdgroups>(msl_site);
    msl::require_size("the target", target.extents().extent(0), target.extents().extent(1), Columns, Rows,
                      msl_site);
    msl::require_written(elements_, kElements, "what is stored", msl_site);
    const uint first = msl::thread_of_threadgroup() * kElements;
    for (uint i = 0; i < kElements; ++i) target.row(first / Columns)[first % Columns + i] = elements_[i];
  }
#endif

 private:
  float elements_[kElements];
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  MSL_INLINE constexpr matmul2d_descriptor(int m, int n, int k, bool transpose_left = false,
                                           bool transpose_right = false, bool relaxed_precision = false,
                                           mode matmul_mode = mode::multiply)
      : packed(static_cast<ulong>(m) | static_cast<ulong>(n) << 16 | static_cast<ulong>(k) << 32 |
               static_cast<ulong>(transpose_left) << 48 | static_cast<ulong>(transpose_right) << 49 |
               static_cast<ulong>(relaxed_precision) << 50 |
               static_cast<ulong>(matmul_mode == mode::multiply_accumulate) << 51) {}
  // C++17 does not allow a class as a template argument, but a number.
  MSL_INLINE constexpr operator ulong() const { return packed; }

 private:
  ulong packed;
};

// result (+)= left right^T: left (k, m), right (k, n), result (n, m), each as (columns, rows). If the right tensor
// is not transposed, result (+)= left right, and right is (n, k).
template <ulong Descriptor, class Scope>
class matmul2d {
  MSL_CONSTANT uint kM = Descriptor & 0xffff, kN = Descriptor >> 16 & 0xffff, kK = Descriptor >> 32 & 0xffff;
  MSL_CONSTANT bool kTransposesRight = Descriptor >> 49 & 1, kAccumulates = Descriptor >> 51 & 1;
  static_assert(kM % 16 == 0 && kN % 16 == 0 && kK % 16 == 0 && kM > 0 && kN > 0 && kK > 0,
                "m, n and k are multiples of 16");
  static_assert((Descriptor >> 48 & 5) == 0, "modelled: the left tensor not transposed, full precision");

 public:
  template <class Left, class Right, class T>
  MSL_INLINE metal::cooperative_tensor_of_floats<kM, kN, Scope::simdgroups>
  get_destination_cooperative_tensor() const {
    static_assert(msl::Same<typename msl::Element<Left>::type, half>::value &&
                      msl::Same<typename msl::Element<Right>::type, half>::value &&
                      msl::Same<T, float>::value,
                  "modelled: products of halves summed in floats");
    return metal::cooperative_tensor_of_floats<kM, kN, Scope::simdgroups>();
  }

#if MSL_CHECK
  template <class Left, class Right>
  void run(Left left, Right right,
           __private metal::cooperative_tensor_of_floats<kM, kN, Scope::simdgroups>& result) const {
    static_assert(msl::Same<typename msl::Element<Left>::type, half>::value &&
                      msl::Same<typename msl::Element<Right>::type, half>::value,
                  "modelled: products of halves");
  }
#else
  template <class Left, class Right>
  MSL_INLINE void run(const Left& left, const Right& right,
                      metal::cooperative_tensor_of_floats<kM, kN, Scope::simdgroups>& result,
                      MSL_SITE) const {
    static_assert(msl::Same<typename msl::Element<Left>::type, half>::value &&
                      msl::Same<typename msl::Element<Right>::type, half>::value,
                  "modelled: products of halves");
    msl::together<msl::Matmul2d, Scope::simdgroups>(msl_site);
    msl::require_size("the left tensor", left.extents().extent(0), left.extents().extent(1), kK, kM, msl_site);
    msl::require_size("the right tensor", right.extents().extent(0), right.extents().extent(1),
                      kTransposesRight ? kK : kN, kTransposesRight ? kN : kK, msl_site);
    const uint elements = result.get_capacity(), first = msl::thread_of_threadgroup() * elements;
    if (kAccumulates) msl::require_written(&result[0], elements, "what is added to", msl_site);
    if constexpr (kTransposesRight) {
      const msl::HalfRow<kK> x(left.row(first / kN));
      for (uint i = 0; i < elements; ++i) {
        float& sum = result[static_cast<uint16_t>(i)];
        const float product = x.dot(right.row(first % kN + i));
        sum = kAccumulates ? sum + product : product;
      }
    } else {
      for (uint i = 0; i < elements; ++i) {
        float product = 0.0f;
        for (uint k = 0; k < kK; ++k)
          product += static_cast<float>(left.row(first / kN)[k]) *
                     static_cast<float>(right.row(k)[first % kN + i]);
        float& sum = result[static_cast<uint16_t>(i)];
        sum = kAccumulates ? sum + product : product;
      }
    }
  }
#endif
};

}  // namespace tensor_ops
}  // namespace mpp
