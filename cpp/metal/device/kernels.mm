#include "kernels.h"

#include <chrono>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "../../base/long_wait.h"
#include "../plan/shader_language.h"
#include "libraries.h"
#include "pipeline_archive.h"
#include "waits.h"

namespace metal_prefill::metal {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSimdWidth = 32;  // width that the shaders assume

[[noreturn]] void fail(const KernelKey& key, const std::string& message) {
  if (needs_tensors(key.kernel)) throw TensorKernelError(key.kernel, message);
  throw DeviceError(message);
}

// Opens the libraries, including those on tensors if a key needs them.
Libraries open_libraries_of(id<MTLDevice> device, const std::vector<KernelKey>& keys,
                            const std::set<std::string>& variants) {
  Libraries libraries = open_libraries(device, variants);
  std::map<std::string_view, Kernel> sources;
  for (const KernelKey& key : keys)
    if (needs_tensors(key.kernel)) {
      const bool attends = key.kernel == Kernel::kAttentionTensor;
      sources.emplace(attends ? kAttentionTensorSource : kMatmulTensorSource,
                      attends ? key.kernel : Kernel::kMatmulTensorNarrow);
    }
  for (const auto& [source, kernel] : sources) {
    try {
      libraries.add(open_tensors(device, source, variants));
    } catch (const DeviceError& error) {
      throw TensorKernelError(kernel, error.what());
    }
  }
  return libraries;
}

}  // namespace

Kernels::Kernels(const Device& device, const KernelThreads& wanted, KvType cache, const MetalOptions& options)
    : cache_(cache) {
  std::set<std::string> variants, key;
  std::vector<std::string> names;
  for (const auto& [kernel, threads] : wanted) {
    keys_.push_back(kernel);
    names.push_back(kernel_name(kernel, cache_));
    if (const std::string variant = variant_of(kernel, cache_); !variant.empty()) variants.insert(variant);
    if (needs_tensors(kernel.kernel)) key.insert(names.back());
  }
  const std::shared_ptr<SharedKernels> shared =
      options.shared_kernels ? options.shared_kernels : std::make_shared<SharedKernels>();
  key.insert(variants.begin(), variants.end());
  const Libraries libraries =
      shared->libraries(key, [&] { return open_libraries_of(device.mtl(), keys_, variants); });
  compiled_ = libraries.compiled;
  std::vector<id<MTLFunction>> functions;
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < names.size(); ++i) {
    functions.push_back(libraries.function(names[i]));
    if (!functions.back()) fail(keys_[i], "there is no kernel '" + names[i] + "' in the shaders");
    built_.push_back({names[i], 0.0, 0});
    if (id<MTLComputePipelineState> pipeline = shared->pipeline(names[i]))
      keep(i, pipeline);
    else
      missing.push_back(i);
  }
  const bool archives = device.is_native() && !is_set("MTL_SHADER_VALIDATION") && !options.is_measured;
  const PipelineArchive archive(device.mtl(), archives ? options.pipeline_folder : "", names);
  id<MTLBinaryArchive> earlier = archive.read();
  bool found = false;
  if (earlier) {
    try {
      build(device, missing, functions, @[ earlier ]);
      found = true;
    } catch (const DeviceError&) {  // such as a missing pipeline
    }
  }
  if (!found) {
    build(device, missing, functions, nil);
    n_compiled_ = missing.size();
    if (archive.is_kept()) write_later(archive, std::move(functions));
  }
  for (const std::size_t i : missing) shared->add(names[i], pipeline(keys_[i]));
}

Kernels::~Kernels() {
  if (archive_writer_.joinable()) long_wait([&] { finish(); });
}

void Kernels::finish() const {
  const std::scoped_lock lock(finishing_);
  if (archive_writer_.joinable()) archive_writer_.join();
}

void Kernels::write_later(const PipelineArchive& archive, std::vector<id<MTLFunction>> functions) {
  try {
    archive_writer_ = std::thread([archive, functions = std::move(functions)] {
      const AutoreleasePool pool;
      try {
        archive.write(functions);
      } catch (const std::exception&) {  // such as a lack of memory: later processes compile again
      }
    });
  } catch (const std::system_error&) {  // no thread: later processes compile again
  }
}

void Kernels::build(const Device& device, std::span<const std::size_t> indices,
                    const std::vector<id<MTLFunction>>& functions, NSArray<id<MTLBinaryArchive>>* archives) {
  struct Outcome {
    id<MTLComputePipelineState> pipeline;  // null if there is an error
    NSError* error;
    double seconds;
  };
  const auto outcomes = run_concurrently<Outcome>(indices.size(), [&](std::size_t i, auto done) {
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
    descriptor.computeFunction = functions[indices[i]];
    descriptor.binaryArchives = archives;
    const auto begin = Clock::now();
    [device.mtl() newComputePipelineStateWithDescriptor:descriptor
                                                options:archives ? MTLPipelineOptionFailOnBinaryArchiveMiss
                                                                 : MTLPipelineOptionNone
                                      completionHandler:^(id<MTLComputePipelineState> pipeline,
                                                          MTLComputePipelineReflection*, NSError* error) {
                                        const std::chrono::duration<double> taken = Clock::now() - begin;
                                        done({pipeline, error, taken.count()});
                                      }];
  });
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const auto& [pipeline, error, seconds] = outcomes[i];
    const std::size_t index = indices[i];
    const std::string kernel = "the kernel '" + built_[index].kernel + "' ";
    if (!pipeline) fail(keys_[index], kernel + "cannot be built: " + describe(error));
    if (pipeline.threadExecutionWidth != kSimdWidth)
      fail(keys_[index], kernel + "runs in simdgroups of " + std::to_string(pipeline.threadExecutionWidth) +
                             " threads; the shaders need " + std::to_string(kSimdWidth));
    built_[index].seconds = seconds;
    keep(index, pipeline);
  }
}

void Kernels::keep(std::size_t index, id<MTLComputePipelineState> pipeline) {
  built_[index].max_threads = pipeline.maxTotalThreadsPerThreadgroup;
  pipelines_[keys_[index]] = pipeline;
}

void Kernels::check(const KernelThreads& used) const {
  for (const auto& [key, threads] : used)
    if (const std::size_t most = max_threads(key); threads > most)
      fail(key, "the kernel '" + kernel_name(key, cache_) + "' needs threadgroups of " +
                    std::to_string(threads) + " threads; this GPU runs it with at most " +
                    std::to_string(most));
}

const id<MTLComputePipelineState>& Kernels::pipeline(const KernelKey& key) const {
  const auto built = pipelines_.find(key);
  if (built == pipelines_.end())
    throw std::logic_error("the pipeline of '" + kernel_name(key, cache_) + "' was not built at load");
  return built->second;
}

}  // namespace metal_prefill::metal
