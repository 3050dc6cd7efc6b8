// The model's weights as the CPU engine multiplies them.
#pragma once

#include <span>
#include <vector>

#include "../engine.h"
#include "../tensors.h"
#include "buffer.h"
#include "kernels.h"
#include "packing.h"
#include "threads.h"

namespace metal_prefill::cpu {

// A matrix, either packed for products with 8-bit activations or left in the file, for products with
// activations in bfloat16 or in float32.
struct Linear {
  Tensor tensor;
  PackedMatrix packed;
  bool pairs = false;  // in bfloat16

  bool int8() const { return packed.packing != Packing::kNone; }
};

// Whether a set multiplies weights of a type, in the file, with activations in bfloat16.
inline bool multiplies_pairs(const Kernels& kernels, TensorType type) {
  return type == TensorType::kBF16 && kernels.multiply_bfloat16;
}

struct CpuLayer {
#define LAYER_MATRIX(member, ...) Linear member;
#include "../tensors.inc"
};

// Which forms of an activation the matrices that read it need.
struct Forms {
  bool int8 = false;
  bool bfloat16 = false;
  bool f32 = false;

  void add(const Linear& linear) { (linear.int8() ? int8 : linear.pairs ? bfloat16 : f32) = true; }
};

// Copies norms and biases, and lets the model refer to the copies. In the file they lie between matrices: who
// reads them there brings back pages of matrices, which the system maps around them.
Buffer gather_vectors(Model& model);

// Whether any product rounds activations to 8 bits.
bool rounds_to_int8(const Model& model, Compute compute);

class Weights {
 public:
  // Packs what is quantized (unless `compute` is f32) on all threads; then the file's pages may leave
  // memory. Or takes Model::packed in place of that, if it has the right size. The model must outlive it.
  Weights(const Model& model, Compute compute, const Kernels& kernels, Team& team);

  std::vector<CpuLayer> layers;
  Linear output;
  // Of products that read [dim], [n_heads * value_dim], [ffn_dim].
  Forms dim_input, attention_input, ffn_input;
  std::size_t scratch_bytes = 0;  // that a group takes when it is expanded to float32, widened or padded
  std::size_t packed_bytes() const { return packed_bytes_; }
  // What was packed here, in the order of Model::packed.
  std::span<const std::byte> packed_here() const {
    return were_packed_ ? std::span<const std::byte>() : std::span(arena_.data(), arena_.bytes());
  }
  bool were_packed() const { return were_packed_; }
  // Copies Model::packed to memory of its own, once: a mapped file lies on small pages, on which a token of a
  // small model takes 1.4 times as long. Left to the first pass, that does not delay opening.
  void settle(Team& team);

 private:
  Forms& input_of(Extent cols);

  // Places all matrices one after another from `base` on, and returns the bytes that they take.
  std::size_t lay_out(std::byte* base);

  const Mapping& given_;  // Model::packed
  std::size_t packed_bytes_ = 0;
  bool were_packed_ = false;
  Buffer arena_;
};

}  // namespace metal_prefill::cpu
