// Libraries, functions, function constants and compute pipelines.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include "classes.h"

using metal_emulator::ConstantType;
using metal_emulator::FunctionConstant;
using metal_emulator::Kernel;
using metal_emulator::Pipeline;
using metal_emulator::ShaderLibrary;
using metal_emulator::Specialization;
using metal_emulator::State;
using metal_emulator::to_ns;
using metal_emulator::to_string;
using metal_emulator::ValidationError;

NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

namespace {

struct TypeInfo {
  ConstantType type;
  std::size_t bytes;
  const char* name;
};

TypeInfo type_info(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
      return {ConstantType::kBool, 1, "bool"};
    case MTLDataTypeChar:
      return {ConstantType::kChar, 1, "char"};
    case MTLDataTypeUChar:
      return {ConstantType::kUChar, 1, "uchar"};
    case MTLDataTypeShort:
      return {ConstantType::kShort, 2, "short"};
    case MTLDataTypeUShort:
      return {ConstantType::kUShort, 2, "ushort"};
    case MTLDataTypeInt:
      return {ConstantType::kInt, 4, "int"};
    case MTLDataTypeUInt:
      return {ConstantType::kUInt, 4, "uint"};
    case MTLDataTypeLong:
      return {ConstantType::kLong, 8, "long"};
    case MTLDataTypeULong:
      return {ConstantType::kULong, 8, "ulong"};
    case MTLDataTypeHalf:
      return {ConstantType::kHalf, 2, "half"};
    case MTLDataTypeFloat:
      return {ConstantType::kFloat, 4, "float"};
    default:
      throw ValidationError(
          "MTLFunctionConstantValues: the emulator has no function constants of MTLDataType " +
          std::to_string(type));
  }
}

struct Value {
  TypeInfo info;
  std::uint64_t bits;
};

Value make_value(const void* bytes, MTLDataType type) {
  Value value{type_info(type), 0};
  std::memcpy(&value.bits, bytes, value.info.bytes);
  return value;
}

}  // namespace

@implementation MTLCompileOptions
- (instancetype)init {
  if ((self = [super init])) {
    _fastMathEnabled = YES;
    _mathMode = MTLMathModeFast;
    _mathFloatingPointFunctions = MTLMathFloatingPointFunctionsFast;
    _languageVersion = MTLLanguageVersion4_0;  // the newest, as on a Mac
  }
  return self;
}
// It does not change mathFloatingPointFunctions, which Apple does not rule out.
- (void)setFastMathEnabled:(BOOL)enabled {
  _fastMathEnabled = enabled;
  _mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
}
- (void)setMathMode:(MTLMathMode)mode {
  _mathMode = mode;
  _fastMathEnabled = mode == MTLMathModeFast;
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  MTLCompileOptions* copy = [[MTLCompileOptions alloc] init];
  copy.preprocessorMacros = self.preprocessorMacros;
  copy.mathMode = self.mathMode;
  copy.mathFloatingPointFunctions = self.mathFloatingPointFunctions;
  copy.languageVersion = self.languageVersion;
  return copy;
}
@end

@implementation MTLFunctionConstantValues {
  std::map<NSUInteger, Value> _byIndex;
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  _byIndex[index] = make_value(value, type);
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  MTLFunctionConstantValues* copy = [[MTLFunctionConstantValues alloc] init];
  copy->_byIndex = _byIndex;
  return copy;
}
- (Specialization)valuesForLibrary:(const ShaderLibrary&)library {
  Specialization values;
  for (const FunctionConstant& constant : library.constants) {
    const auto found = _byIndex.find(static_cast<NSUInteger>(constant.index));
    if (found == _byIndex.end()) continue;
    const Value& value = found->second;
    if (value.info.type != constant.type) {
      throw std::runtime_error(std::string("function constant '") + constant.name + "' (index " +
                               std::to_string(constant.index) + ") is not declared as " + value.info.name +
                               ", the type it was set with");
    }
    values.push_back({constant.index, constant.type, value.bits});
  }
  std::sort(values.begin(), values.end(), [](const auto& a, const auto& b) { return a.index < b.index; });
  return values;
}
@end

@implementation EmulatorLibrary {
  id<MTLDevice> _device;
  std::vector<const ShaderLibrary*> _libraries;
  std::set<std::string> _macros;
}
@synthesize device = _device;
@synthesize label = _label;

