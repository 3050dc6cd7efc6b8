#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

#include "classes.h"

using namespace metal_emulator;

NSError* metal_emulator::make_error(NSErrorDomain domain, NSInteger code, const std::string& message) {
  return [NSError errorWithDomain:domain code:code userInfo:@{NSLocalizedDescriptionKey : to_ns(message)}];
}

std::string metal_emulator::device_name() {
  const std::string own = State::get().executor().device_name(), claimed = limits().name;
  return claimed.empty() ? own : claimed + " (" + own + ")";
}

namespace {

// Throws ValidationError for modes other than Shared and Private.
StorageMode storage_mode(MTLResourceOptions options, const char* call) {
  switch ((options >> MTLResourceStorageModeShift) & 15) {
    case MTLStorageModeShared:
      return StorageMode::kShared;
    case MTLStorageModePrivate:
      return StorageMode::kPrivate;
    default:
      throw ValidationError(std::string(call) + ": the storage mode of the options " +
                            std::to_string(options) +
                            " is neither Shared nor Private, the only ones that the emulator has");
  }
}

// Reason why the library is unavailable with these macros; empty if it is available.
std::string unknown_macro(const ShaderLibrary& library, NSDictionary<NSString*, NSObject*>* macros) {
  const char* const needed = "; other preprocessor macros need a compiler, which the emulator is not";
  bool guarded = macros.count == 0;
  for (NSString* key in macros) {
    const std::string name = to_string(key);
    const bool is_guard = library.guard && name == library.guard;
    guarded = guarded || is_guard;
    if (!is_guard &&
        std::find(library.selectors.begin(), library.selectors.end(), name) == library.selectors.end())
      return "the macro '" + name + "' selects nothing of " + library.name + needed;
    if (const std::string value = to_string(macros[key].description); value != "1")
      return "the macro '" + name + "' is '" + value + "' instead of 1" + needed;
  }
  return guarded ? "" : "macros without the guard of " + std::string(library.name) + needed;
}

// The header that a Mac's compiler would not find for a source in this language; empty if it finds all. Newer
// languages include the older ones.
std::string missing_header(const ShaderLibrary& library, std::uint32_t language) {
  constexpr unsigned kTensors = 400;  // the language version that introduced them
  const unsigned version = (language >> 16) * 100 + (language & 0xffff) * 10;
  if (library.metal_version < kTensors) return "";
  if (!limits().metal_tensor)
    return std::string(library.name) + ": fatal error: 'metal_tensor' file not found";
  if (version >= library.metal_version) return "";
  return std::string(library.name) + ": error: the language is Metal " + std::to_string(language >> 16) +
         "." + std::to_string(language & 0xffff) + ", which has no tensors";
}

void require_family(int family, const char* call) {
  if (const int own = limits().apple_family; own < family)
    throw ValidationError(std::string(call) + ": needs a GPU of the family Apple" + std::to_string(family) +
                          " or later; the family of this one is Apple" + std::to_string(own));
}

// One device, as on a Mac: all callers get the same object while it is referenced.
std::mutex device_mutex;
void* the_device = nullptr;

void check_length(NSUInteger length, const char* call) {
  if (length == 0) throw ValidationError(std::string(call) + ": length is 0");
  const auto limit = limits().max_buffer_length;
  if (length > limit) {
    throw ValidationError(std::string(call) + ": length " + std::to_string(length) +
                          " exceeds maxBufferLength " + std::to_string(limit));
  }
}

}  // namespace

@implementation EmulatorDevice {
  std::atomic<bool> _maximizesCompilation;
}

- (void)dealloc {
  std::lock_guard lock(device_mutex);
  if (the_device == (__bridge void*)self) the_device = nullptr;
}
- (BOOL)shouldMaximizeConcurrentCompilation {
  return _maximizesCompilation;
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)maximizes {
  require_family(7, "shouldMaximizeConcurrentCompilation");
  _maximizesCompilation = maximizes;
}
- (NSString*)name {
  return to_ns(device_name());
}
- (uint64_t)registryID {
  return 1;
}
- (BOOL)hasUnifiedMemory {
  return limits().unified_memory;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return limits().working_set_bytes;
}
- (NSUInteger)maxBufferLength {
  return limits().max_buffer_length;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  if (family == MTLGPUFamilyMac2 || family == MTLGPUFamilyMetal3) return YES;
  return family >= MTLGPUFamilyApple1 && family - MTLGPUFamilyApple1 < limits().apple_family;
}

