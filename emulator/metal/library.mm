// Libraries, functions and compute pipelines.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include "classes.h"

using namespace metal_emulator;

NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

@implementation MTLCompileOptions
- (instancetype)init {
  if ((self = [super init])) {
    _fastMathEnabled = YES;
    _mathMode = MTLMathModeFast;
    _mathFloatingPointFunctions = MTLMathFloatingPointFunctionsFast;
    _languageVersion = MTLLanguageVersion4_0;  // the newest version, as on a Mac
  }
  return self;
}
// Does not change mathFloatingPointFunctions, which Apple's documentation allows.
- (void)setFastMathEnabled:(BOOL)enabled {
  _fastMathEnabled = enabled;
  _mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
}
- (void)setMathMode:(MTLMathMode)mode {
  _mathMode = mode;
  _fastMathEnabled = mode == MTLMathModeFast;
}
@end

@implementation EmulatorLibrary {
  const ShaderLibrary* _library;
  std::set<std::string> _macros;
}

- (instancetype)initWithLibrary:(const ShaderLibrary&)library macros:(std::set<std::string>)macros {
  if ((self = [super init])) {
    _library = &library;
    _macros = std::move(macros);
  }
  return self;
}
// Whether the preprocessor left the kernel in the library.
- (BOOL)has:(const Kernel&)kernel {
  return _macros.empty() || !kernel.selected_by || _macros.contains(kernel.selected_by);
}
- (NSArray<NSString*>*)functionNames {
  NSMutableArray<NSString*>* names = [NSMutableArray array];
  for (const Kernel& kernel : _library->kernels)
    if ([self has:kernel]) [names addObject:to_ns(kernel.name)];
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  const std::string wanted = to_string(name);
  for (const Kernel& kernel : _library->kernels)
    if (wanted == kernel.name && [self has:kernel])
      return [[EmulatorFunction alloc] initWithLibrary:*_library kernel:kernel];
  return nil;
}
@end

@implementation EmulatorFunction {
  const ShaderLibrary* _library;
  const Kernel* _kernel;
}

- (instancetype)initWithLibrary:(const ShaderLibrary&)library kernel:(const Kernel&)kernel {
  if ((self = [super init])) {
    _library = &library;
    _kernel = &kernel;
  }
  return self;
}
- (NSString*)name {
  return to_ns(_kernel->name);
}
- (std::string)identity {
  return device_name() + "; " + checksum_of(source_of(*_library)) + "; " + _kernel->name;
}
- (std::shared_ptr<const Pipeline>)prepare {
  State& state = State::get();
  auto pipeline = state.executor().prepare(*_library, *_kernel);
  if (pipeline->static_threadgroup_bytes > kMaxThreadgroupBytes) {
    throw std::runtime_error(std::string("kernel '") + _kernel->name + "' declares " +
                             std::to_string(pipeline->static_threadgroup_bytes) +
                             " bytes of threadgroup memory, over the limit of " +
                             std::to_string(kMaxThreadgroupBytes));
  }
  const DeviceLimits limits = metal_emulator::limits();
  if (limits.aborting_kernels.contains(_kernel->name)) {
    std::fprintf(stderr, "AGX: compiling '%s' failed: the driver aborts\n", _kernel->name);
    std::abort();
  }
  if (limits.broken_kernels.contains(_kernel->name))
    throw std::runtime_error("XPC_ERROR_CONNECTION_INTERRUPTED: the compiler service failed");
  if (!limits.simdgroup_matrix && source_of(*_library).find("simdgroup_matrix") != std::string_view::npos)
    throw std::runtime_error("the GPU has no simdgroup_matrix");
  state.count(&Counters::pipelines);
  return pipeline;
}
@end

@implementation MTLComputePipelineReflection
@end

@implementation MTLComputePipelineDescriptor
- (id)copyWithZone:(NSZone*)zone {
  MTLComputePipelineDescriptor* copy = [[MTLComputePipelineDescriptor alloc] init];
  copy.computeFunction = _computeFunction;
  copy.maxTotalThreadsPerThreadgroup = _maxTotalThreadsPerThreadgroup;
  copy.binaryArchives = _binaryArchives;
  return copy;
}
@end

@implementation EmulatorComputePipeline {
  NSUInteger _simdWidth;
}

- (instancetype)initWithPipeline:(std::shared_ptr<const Pipeline>)pipeline maxThreads:(NSUInteger)maxThreads {
  if ((self = [super init])) {
    _maxThreads = pipeline->max_threads;
    if (maxThreads > 0) _maxThreads = std::min(_maxThreads, maxThreads);
    const auto limits = metal_emulator::limits();
    if (const auto own = limits.max_threads.find(pipeline->kernel->name); own != limits.max_threads.end())
      _maxThreads = std::min<NSUInteger>(_maxThreads, own->second);
    _simdWidth = limits.simd_width;
    _pipeline = std::move(pipeline);
  }
  return self;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return _maxThreads;
}
- (NSUInteger)threadExecutionWidth {
  return _simdWidth;
}
@end