- (instancetype)initWithDevice:(id<MTLDevice>)device
                     libraries:(std::vector<const ShaderLibrary*>)libraries
                        macros:(std::set<std::string>)macros {
  if ((self = [super init])) {
    _device = device;
    _libraries = std::move(libraries);
    _macros = std::move(macros);
    State::get().count(&metal_emulator::Counters::libraries);
  }
  return self;
}
// Whether the preprocessor left the kernel in the library.
- (BOOL)has:(const Kernel&)kernel {
  return _macros.empty() || !kernel.selected_by || _macros.contains(kernel.selected_by);
}
- (NSArray<NSString*>*)functionNames {
  NSMutableArray<NSString*>* names = [NSMutableArray array];
  for (const ShaderLibrary* library : _libraries) {
    for (const Kernel& kernel : library->kernels)
      if ([self has:kernel]) [names addObject:to_ns(kernel.name)];
  }
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  return [self newFunctionWithName:name constantValues:[[MTLFunctionConstantValues alloc] init] error:nil];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)constantValues
                                 error:(NSError**)error {
  const std::string wanted = to_string(name);
  std::string message = "the library has no function '" + wanted + "'";
  NSInteger code = MTLLibraryErrorFunctionNotFound;
  for (const ShaderLibrary* library : _libraries) {
    for (const Kernel& kernel : library->kernels) {
      if (wanted != kernel.name || ![self has:kernel]) continue;
      try {
        // Before alloc: an exception between alloc and init would leak the object.
        Specialization constants = [constantValues valuesForLibrary:*library];
        return [[EmulatorFunction alloc] initWithDevice:_device
                                                library:*library
                                                 kernel:kernel
                                              constants:std::move(constants)];
      } catch (const std::runtime_error& exception) {
        message = "function '" + wanted + "': " + exception.what();
        code = MTLLibraryErrorCompileFailure;
      }
    }
  }
  if (error) *error = metal_emulator::make_error(MTLLibraryErrorDomain, code, message);
  return nil;
}
@end

@implementation EmulatorFunction {
  id<MTLDevice> _device;
  const ShaderLibrary* _library;
  const Kernel* _kernel;
  Specialization _constants;
}
@synthesize device = _device;
@synthesize label = _label;

- (instancetype)initWithDevice:(id<MTLDevice>)device
                       library:(const ShaderLibrary&)library
                        kernel:(const Kernel&)kernel
                     constants:(Specialization)constants {
  if ((self = [super init])) {
    _device = device;
    _library = &library;
    _kernel = &kernel;
    _constants = std::move(constants);
  }
  return self;
}
- (NSString*)name {
  return to_ns(_kernel->name);
}
- (std::string)identity {
  std::uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (const char c : _library->source) sum = (sum ^ static_cast<unsigned char>(c)) * 1099511628211u;
  std::string text = to_string(_device.name) + "; " + std::to_string(sum) + "; " + _kernel->name;
  for (const auto& constant : _constants)
    text += "; " + std::to_string(constant.index) + "=" + std::to_string(constant.bits);
  return text;
}
- (std::shared_ptr<const Pipeline>)prepare {
  State& state = State::get();
  auto pipeline = state.executor().prepare(*_library, *_kernel, _constants);
  if (pipeline->static_threadgroup_bytes > metal_emulator::kMaxThreadgroupBytes) {
    throw std::runtime_error(std::string("kernel '") + _kernel->name + "' declares " +
                             std::to_string(pipeline->static_threadgroup_bytes) +
                             " bytes of threadgroup memory, over the limit of " +
                             std::to_string(metal_emulator::kMaxThreadgroupBytes));
  }
  const metal_emulator::DeviceLimits limits = state.limits();
  if (limits.aborting_kernels.contains(_kernel->name)) {
    std::fprintf(stderr, "AGX: compiling '%s' failed: the driver aborts\n", _kernel->name);
    std::abort();
  }
  if (limits.broken_kernels.contains(_kernel->name))
    throw std::runtime_error("XPC_ERROR_CONNECTION_INTERRUPTED: the compiler service failed");
  if (!limits.simdgroup_matrix && _library->source.find("simdgroup_matrix") != std::string_view::npos)
    throw std::runtime_error("the GPU has no simdgroup_matrix");
  state.count(&metal_emulator::Counters::pipelines);
  return pipeline;
}
@end

@implementation MTLComputePipelineReflection
@end

@implementation MTLComputePipelineDescriptor
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  MTLComputePipelineDescriptor* copy = [[MTLComputePipelineDescriptor alloc] init];
  copy.label = _label;
  copy.computeFunction = _computeFunction;
  copy.maxTotalThreadsPerThreadgroup = _maxTotalThreadsPerThreadgroup;
  copy.binaryArchives = _binaryArchives;
  return copy;
}
@end

@implementation EmulatorComputePipeline {
  id<MTLDevice> _device;
  NSString* _label;
  NSUInteger _simdWidth;
}
@synthesize device = _device;
@synthesize label = _label;

- (instancetype)initWithDevice:(id<MTLDevice>)device
                      pipeline:(std::shared_ptr<const Pipeline>)pipeline
                    maxThreads:(NSUInteger)maxThreads
                         label:(NSString*)label {
  if ((self = [super init])) {
    _device = device;
    _maxThreads = pipeline->max_threads;
    if (maxThreads > 0) _maxThreads = std::min(_maxThreads, maxThreads);
    const auto limits = metal_emulator::limits();
    if (const auto own = limits.max_threads.find(pipeline->kernel->name); own != limits.max_threads.end())
      _maxThreads = std::min<NSUInteger>(_maxThreads, own->second);
    _simdWidth = limits.simd_width;
    _pipeline = std::move(pipeline);
    _label = [label copy];
  }
  return self;
}
- (const std::shared_ptr<const Pipeline>&)pipeline {
  return _pipeline;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return _maxThreads;
}
- (NSUInteger)threadExecutionWidth {
  return _simdWidth;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return _pipeline->static_threadgroup_bytes;
}
@end