- (id<MTLCommandQueue>)newCommandQueue {
  return [[EmulatorCommandQueue alloc] init];
}

- (id<MTLFence>)newFence {
  return [[EmulatorFence alloc] init];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  const StorageMode mode = storage_mode(options, "newBufferWithLength");
  check_length(length, "newBufferWithLength");
  auto memory = State::get().allocate(length, mode);
  if (!memory) return nil;
  return [[EmulatorBuffer alloc] initWithMemory:std::move(memory) options:options deallocator:nil];
}

- (id<MTLBuffer>)newBufferWithBytes:(const void*)pointer
                             length:(NSUInteger)length
                            options:(MTLResourceOptions)options {
  if (storage_mode(options, "newBufferWithBytes") == StorageMode::kPrivate) {
    throw ValidationError("newBufferWithBytes: a Private buffer cannot be filled by the host");
  }
  if (!pointer) throw ValidationError("newBufferWithBytes: pointer is NULL");
  id<MTLBuffer> buffer = [self newBufferWithLength:length options:options];
  if (buffer) std::memcpy(buffer.contents, pointer, length);
  return buffer;
}

- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void* pointer, NSUInteger length))deallocator {
  if (storage_mode(options, "newBufferWithBytesNoCopy") == StorageMode::kPrivate) {
    throw ValidationError("newBufferWithBytesNoCopy: a Private buffer cannot stand on host memory");
  }
  check_length(length, "newBufferWithBytesNoCopy");
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  if (!pointer || reinterpret_cast<std::uintptr_t>(pointer) % page != 0) {
    throw ValidationError("newBufferWithBytesNoCopy: pointer is NULL or not a multiple of the page size, " +
                          std::to_string(page));
  }
  if (length % page != 0) {
    throw ValidationError("newBufferWithBytesNoCopy: length " + std::to_string(length) +
                          " is not a multiple of the page size, " + std::to_string(page));
  }
  if (!limits().no_copy) return nil;
  auto memory = State::get().wrap(pointer, length);
  if (!memory) return nil;
  return [[EmulatorBuffer alloc] initWithMemory:std::move(memory) options:options deallocator:deallocator];
}

- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  return fail(
      error, MTLLibraryErrorDomain, MTLLibraryErrorFileNotFound,
      "the emulator compiles shaders ahead of time, and reads no library: '" + to_string(url.path) + "'");
}

- (id<MTLLibrary>)compile:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  const std::string text = to_string(source);
  std::set<std::string> macros;
  for (NSString* name in options.preprocessorMacros) macros.insert(to_string(name));
  std::string why = "this source text was not compiled ahead of time into the binary";
  for (const ShaderLibrary* library : registered_libraries()) {
    if (source_of(*library) != text) continue;
    if (limits().broken_sources.contains(library->name)) {
      why = std::string(library->name) + ":1:1: error: this compiler rejects it";
      break;
    }
    if (why = unknown_macro(*library, options.preprocessorMacros); !why.empty()) break;
    const auto language = static_cast<std::uint32_t>(options.languageVersion);
    if (why = missing_header(*library, language); !why.empty()) break;
    EmulatorLibrary* found = [[EmulatorLibrary alloc] initWithLibrary:*library macros:macros];
    const bool fast_functions = options.mathFloatingPointFunctions == MTLMathFloatingPointFunctionsFast;
    const LibraryRecord record{library->name,
                               static_cast<bool>(options.fastMathEnabled),
                               fast_functions,
                               static_cast<int>(language),
                               found.functionNames.count,
                               static_cast<bool>(self.shouldMaximizeConcurrentCompilation)};
    locked([&](State& state) { state.compiled_.push_back(record); });
    return found;
  }
  return fail(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, why);
}

