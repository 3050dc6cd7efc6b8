#include "kernels.h"

#include <dlfcn.h>

#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "embedded_shaders.h"

namespace metal_prefill::metal {

namespace {

// Starts `n` asynchronous jobs and waits for all of them. A job gets its index and must call `done` once,
// with an error message or an empty one; it must not throw. Throws DeviceError with the first message.
template <typename Start>
void run_concurrently(std::size_t n, const Start& start) {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t left = n;
  std::string first_error;
  const auto done = [&](const std::string& error) {
    const std::scoped_lock lock(mutex);
    if (first_error.empty()) first_error = error;
    --left;
    changed.notify_all();
  };
  for (std::size_t i = 0; i < n; ++i) {
    try {
      start(i, done);
    } catch (const std::exception& error) {
      done(error.what());
    }
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return left == 0; });
  if (!first_error.empty()) throw DeviceError(first_error);
}

// The compiled library in this module's folder, if the build made one.
id<MTLLibrary> compiled_library(id<MTLDevice> device) {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&kernel_name), &info) == 0 || !info.dli_fname) return nil;
  const auto path = std::filesystem::path(info.dli_fname).parent_path() / "metal_prefill.metallib";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return nil;
  NSError* error = nil;
  return [device newLibraryWithURL:[NSURL fileURLWithPath:to_ns(path.string())] error:&error];
}

// Fast maths, Metal's default, assumes that there are no infinities and no NaN; masks and argmax need both.
MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
  options.fastMathEnabled = NO;
#pragma clang diagnostic pop
  return options;
}

// The library that has each kernel, by name: the compiled one, or those of all sources, compiled here.
std::map<std::string, id<MTLLibrary>> open_libraries(id<MTLDevice> device) {
  std::vector<id<MTLLibrary>> libraries;
  if (id<MTLLibrary> compiled = compiled_library(device)) {
    libraries.push_back(compiled);
  } else {
    libraries.resize(kShaderSourceCount);
    run_concurrently(kShaderSourceCount, [&](std::size_t i, const auto& done) {
      const auto finish = [&libraries, &done, i](id<MTLLibrary> library, NSError* error) {
        libraries[i] = library;
        done(library ? ""
                     : "the shaders in " + std::string(kShaderSources[i].name) +
                           " do not compile: " + describe(error));
      };
      [device newLibraryWithSource:to_ns(kShaderSources[i].text)
                           options:compile_options()
                 completionHandler:^(id<MTLLibrary> library, NSError* error) {
                   finish(library, error);
                 }];
    });
  }
  std::map<std::string, id<MTLLibrary>> by_name;
  for (id<MTLLibrary> library : libraries)
    for (NSString* name in library.functionNames) by_name[name.UTF8String] = library;
  return by_name;
}

}  // namespace

Kernels::Kernels(const Device& device, const std::set<KernelKey>& wanted, const CacheShape& cache)
    : cache_(cache), count_(wanted.size()), pipelines_{} {
  const auto libraries = open_libraries(device.mtl());
  const std::vector<KernelKey> keys(wanted.begin(), wanted.end());
  run_concurrently(keys.size(), [&](std::size_t i, const auto& done) {
    const std::string name = kernel_name(keys[i], cache_);
    const auto library = libraries.find(name);
    id<MTLFunction> function =
        library == libraries.end() ? nil : [library->second newFunctionWithName:to_ns(name)];
    if (!function) return done("there is no kernel '" + name + "' in the shaders");
    id<MTLComputePipelineState> __strong* slot =
        &pipelines_[std::size_t(keys[i].kernel)][std::size_t(keys[i].type)];
    const auto finish = [slot, name, &done](id<MTLComputePipelineState> state, NSError* error) {
      *slot = state;
      done(state ? "" : "the kernel '" + name + "' cannot be built: " + describe(error));
    };
    [device.mtl() newComputePipelineStateWithFunction:function
                                    completionHandler:^(id<MTLComputePipelineState> state, NSError* error) {
                                      finish(state, error);
                                    }];
  });
}

const id<MTLComputePipelineState>& Kernels::pipeline(const KernelKey& key) const {
  const id<MTLComputePipelineState>& state = pipelines_[std::size_t(key.kernel)][std::size_t(key.type)];
  if (!state)
    throw std::logic_error("the pipeline of '" + kernel_name(key, cache_) + "' was not built at load");
  return state;
}

}  // namespace metal_prefill::metal
