// The kernels and their names.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <string>

#include "../../engine/engine.h"

namespace metal_prefill::metal {

// Named as in the shaders. Those of the first group exist once per tensor type.
enum class Kernel {
  kEmbed,
  kMatvec,
  kMatvecRows2,
  kMatvecRows4,
  kMatvecSwiglu,
  kMatmulNarrow,
  kMatmulWide,
  kMatmulSplit,
  kMatmulSwigluNarrow,
  kMatmulSwigluWide,
  kMatmulTensorNarrow,
  kMatmulTensorWide,
  kMatmulTensorTall,
  kMatmulTensorSwigluNarrow,
  kMatmulTensorSwigluWide,
  kMatmulTensorSwigluTall,
  kMultiTokenMatvec,
  kMultiTokenMatvecAccumulate,
  kMultiTokenMatvecSwiglu,
  kRmsnormMatvec,
  kRmsnormMatvecSwiglu,
  kLastTyped = kRmsnormMatvecSwiglu,

  kRmsnormF32,
  kRmsnormF16,
  kRmsnormAdd,
  kRmsnormInPlace,
  kLayernormF32,
  kLayernormF16,
  kLayernormStream,
  kLayernormInPlace,
  kLayernormTwice,
  kAddBias,
  kRopeAppend,
  kRopeAppendConv,
  kRopeAttentionDecode,
  kAttentionDecode,
  kAttentionCombine,
  kAttentionPrefill,
  kAttentionTensor,
  kGateHeadsF32,
  kGateHeadsF16,
  kSwigluF32,
  kSwigluF16,
  kCausalConvF32,
  kCausalConvF16,
  kScanF32Rows128,
  kScanF32Rows256,
  kScanF16Rows128,
  kScanF16Rows256,
  kScanNormF32,
  kScanNormF16,
  kGatedDelta,
  kGatedNormF32,
  kGatedNormF16,
  kArgmaxStage1,
  kArgmaxStage2,
  kLogProb,
  kCount,
};

// Whether a kernel is one of shaders/matmul_tensor.metal or attention_tensor.metal, which not every device
// compiles.
constexpr bool needs_tensors(Kernel kernel) {
  return (kernel >= Kernel::kMatmulTensorNarrow && kernel <= Kernel::kMatmulTensorSwigluTall) ||
         kernel == Kernel::kAttentionTensor;
}

struct KernelKey {
  Kernel kernel;
  TensorType type = TensorType::kF32;  // kF32 for kernels that have no types

  // A kernel without types is its key: NOLINTNEXTLINE(google-explicit-constructor)
  KernelKey(Kernel k) : kernel(k) {}
  KernelKey(Kernel k, TensorType t) : kernel(k), type(t) {}
  auto operator<=>(const KernelKey&) const = default;
};

// The names of kernels that read or write the cache depend on this.
struct CacheShape {
  KvType type = KvType::kF16;
  int head_dim = 0;  // the larger one of key_dim and value_dim

  // Largest head of the variant of a kernel that holds head_dim. Throws UnsupportedModelError above 256.
  int decode_size() const;
  int prefill_size() const;
};

// The kernels of passes, and the largest threadgroup that each is dispatched with.
using KernelThreads = std::map<KernelKey, std::size_t>;

// Name of the function in the shaders.
std::string kernel_name(const KernelKey& key, const CacheShape& cache);
// The variant of shaders/variants.h that the kernel is one of; empty where it is always compiled.
std::string variant_of(const KernelKey& key, const CacheShape& cache);

}  // namespace metal_prefill::metal
