// The pipelines of the kernels that a model can need, all built when it is loaded.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../../engine/inspection.h"
#include "../plan/kernel_key.h"
#include "device.h"
#include "libraries.h"
#include "pipeline_archive.h"

namespace metal_prefill::metal {

// An error of a kernel that needs tensors (see needs_tensors). A pass can use other kernels instead.
class TensorKernelError : public DeviceError {
 public:
  TensorKernelError(Kernel kernel, const std::string& message) : DeviceError(message), kernel_(kernel) {}

  // Excludes the kernel and all others with the same purpose.
  void exclude(MetalOptions& options) const {
    if (kernel_ == Kernel::kAttentionTensor)
      options.attention_tensor = false;
    else if (kernel_ == Kernel::kMatmulTensorTall || kernel_ == Kernel::kMatmulTensorSwigluTall)
      options.tall_tiles = false;
    else
      options.no_matmul_tensor = what();
  }

 private:
  Kernel kernel_;
};

// Libraries and pipelines that engines of one device share.
class SharedKernels {
 public:
  Libraries libraries(const std::set<std::string>& key, const std::function<Libraries()>& open) {
    const std::scoped_lock lock(mutex_);
    const auto found = libraries_.find(key);
    return found != libraries_.end() ? found->second : libraries_[key] = open();
  }
  id<MTLComputePipelineState> pipeline(const std::string& kernel) const {
    const std::scoped_lock lock(mutex_);
    const auto found = pipelines_.find(kernel);
    return found == pipelines_.end() ? nil : found->second;
  }
  void add(const std::string& kernel, id<MTLComputePipelineState> pipeline) {
    const std::scoped_lock lock(mutex_);
    pipelines_[kernel] = pipeline;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::set<std::string>, Libraries> libraries_;
  std::map<std::string, id<MTLComputePipelineState>> pipelines_;
};

class Kernels {
 public:
  // Builds the pipelines that options.shared_kernels lacks, concurrently, from archives of earlier processes
  // if there are any. A thread stores those that had to be compiled. GPUs that are not native and pipelines
  // under Metal's shader validation have no archives. Throws DeviceError naming the first kernel that failed
  // or whose simdgroups have another width; TensorKernelError if the kernel needs tensors.
  Kernels(const Device& device, const KernelThreads& wanted, KvType cache, const MetalOptions& options);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Throws the same errors, naming a kernel whose threadgroups exceed what its pipeline allows.
  void check(const KernelThreads& used) const;
  const id<MTLComputePipelineState>& pipeline(const KernelKey& key) const;
  std::size_t max_threads(const KernelKey& key) const { return pipeline(key).maxTotalThreadsPerThreadgroup; }
  KvType cache() const { return cache_; }
  std::size_t count() const { return built_.size(); }
  std::size_t compiled_now() const { return n_compiled_; }  // pipelines that no archive had
  const std::vector<PipelineInfo>& built() const { return built_; }
  bool compiled() const { return compiled_; }  // whether the shaders were compiled with the package
  // Waits until the archive is written, as the destructor does.
  void finish() const;

 private:
  // Builds the pipelines of the keys with these indices; compiles them if there are no archives.
  void build(const Device& device, std::span<const std::size_t> indices,
             const std::vector<id<MTLFunction>>& functions, NSArray<id<MTLBinaryArchive>>* archives);
  void keep(std::size_t index, id<MTLComputePipelineState> pipeline);
  void write_later(const PipelineArchive& archive, std::vector<id<MTLFunction>> functions);

  const KvType cache_;
  bool compiled_ = false;
  std::size_t n_compiled_ = 0;
  std::vector<KernelKey> keys_;
  std::vector<PipelineInfo> built_;  // one per key
  std::map<KernelKey, id<MTLComputePipelineState>> pipelines_;
  mutable std::mutex finishing_;
  mutable std::thread archive_writer_;
};

}  // namespace metal_prefill::metal
