#include "kernels.h"

#include <chrono>
#include <string>
#include <vector>

#include "concurrently.h"
#include "libraries.h"

namespace metal_prefill::metal {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSimdWidth = 32;  // the shaders are written for it

}  // namespace

Kernels::Kernels(const Device& device, const KernelThreads& wanted, const CacheShape& cache)
    : cache_(cache), pipelines_{} {
  const Libraries libraries = open_libraries(device.mtl());
  compiled_ = libraries.compiled;
  for (const auto& [key, threads] : wanted) {
    keys_.push_back(key);
    built_.push_back({kernel_name(key, cache_), 0.0, 0});
  }
  run_concurrently(keys_.size(), [&](std::size_t i, const auto& done) {
    const std::string& name = built_[i].kernel;
    id<MTLFunction> function = libraries.function(name);
    if (!function) return done("there is no kernel '" + name + "' in the shaders");
    id<MTLComputePipelineState> __strong* slot =
        &pipelines_[std::size_t(keys_[i].kernel)][std::size_t(keys_[i].type)];
    PipelineInfo* info = &built_[i];
    const auto finish = [slot, info, begin = Clock::now(), &done](id<MTLComputePipelineState> state,
                                                                  NSError* error) {
      *slot = state;
      info->seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (!state) return done("the kernel '" + info->kernel + "' cannot be built: " + describe(error));
      info->max_threads = state.maxTotalThreadsPerThreadgroup;
      const std::size_t width = state.threadExecutionWidth;
      done(width == kSimdWidth
               ? ""
               : "the kernel '" + info->kernel + "' runs in simdgroups of " + std::to_string(width) +
                     " threads; the shaders need " + std::to_string(kSimdWidth));
    };
    [device.mtl() newComputePipelineStateWithFunction:function
                                    completionHandler:^(id<MTLComputePipelineState> state, NSError* error) {
                                      finish(state, error);
                                    }];
  });
}

void Kernels::check(const KernelThreads& used) const {
  for (const auto& [key, threads] : used)
    if (const std::size_t most = max_threads(key); threads > most)
      throw DeviceError("the kernel '" + kernel_name(key, cache_) + "' needs threadgroups of " +
                        std::to_string(threads) + " threads; this GPU runs it with at most " +
                        std::to_string(most));
}

const id<MTLComputePipelineState>& Kernels::pipeline(const KernelKey& key) const {
  const id<MTLComputePipelineState>& state = pipelines_[std::size_t(key.kernel)][std::size_t(key.type)];
  if (!state)
    throw std::logic_error("the pipeline of '" + kernel_name(key, cache_) + "' was not built at load");
  return state;
}

}  // namespace metal_prefill::metal
