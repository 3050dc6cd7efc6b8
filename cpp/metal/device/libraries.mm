#include "libraries.h"

#include <dlfcn.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "../plan/kernel_key.h"
#include "../plan/shader_language.h"
#include "device.h"
#include "embedded_shaders.h"
#include "waits.h"

namespace metal_prefill::metal {

namespace {

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

// Fast maths, Metal's default, assumes that there are no infinities and NaNs, which argmax needs. The default
// language is the newest that the system supports: with an older one, all systems compile the same.
// `variants` are those of kernels; null selects all.
MTLCompileOptions* compile_options(const std::set<std::string>* variants, ShaderLanguage language) {
  MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
  options.fastMathEnabled = NO;
#pragma clang diagnostic pop
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
  // From macOS 15 on, single-precision functions have a separate option, which fastMathEnabled need not
  // change.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunguarded-availability-new"
  if ([options respondsToSelector:@selector(setMathFloatingPointFunctions:)]) {
    options.mathMode = MTLMathModeSafe;
    options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
  }
#pragma clang diagnostic pop
#endif
  options.languageVersion = MTLLanguageVersion((language.major << 16) + language.minor);
  if (!variants) return options;
  NSMutableDictionary<NSString*, NSObject*>* macros = [NSMutableDictionary dictionary];
  macros[@"ONLY_WANTED"] = @"1";
  for (const std::string& variant : *variants) macros[to_ns("WANTS_" + variant)] = @"1";
  options.preprocessorMacros = macros;
  return options;
}

struct Compiled {
  id<MTLLibrary> library;  // null if there is an error
  NSError* error;
};

// Compiles the sources concurrently.
std::vector<Compiled> compile_all(id<MTLDevice> device, std::span<const ShaderSource* const> sources,
                                  const std::set<std::string>* variants) {
  return run_concurrently<Compiled>(sources.size(), [&](std::size_t i, auto done) {
    [device newLibraryWithSource:to_ns(sources[i]->text)
                         options:compile_options(variants, language_of(sources[i]->name))
               completionHandler:^(id<MTLLibrary> library, NSError* error) {
                 done({library, error});
               }];
  });
}

void add_kernels(id<MTLLibrary> library, Libraries& libraries) {
  for (NSString* name in library.functionNames) libraries.by_kernel[name.UTF8String] = library;
}

// The libraries of the sources for which `wanted` is true.
template <typename Wanted>
Libraries compile(id<MTLDevice> device, const std::set<std::string>& variants, const Wanted& wanted) {
  std::vector<const ShaderSource*> sources;
  for (std::size_t i = 0; i < kShaderSourceCount; ++i)
    if (wanted(kShaderSources[i].name)) sources.push_back(&kShaderSources[i]);
  const std::vector<Compiled> results = compile_all(device, sources, &variants);
  Libraries libraries;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].library)
      throw DeviceError("the shaders in " + std::string(sources[i]->name) +
                        " do not compile: " + describe(results[i].error));
    add_kernels(results[i].library, libraries);
  }
  return libraries;
}

}  // namespace

id<MTLFunction> Libraries::function(const std::string& kernel) const {
  const auto library = by_kernel.find(kernel);
  return library == by_kernel.end() ? nil : [library->second newFunctionWithName:to_ns(kernel)];
}

Libraries open_libraries(id<MTLDevice> device, const std::set<std::string>& variants) {
  id<MTLLibrary> compiled = compiled_library(device);
  if (!compiled) return compile(device, variants, std::not_fn(is_tensor_source));
  Libraries libraries{.by_kernel = {}, .compiled = true};
  add_kernels(compiled, libraries);
  return libraries;
}

std::vector<CompiledSource> compile_sources(id<MTLDevice> device) {
  std::vector<CompiledSource> compiled;
  for (std::size_t i = 0; i < kShaderSourceCount; ++i) {
    const AutoreleasePool pool;
    const ShaderSource* source = &kShaderSources[i];
    const auto begin = std::chrono::steady_clock::now();
    const Compiled result = compile_all(device, {&source, 1}, nullptr)[0];
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    const std::string problem = result.library ? std::string() : describe(result.error);
    compiled.push_back({source->name, problem, taken.count(), is_tensor_source(source->name)});
  }
  return compiled;
}

Libraries open_tensors(id<MTLDevice> device, std::string_view source, const std::set<std::string>& variants) {
  return compile(device, variants, [&](std::string_view other) { return other == source; });
}

}  // namespace metal_prefill::metal
