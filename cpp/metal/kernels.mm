#include "kernels.h"

#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "concurrently.h"
#include "libraries.h"
#include "pipeline_archive.h"

namespace metal_prefill::metal {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSimdWidth = 32;  // the shaders are written for it

}  // namespace

Kernels::Kernels(const Device& device, const KernelThreads& wanted, const CacheShape& cache,
                 const std::string& archive_folder)
    : cache_(cache), pipelines_{} {
  std::set<std::string> variants;
  std::vector<std::string> names;
  for (const auto& [key, threads] : wanted) {
    keys_.push_back(key);
    names.push_back(kernel_name(key, cache_));
    if (const std::string variant = variant_of(key, cache_); !variant.empty()) variants.insert(variant);
  }
  const Libraries libraries = open_libraries(device.mtl(), variants);
  compiled_ = libraries.compiled;
  std::vector<id<MTLFunction>> functions;
  for (const std::string& name : names) {
    functions.push_back(libraries.function(name));
    if (!functions.back()) throw DeviceError("there is no kernel '" + name + "' in the shaders");
    built_.push_back({name, 0.0, 0});
  }
  const PipelineArchive archive(device.mtl(), archive_folder, names);
  if (id<MTLBinaryArchive> earlier = archive.read()) {
    try {
      build(device, functions, @[ earlier ]);
      return;
    } catch (const DeviceError&) {  // such as a pipeline that it lacks
    }
  }
  build(device, functions, nil);
  n_compiled_ = functions.size();
  archive.write(functions);
}

void Kernels::build(const Device& device, const std::vector<id<MTLFunction>>& functions,
                    NSArray<id<MTLBinaryArchive>>* archives) {
  run_concurrently(functions.size(), [&](std::size_t i, const auto& done) {
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
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
    descriptor.computeFunction = functions[i];
    descriptor.binaryArchives = archives;
    [device.mtl() newComputePipelineStateWithDescriptor:descriptor
                                                options:archives ? MTLPipelineOptionFailOnBinaryArchiveMiss
                                                                 : MTLPipelineOptionNone
                                      completionHandler:^(id<MTLComputePipelineState> state,
                                                          MTLComputePipelineReflection*, NSError* error) {
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
