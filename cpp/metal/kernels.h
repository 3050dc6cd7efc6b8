// The kernels of a model: which it can need, and their pipelines, all built when the model is loaded.
#pragma once

#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

namespace metal_prefill::metal {

// Named as in the shaders. Those of the first group exist once for every tensor type.
enum class Kernel {
  kEmbed,
  kMatvec,
  kMatvecSwiglu,
  kMatmulNarrow,
  kMatmulWide,
  kMatmulSwigluNarrow,
  kMatmulSwigluWide,
  kRmsnormMatvec,  // Q4_0 and F32 only
  kLastTyped = kRmsnormMatvec,

  kMultiTokenMatvecQ4_0,
  kMultiTokenMatvecQ4_0Accumulate,
  kSiluMatvecQ4_0Accumulate,
  kRmsnormF32,
  kRmsnormF16,
  kRmsnormAdd,
  kRopeAppend,
  kRopeAttentionDecode,
  kAttentionDecode,
  kAttentionCombine,
  kAttentionPrefill,
  kSwigluF32,
  kSwigluF16,
  kArgmaxStage1,
  kArgmaxStage2,
  kLogProb,
  kCount,
};

// What the names of the cache's kernels depend on.
struct CacheShape {
  KvType type = KvType::kF16;
  int head_dim = 0;  // the larger one of key_dim and value_dim

  // Largest head that the variant of a kernel holds. Throws UnsupportedModelError beyond 256.
  int decode_size() const;
  int prefill_size() const;
};

using KernelKey = std::pair<Kernel, TensorType>;  // the type is kF32 for kernels that have no types

std::string kernel_name(const KernelKey& key, const CacheShape& cache);

class Kernels {
 public:
  // Builds the pipelines concurrently. Throws DeviceError naming the first kernel that failed.
  Kernels(const Device& device, const std::set<KernelKey>& wanted, const CacheShape& cache);

  const id<MTLComputePipelineState>& pipeline(Kernel kernel, TensorType type = TensorType::kF32) const;
  std::string name_of(id<MTLComputePipelineState> pipeline) const;
  const CacheShape& cache() const { return cache_; }
  std::size_t count() const { return count_; }

 private:
  static constexpr std::size_t kTypes = std::size_t(TensorType::kBF16) + 1;
  const CacheShape cache_;
  std::size_t count_ = 0;
  std::array<std::array<id<MTLComputePipelineState>, kTypes>, std::size_t(Kernel::kCount)> pipelines_;
};

}  // namespace metal_prefill::metal
