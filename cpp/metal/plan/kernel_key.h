// The kernels and their names.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <string>

#include "../../engine/engine.h"

namespace metal_prefill::metal {

// Replacement of % in a kernel's name.
enum class NamePart { kNothing, kTensorType, kResult, kCacheType, kDecodeHeads, kPrefillHeads };

// Each kernel: enumerator, name in the shaders, and replacement of %.
#define METAL_PREFILL_EACH_KERNEL(K)                                             \
  K(kEmbed, "embed_%", kTensorType)                                              \
  K(kMatvec, "matvec_%", kTensorType)                                            \
  K(kMatvecRows2, "matvec_%_rows2", kTensorType)                                 \
  K(kMatvecRows4, "matvec_%_rows4", kTensorType)                                 \
  K(kMatvecSwiglu, "matvec_swiglu_%", kTensorType)                               \
  K(kMatmulNarrow, "matmul_%_narrow", kTensorType)                               \
  K(kMatmulWide, "matmul_%_wide", kTensorType)                                   \
  K(kMatmulSplit, "matmul_%_split", kTensorType)                                 \
  K(kMatmulSwigluNarrow, "matmul_swiglu_%_narrow", kTensorType)                  \
  K(kMatmulSwigluWide, "matmul_swiglu_%_wide", kTensorType)                      \
  K(kMatmulTensorNarrow, "matmul_tensor_%_narrow", kTensorType)                  \
  K(kMatmulTensorWide, "matmul_tensor_%_wide", kTensorType)                      \
  K(kMatmulTensorTall, "matmul_tensor_%_tall", kTensorType)                      \
  K(kMatmulTensorSwigluNarrow, "matmul_tensor_swiglu_%_narrow", kTensorType)     \
  K(kMatmulTensorSwigluWide, "matmul_tensor_swiglu_%_wide", kTensorType)         \
  K(kMatmulTensorSwigluTall, "matmul_tensor_swiglu_%_tall", kTensorType)         \
  K(kMultiTokenMatvec, "multi_token_matvec_%", kTensorType)                      \
  K(kMultiTokenMatvecAccumulate, "multi_token_matvec_%_accumulate", kTensorType) \
  K(kMultiTokenMatvecSwiglu, "multi_token_matvec_swiglu_%", kTensorType)         \
  K(kRmsnormMatvec, "rmsnorm_matvec_%", kTensorType)                             \
  K(kRmsnormMatvecSwiglu, "rmsnorm_matvec_swiglu_%", kTensorType)                \
  K(kChooseExperts, "choose_experts_%", kTensorType)                             \
  K(kMatvecExperts, "matvec_experts_%", kTensorType)                             \
  K(kMatvecExpertsSwiglu, "matvec_experts_swiglu_%", kTensorType)                \
  K(kMatmulExperts, "matmul_experts_%", kTensorType)                             \
  K(kMatmulExpertsSwiglu, "matmul_experts_swiglu_%", kTensorType)                \
  K(kSortRoutes, "sort_routes", kNothing)                                        \
  K(kAddExperts, "add_experts", kNothing)                                        \
  K(kRmsnorm, "rmsnorm_%", kResult)                                              \
  K(kRmsnormAdd, "rmsnorm_add", kNothing)                                        \
  K(kRmsnormAddNorm, "rmsnorm_add_norm_%", kResult)                              \
  K(kRmsnormInPlace, "rmsnorm_in_place", kNothing)                               \
  K(kLayernorm, "layernorm_%", kResult)                                          \
  K(kLayernormStream, "layernorm_stream", kNothing)                              \
  K(kLayernormInPlace, "layernorm_in_place", kNothing)                           \
  K(kLayernormTwice, "layernorm_twice", kNothing)                                \
  K(kAddBias, "add_bias", kNothing)                                              \
  K(kRopeAppend, "rope_append_%", kCacheType)                                    \
  K(kRopeAppendConv, "rope_append_conv_%", kCacheType)                           \
  K(kRopeAttentionDecode, "rope_attention_decode_%", kDecodeHeads)               \
  K(kAttentionDecode, "attention_decode_%", kDecodeHeads)                        \
  K(kAttentionCombine, "attention_combine", kNothing)                            \
  K(kAttentionPrefill, "attention_prefill_%", kPrefillHeads)                     \
  K(kAttentionTensor, "attention_tensor_%", kPrefillHeads)                       \
  K(kRelativeScores, "relative_scores_%", kCacheType)                            \
  K(kGateHeads, "gate_heads_%", kResult)                                         \
  K(kSwiglu, "swiglu_%", kResult)                                                \
  K(kLayerInputs, "layer_inputs", kNothing)                                      \
  K(kGateInput, "gate_input_%", kResult)                                         \
  K(kCausalConv, "causal_conv_%", kResult)                                       \
  K(kScan128, "scan_%_128", kResult)                                             \
  K(kScan256, "scan_%_256", kResult)                                             \
  K(kScanNorm, "scan_norm_%", kResult)                                           \
  K(kGatedDelta, "gated_delta", kNothing)                                        \
  K(kGatedNorm, "gated_norm_%", kResult)                                         \
  K(kSoftCap, "soft_cap_in_place", kNothing)                                     \
  K(kArgmaxStage1, "argmax_stage1", kNothing)                                    \
  K(kArgmaxStage2, "argmax_stage2", kNothing)                                    \
  K(kLogProb, "log_prob", kNothing)

enum class Kernel {
#define METAL_PREFILL_KERNEL(kernel, name, part) kernel,
  METAL_PREFILL_EACH_KERNEL(METAL_PREFILL_KERNEL)
#undef METAL_PREFILL_KERNEL
      kCount
};

// Whether a kernel is in shaders/matmul_tensor.metal or attention_tensor.metal, which not every device
// compiles.
constexpr bool needs_tensors(Kernel kernel) {
  return (kernel >= Kernel::kMatmulTensorNarrow && kernel <= Kernel::kMatmulTensorSwigluTall) ||
         kernel == Kernel::kAttentionTensor;
}

enum class Precision { kF32, kF16 };  // of a step's output

struct KernelKey {
  Kernel kernel;
  TensorType type = TensorType::kF32;  // of weights, or of the result; kF32 for kernels without types
  int heads = 0;                       // decode_size() or prefill_size(); 0 for kernels without sizes

  // Kernels without types convert to their key: NOLINTNEXTLINE(google-explicit-constructor)
  KernelKey(Kernel k) : kernel(k) {}
  KernelKey(Kernel k, TensorType t) : kernel(k), type(t) {}
  KernelKey(Kernel k, Precision p)
      : KernelKey(k, p == Precision::kF16 ? TensorType::kF16 : TensorType::kF32) {}
  KernelKey(Kernel k, int size) : kernel(k), heads(size) {}
  auto operator<=>(const KernelKey&) const = default;
};

inline constexpr int kMostHeadDim = 512;  // maximum in attention
// Largest head of the kernel variant for heads of `head_dim`, the larger one of key_dim and value_dim, at
// most kMostHeadDim.
int decode_size(int head_dim);
int prefill_size(int head_dim);

// The kernels of passes, with the largest threadgroup of each.
using KernelThreads = std::map<KernelKey, std::size_t>;

// Name of the function in the shaders. It depends on the cache's type if the kernel uses the cache.
std::string kernel_name(const KernelKey& key, KvType cache);
// Returns the kernel's variant in shaders/variants.h; empty if the kernel is always compiled.
std::string variant_of(const KernelKey& key, KvType cache);

}  // namespace metal_prefill::metal