- (void)newLibraryWithSource:(NSString*)source
                     options:(MTLCompileOptions*)options
           completionHandler:(MTLNewLibraryCompletionHandler)completionHandler {
  if (!options)
    throw ValidationError("newLibraryWithSource: options are nil, but the emulator has no defaults");
  if (!limits().compiler) return;
  State::get().run_in_background([=] {
    const AutoreleasePool pool;
    NSError* error = nil;
    id<MTLLibrary> library = [self compile:source options:options error:&error];
    completionHandler(library, error);
  });
}

- (id<MTLComputePipelineState>)build:(MTLComputePipelineDescriptor*)descriptor
                             options:(MTLPipelineOption)options
                               error:(NSError**)error {
  auto* function = checked_cast<EmulatorFunction>(descriptor.computeFunction, "newComputePipelineState");
  bool archived = false;
  for (id<MTLBinaryArchive> archive in descriptor.binaryArchives)
    archived =
        archived || [checked_cast<EmulatorBinaryArchive>(archive, "binaryArchives") has:function.identity];
  if (!archived && (options & MTLPipelineOptionFailOnBinaryArchiveMiss)) {
    const std::string message = "no archive has the pipeline of '" + to_string(function.name) + "'";
    return fail(error, MTLLibraryErrorDomain, MTLLibraryErrorInternal, message);
  }
  try {
    auto pipeline = [function prepare];
    if (!archived) State::get().count(&Counters::compiled_pipelines);
    return [[EmulatorComputePipeline alloc] initWithPipeline:std::move(pipeline)
                                                  maxThreads:descriptor.maxTotalThreadsPerThreadgroup];
  } catch (const std::runtime_error& exception) {
    return fail(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, exception.what());
  }
}

- (void)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                      options:(MTLPipelineOption)options
                            completionHandler:(void (^)(id<MTLComputePipelineState>,
                                                        MTLComputePipelineReflection*,
                                                        NSError*))completionHandler {
  checked_cast<EmulatorFunction>(descriptor.computeFunction, "newComputePipelineState");
  MTLComputePipelineDescriptor* copy = [descriptor copy];
  if (!limits().compiler) return;
  State::get().run_in_background([=] {
    const AutoreleasePool pool;
    NSError* error = nil;
    id<MTLComputePipelineState> pipeline = [self build:copy options:options error:&error];
    completionHandler(pipeline, nil, error);
  });
}

- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor
                                                 error:(NSError**)error {
  EmulatorBinaryArchive* archive = [[EmulatorBinaryArchive alloc] init];
  if (!descriptor.url) return archive;
  if (!limits().binary_archives)
    throw ValidationError(
        "newBinaryArchiveWithDescriptor: Target device architecture is nil (a Mac aborts the process there)");
  const std::string path = to_string(descriptor.url.path);
  const std::string problem = [archive load:path];
  if (problem.empty()) return archive;
  return fail(error, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorInvalidFile,
              "binary archive '" + path + "': " + problem);
}

- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)desc error:(NSError**)error {
  require_family(6, "newResidencySetWithDescriptor");
  if (limits().residency_sets) return [[EmulatorResidencySet alloc] init];
  return fail(error, MTLLibraryErrorDomain, MTLLibraryErrorUnsupported, "no residency sets");
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice() {
  static const pid_t first_process = getpid();
  if (!limits().survives_fork && getpid() != first_process) {
    std::fputs("the compiler service cannot be reached from a forked process\n", stderr);
    std::abort();
  }
  std::lock_guard lock(device_mutex);
  if (the_device && metal_emulator_retain_if_alive(the_device))
    return (__bridge_transfer id<MTLDevice>)the_device;
  EmulatorDevice* device = [[EmulatorDevice alloc] init];
  the_device = (__bridge void*)device;
  return device;
}

NSArray<id<MTLDevice>>* MTLCopyAllDevices() {
  return [[NSArray alloc] initWithObjects:(const id[]){MTLCreateSystemDefaultDevice()} count:1];
}
