// The model's weights in the formats that the CPU engine multiplies.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "../engine/engine.h"
#include "../model/tensors.h"
#include "buffer.h"
#include "kernels/kernels.h"
#include "kernels/packing.h"
#include "threads.h"

namespace metal_prefill::cpu {

// A matrix: packed, or left in the file for products in float32.
struct Linear {
  Tensor tensor;
  PackedMatrix packed;
  bool pairs = false;  // multiplied in pairs of bfloat16; quantized weights are widened first
  bool super = false;  // multiplied with activations that share a scale in a super-block

  bool wide() const { return packed.packing == Packing::kRotatedWide; }
  bool rotated() const { return packed.packing == Packing::kRotated || wide(); }
  bool floats() const { return packed.packing == Packing::kFloats; }
  bool int8() const { return packed.packing != Packing::kNone && !in_panels() && !super; }
  // Whether a group is multiplied part by part of the tokens, as it was packed or after widening.
  bool in_panels() const { return pairs || rotated() || floats(); }
  // Whether a group in panels is multiplied as it was packed.
  bool ready_panels() const { return in_panels() && !(pairs && packed.packing != Packing::kPairs); }
  // Bytes of an element of rotated rows.
  std::size_t code_bytes() const { return wide() ? sizeof(std::int16_t) : 1; }
};

// A matrix in the format that a set multiplies, without memory yet. With `keep_wide`, weights multiplied in
// pairs or in float32 are packed so; otherwise each pass widens them, or reads floats in the file.
Linear linear_of(const Tensor& tensor, Compute compute, const Kernels& kernels, bool keep_wide = false);
// Packs a group of a matrix in its memory; `memory` has packing_bytes_of() the matrix.
void pack(const Linear& linear, int group, const Kernels& kernels, std::byte* memory);
std::size_t packing_bytes_of(const Linear& linear);
// A group for Kernels::multiply_pairs: as packed, or converted from quantized weights in `scratch`
// (scratch_bytes_of).
const PairBlock* pairs_of_group(const Kernels& kernels, const PackedMatrix& weight, int group,
                                std::byte* scratch);
// Memory that a thread needs to expand a group to float32, to widen or pad it, or to rotate a row.
std::size_t scratch_bytes_of(const Linear& linear);

struct CpuLayer {
#define LAYER_MATRIX(member, ...) Linear member;
#define LAYER_EXPERTS(member, ...) std::vector<Linear> member;
#include "../model/tensors.inc"
};

// Formats of an activation that the matrices reading it need.
struct Forms {
  bool int8 = false;
  bool super = false;
  bool bfloat16 = false;
  // Rotated rows; in 16 bits; in 8 bits with limited pairs.
  bool rotated = false, wide = false, rests = false;
  bool f32 = false;

  bool any() const { return int8 || super || bfloat16 || rotated || f32; }
  void add(const Linear& linear) {
    (linear.int8()      ? int8
     : linear.super     ? super
     : linear.pairs     ? bfloat16
     : linear.rotated() ? rotated
                        : f32) = true;
    wide |= linear.wide();
  }
  // Columns that must be complete before they are rounded: all, for rotated rows.
  int block_cols() const {
    return rotated ? std::numeric_limits<int>::max() : super ? kSuperCols : int8 ? kBlockCols : 1;
  }
};

// Copies norms and biases, and lets the model refer to the copies. In the file they are between matrices:
// reading them there would load pages of the adjacent matrices.
Buffer gather_vectors(Model& model);

// Whether products round so coarsely that attention in pairs of bfloat16 adds little error.
bool rounds_coarsely(const Model& model, Compute compute);

class Weights {
 public:
  // Packs all matrices that are not left in the file, on all threads, and then releases the file's pages.
  // Uses Model::packed instead, if it has the right size. The model must outlive it.
  Weights(const Model& model, Compute compute, const Kernels& kernels, Team& team);

  std::vector<CpuLayer> layers;  // those with weights of their own
  const CpuLayer& layer(int n) const { return layers[std::size_t(n) % layers.size()]; }
  Linear output;
  Linear embedding_projection;  // in float32
  Linear per_layer_projection;
  bool widens = false;  // whether quantized weights are widened to pairs, once for all rows of a pass
  // Formats of the inputs of products that read [dim], [n_heads * value_dim], [ffn_dim], [per_layer_dim], the
  // output of a short convolution or of a layer whose state has matrices.
  Forms dim_input, attention_input, ffn_input, layer_input, conv_input, scan_input;
  // Formats of the inputs of experts, which read [dim] and [expert_dim].
  Forms expert_input, expert_ffn_input;
  bool has_conv = false, has_scan = false;  // whether any layer has one
  std::size_t scratch_bytes = 0;            // the largest scratch_bytes_of()
  std::size_t packed_bytes() const { return packed_bytes_; }
  // The weights packed here, in the order of Model::packed.
  std::span<const std::byte> packed_here() const {
    return were_packed_ ? std::span<const std::byte>() : std::span(arena_.data(), arena_.bytes());
  }
  bool were_packed() const { return were_packed_; }
  // The filter of a convolution, [taps][channels].
  const float* filter(int layer) const { return filters_[std::size_t(layer)].data(); }
  // Copies Model::packed once, in the first pass, so that opening is not delayed: reads from a mapped file,
  // with its small pages, make a token of a small model 1.4 times as slow.
  void settle(Team& team);

 private:
  Forms& input_of(Extent cols);
  Forms& input_of_experts(Extent cols) { return cols == Extent::kDim ? expert_input : expert_ffn_input; }

  // Places all matrices contiguously from `base` on, and returns their bytes.
  std::size_t lay_out(std::byte* base);

  const Mapping& given_;  // Model::packed
  std::size_t packed_bytes_ = 0;
  bool were_packed_ = false;
  Buffer arena_;
  std::vector<std::vector<float>> filters_;  // of each layer; empty if it has none
};

}  // namespace metal_prefill::cpu
