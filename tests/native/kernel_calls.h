// The kernels of each instruction set on plain arrays, for tests. Checks shapes, packs weights and quantizes
// activations. Every function takes the name of a set that this machine runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace metal_prefill::cpu::calls {

// A view of consecutive rows; a vector has one dimension only.
template <typename T, int kDimensions>
class Array {
 public:
  Array(T* data, std::size_t rows, std::size_t cols = 1) : data_(data), shape_{rows, cols} {}
  T* data() const { return data_; }
  std::size_t shape(int dimension) const { return shape_[dimension]; }

 private:
  T* data_;
  std::size_t shape_[2];
};
using Bytes = Array<const std::uint8_t, 1>;
using Halves = Array<const std::uint16_t, 1>;
using Vector = Array<const float, 1>;
using Matrix = Array<const float, 2>;
using OutBytes = Array<std::int8_t, 2>;
using OutHalves = Array<std::uint16_t, 1>;
using OutVector = Array<float, 1>;
using OutMatrix = Array<float, 2>;

// The fields of ActivationTile: codes [tokens, cols], and for each block of a token `terms`, [tokens, 4 *
// blocks]: scale, scaled_sum, start and start_half. The first row of x becomes token `first`.
void quantize(const std::string& set, const Matrix& x, int first, OutBytes codes, OutMatrix terms);

// out[i, 32 * g + r] for tokens first + i, i < len(x). `out` may be wider: columns beyond the groups are
// unchanged.
void multiply_int8(const std::string& set, std::uint32_t type, const Bytes& weight, int rows, const Matrix& x,
                   int first, OutMatrix out);
// weight [32, padded], x [tokens, padded] with zeros after `cols`.
void multiply_float(const std::string& set, const Matrix& weight, int cols, const Matrix& x, OutMatrix out);
void multiply_float_panels(const std::string& set, const Matrix& weight, int cols, const Matrix& x,
                           OutMatrix out);
// weight [32, cols] in f16 or bfloat16, cols a multiple of 16.
void multiply_half(const std::string& set, const Halves& weight, bool bfloat16, const Matrix& x,
                   OutMatrix out);
// multiply_int8 in pairs of bfloat16, with weights of any type.
void multiply_pairs(const std::string& set, std::uint32_t type, const Bytes& weight, int rows,
                    const Matrix& x, int first, OutMatrix out);
// multiply_int8 in w8a8, or with `wide` in int16, with weights of any type.
void multiply_rotated(const std::string& set, std::uint32_t type, const Bytes& weight, int rows,
                      const Matrix& x, int first, bool wide, int activation, OutMatrix out);
// The codes of rows of x in the order of products, padded with zeros, and their scales.
void rotate(const std::string& set, const Matrix& x, bool wide, OutBytes codes, OutVector scales);
void add_products(const std::string& set, const Matrix& products, const Vector& bias, int columns, bool add,
                  OutMatrix out);
void round_to_bfloat16(const std::string& set, const Vector& x, OutHalves out);
void rms_norm(const std::string& set, const Vector& x, const Vector& weight, float eps, OutVector out);
// An empty `bias` selects none.
void layer_norm(const std::string& set, const Vector& x, const Vector& weight, const Vector& bias, float eps,
                OutVector out);
void rope(const std::string& set, OutVector head, const Vector& cos_sin, bool neox);
void gated(const std::string& set, const Vector& gate, const Vector& up, int activation, OutVector out);
// A head of a state-space layer: x [tokens, dim], b and c [tokens, rows], dt [tokens]; `factors` [3] are a,
// the bias of dt and the skip. `state` [rows, dim] is read and written. Each call scans `piece` tokens.
void scan(const std::string& set, const Matrix& x, const Matrix& b, const Matrix& c, const Vector& dt,
          const Vector& factors, int piece, OutMatrix state, OutMatrix out);
// x = cap * tanh(x / cap).
void soft_cap(const std::string& set, float cap, OutVector x);
void relative_scores(const std::string& set, const Vector& q, const Matrix& k, const Matrix& keys,
                     const Matrix& queries, const Vector& row_of, float scale, OutVector out);
void apply_gate(const std::string& set, const Vector& gate, OutVector x);
// A token for as many columns as v has; `state` is [len(k), kGatedDeltaColumns].
void gated_delta(const std::string& set, const Vector& q, const Vector& k, const Vector& v, float decay,
                 float beta, OutMatrix state, OutVector out);
double sum_exp(const std::string& set, const Vector& x, float shift);
void half_to_float(const std::string& set, const Halves& in, bool bfloat16, OutVector out);
// Causal attention of one group of heads: q [tokens, heads * key_dim] are the last tokens of the keys and
// values [positions, dim], in a cache of "f32", "f16" or "q8_0". Writes tokens [first, first + count) to out
// [tokens, heads * value_dim]. Keys are padded to a multiple of `key_multiple` dimensions; 0 selects the
// set's. With `by_splits`, each split of positions is computed separately, then combined. `sinks` has one
// value per head, or is empty.
void attention(const std::string& set, const Matrix& q, const Matrix& keys, const Matrix& values,
               const std::string& kv_dtype, int window, float scale, int first, int count, OutMatrix out,
               const Vector& sinks, bool exact, bool both_ways, int key_multiple, bool by_splits);

// Calls F(name) for every function of a kernel.
// clang-format off
#define METAL_PREFILL_KERNEL_CALLS(F) \
  F(quantize) F(multiply_int8) F(multiply_float) F(multiply_float_panels) F(multiply_half) F(multiply_pairs) \
  F(multiply_rotated) F(rotate) F(add_products) F(round_to_bfloat16) F(rms_norm) F(layer_norm) F(rope) \
  F(gated) F(scan) F(soft_cap) F(relative_scores) F(apply_gate) F(gated_delta) F(sum_exp) F(half_to_float) \
  F(attention)
// clang-format on

}  // namespace metal_prefill::cpu::calls
