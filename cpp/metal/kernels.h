// The pipelines of the kernels that a model can need, all built when it is loaded.
#pragma once

#include <array>
#include <set>

#include "device.h"
#include "kernel_key.h"

namespace metal_prefill::metal {

class Kernels {
 public:
  // Builds the pipelines concurrently. Throws DeviceError naming the first kernel that failed.
  Kernels(const Device& device, const std::set<KernelKey>& wanted, const CacheShape& cache);

  const id<MTLComputePipelineState>& pipeline(const KernelKey& key) const;
  const CacheShape& cache() const { return cache_; }
  std::size_t count() const { return count_; }

 private:
  static constexpr std::size_t kTypes = std::size_t(TensorType::kBF16) + 1;
  const CacheShape cache_;
  std::size_t count_ = 0;
  std::array<std::array<id<MTLComputePipelineState>, kTypes>, std::size_t(Kernel::kCount)> pipelines_;
};

}  // namespace metal_prefill::metal
