// Device, buffers, libraries, functions and pipelines for Python.
#include "metal_objects.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <optional>
#include <vector>

// Tests call both old and new functions without a guard for each call.
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
#pragma clang diagnostic ignored "-Wunguarded-availability-new"

using namespace nanobind::literals;

namespace metal_testing {
namespace {

using ByteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteView = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

MTLResourceOptions storage_options(const std::string& storage) {
  if (storage == "shared") return MTLResourceStorageModeShared;
  if (storage == "private") return MTLResourceStorageModePrivate;
  if (storage == "managed") return 1 << MTLResourceStorageModeShift;  // refused by the emulator
  throw std::invalid_argument("storage is 'shared', 'private' or 'managed', not '" + storage + "'");
}

Buffer require_memory(id<MTLBuffer> buffer) {
  if (!buffer) throw std::bad_alloc();
  return {buffer};
}

Buffer new_buffer(const Device& self, NSUInteger length, const std::string& storage, const std::string& label,
                  bool untracked) {
  MTLResourceOptions options = storage_options(storage);
  if (untracked) options |= MTLResourceHazardTrackingModeUntracked;
  const Buffer buffer = require_memory([self.object newBufferWithLength:length options:options]);
  if (!label.empty()) buffer.object.label = to_ns(label);
  return buffer;
}

Buffer new_buffer_with_bytes(const Device& self, nb::bytes bytes) {
  return require_memory([self.object newBufferWithBytes:bytes.data()
                                                 length:bytes.size()
                                                options:MTLResourceStorageModeShared]);
}

// The buffer keeps the array alive until its deallocator runs.
Buffer new_buffer_no_copy(const Device& self, ByteArray array, NSUInteger offset,
                          std::optional<NSUInteger> length) {
  auto* owner = new nb::object(nb::cast(array));
  const auto release_owner = [owner] {
    const nb::gil_scoped_acquire gil;
    delete owner;
  };
  id<MTLBuffer> buffer = nil;
  try {
    buffer = [self.object newBufferWithBytesNoCopy:array.data() + offset
                                            length:length.value_or(array.size() - offset)
                                           options:MTLResourceStorageModeShared
                                       deallocator:^(void*, NSUInteger) {
                                         release_owner();
                                       }];
  } catch (...) {
    release_owner();
    throw;
  }
  if (!buffer) release_owner();
  return require_memory(buffer);
}

// A view of the contents that keeps the buffer alive.
nb::object contents(const Buffer& self) {
  void* memory = self.object.contents;
  const nb::capsule owner(new Buffer(self),
                          [](void* buffer) noexcept { delete static_cast<Buffer*>(buffer); });
  return nb::cast(ByteView(memory, {self.object.length}, owner));
}

// Without a language version, uses the newest that the system supports.
Library new_library(const Device& self, const std::string& source,
                    const std::map<std::string, std::string>& macros, bool fast_math,
                    std::optional<std::tuple<int, int>> language) {
  MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
  options.fastMathEnabled = fast_math;
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
  if ([options respondsToSelector:@selector(setMathFloatingPointFunctions:)]) {
    options.mathMode = fast_math ? MTLMathModeFast : MTLMathModeSafe;
    options.mathFloatingPointFunctions =
        fast_math ? MTLMathFloatingPointFunctionsFast : MTLMathFloatingPointFunctionsPrecise;
  }
#endif
  if (language)
    options.languageVersion = MTLLanguageVersion((std::get<0>(*language) << 16) + std::get<1>(*language));
  NSMutableDictionary<NSString*, NSObject*>* values = [NSMutableDictionary dictionary];
  for (const auto& [name, value] : macros) values[to_ns(name)] = to_ns(value);
  options.preprocessorMacros = values;
  return made<id<MTLLibrary>>("newLibraryWithSource", [&](auto done) {
    [self.object newLibraryWithSource:to_ns(source)
                              options:options
                    completionHandler:^(id<MTLLibrary> library, NSError* error) {
                      done(library, error);
                    }];
  });
}

Library load_library(const Device& self, const std::string& path) {
  NSError* error = nil;
  id<MTLLibrary> library = [self.object newLibraryWithURL:[NSURL fileURLWithPath:to_ns(path)] error:&error];
  return require(library, error, "newLibraryWithURL");
}

std::vector<std::string> function_names(const Library& self) {
  std::vector<std::string> names;
  for (NSString* name in self.object.functionNames) names.push_back(to_string(name));
  return names;
}

Function new_function(const Library& self, const std::string& name) {
  id<MTLFunction> function = [self.object newFunctionWithName:to_ns(name)];
  if (!function) throw MetalError("the library has no function '" + name + "'");
  return {function};
}

// Without a path, creates an empty archive.
Archive new_archive(const Device& self, const std::optional<std::string>& path) {
  MTLBinaryArchiveDescriptor* descriptor = [[MTLBinaryArchiveDescriptor alloc] init];
  if (path) descriptor.url = [NSURL fileURLWithPath:to_ns(*path)];
  NSError* error = nil;
  id<MTLBinaryArchive> archive = [self.object newBinaryArchiveWithDescriptor:descriptor error:&error];
  return require(archive, error, "newBinaryArchive");
}

void require_done(BOOL done, NSError* error, const char* call) {
  if (done) return;
  throw MetalError(std::string(call) + ": " + to_string(error.localizedDescription));
}

MTLComputePipelineDescriptor* descriptor_of(const Function& function) {
  MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
  descriptor.computeFunction = function.object;
  return descriptor;
}

void add_to_archive(const Archive& self, const Function& function) {
  NSError* error = nil;
  const BOOL done = [self.object addComputePipelineFunctionsWithDescriptor:descriptor_of(function)
                                                                     error:&error];
  require_done(done, error, "addComputePipelineFunctions");
}

void write_archive(const Archive& self, const std::string& path) {
  NSError* error = nil;
  const BOOL done = [self.object serializeToURL:[NSURL fileURLWithPath:to_ns(path)] error:&error];
  require_done(done, error, "serialize");
}

Pipeline make_pipeline(const Device& self, MTLComputePipelineDescriptor* descriptor,
                       MTLPipelineOption options) {
  return made<id<MTLComputePipelineState>>("newComputePipelineState", [&](auto done) {
    [self.object newComputePipelineStateWithDescriptor:descriptor
                                               options:options
                                     completionHandler:^(id<MTLComputePipelineState> pipeline,
                                                         MTLComputePipelineReflection*, NSError* error) {
                                       done(pipeline, error);
                                     }];
  });
}

Pipeline archived_pipeline(const Device& self, const Function& function, const Archive& archive) {
  MTLComputePipelineDescriptor* descriptor = descriptor_of(function);
  descriptor.binaryArchives = @[ archive.object ];
  return make_pipeline(self, descriptor, MTLPipelineOptionFailOnBinaryArchiveMiss);
}

#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
id<MTLResidencySet> set_of(const ResidencySet& self) {
  return self.object;
}

void bind_residency(nb::module_& m, nb::class_<Device>& device) {
  nb::class_<ResidencySet>(m, "ResidencySet")
      .def("add",
           [](const ResidencySet& self, const Buffer& buffer) { [set_of(self) addAllocation:buffer.object]; })
      .def("remove", [](const ResidencySet& self,
                        const Buffer& buffer) { [set_of(self) removeAllocation:buffer.object]; })
      .def("commit", [](const ResidencySet& self) { [set_of(self) commit]; })
      .def("request", [](const ResidencySet& self) { [set_of(self) requestResidency]; })
      .def("end", [](const ResidencySet& self) { [set_of(self) endResidency]; });
  device.def(
      "new_residency_set",
      [](const Device& self) {
        NSError* error = nil;
        id set = [self.object newResidencySetWithDescriptor:[[MTLResidencySetDescriptor alloc] init]
                                                      error:&error];
        return require(set, error, "newResidencySet");
      },
      kPool);
}
#else
void bind_residency(nb::module_&, nb::class_<Device>&) {}
#endif

Pipeline new_pipeline(const Device& self, const Function& function, NSUInteger max_threads) {
  MTLComputePipelineDescriptor* descriptor = descriptor_of(function);
  descriptor.maxTotalThreadsPerThreadgroup = max_threads;
  return make_pipeline(self, descriptor, MTLPipelineOptionNone);
}

}  // namespace

void bind_device(nb::module_& m) {
  bind_object<id<MTLBuffer>>(m, "Buffer")
      .def_prop_ro("length", [](const Buffer& self) { return self.object.length; })
      .def_prop_ro("contents", &contents, nb::for_getter(nb::sig("def contents(self) -> object")),
                   "The bytes as a NumPy array that stands on them; None for Private storage.");
  bind_object<id<MTLFence>>(m, "Fence");
  bind_object<id<MTLFunction>>(m, "Function");
  bind_object<id<MTLLibrary>>(m, "Library")
      .def_prop_ro("function_names", &function_names, kPool)
      .def("new_function", &new_function, "name"_a, kPool);
  bind_object<id<MTLComputePipelineState>>(m, "Pipeline")
      .def_prop_ro("max_threads",
                   [](const Pipeline& self) { return self.object.maxTotalThreadsPerThreadgroup; })
      .def_prop_ro("execution_width", [](const Pipeline& self) { return self.object.threadExecutionWidth; });
  bind_object<id<MTLBinaryArchive>>(m, "Archive")
      .def("add", &add_to_archive, "function"_a, kPool)
      .def("write", &write_archive, "path"_a, kPool);

  auto device = bind_object<id<MTLDevice>>(m, "Device");
  bind_residency(m, device);
  device
      .def(
          "__init__",
          [](Device* self) {
            new (self) Device(require(MTLCreateSystemDefaultDevice(), nil, "MTLCreateSystemDefaultDevice"));
          },
          kPool)
      .def_prop_ro(
          "name", [](const Device& self) { return to_string(self.object.name); }, kPool)
      .def_prop_ro("max_buffer_length", [](const Device& self) { return self.object.maxBufferLength; })
      .def("supports_family",
           [](const Device& self, long family) {
             return static_cast<bool>([self.object supportsFamily:static_cast<MTLGPUFamily>(family)]);
           })
      .def("new_buffer", &new_buffer, "length"_a, "storage"_a = "shared", "label"_a = "",
           "untracked"_a = false, kPool)
      .def("new_buffer_with_bytes", &new_buffer_with_bytes, "data"_a, kPool)
      .def("new_buffer_no_copy", &new_buffer_no_copy, "array"_a, "offset"_a = 0, "length"_a = nb::none(),
           kPool)
      .def("new_library", &new_library, "source"_a, "macros"_a = std::map<std::string, std::string>(),
           "fast_math"_a = true, "language"_a = nb::none(), kWithoutGil)
      .def(
          "new_fence", [](const Device& self) { return require([self.object newFence], nil, "newFence"); },
          kPool)
      .def("load_library", &load_library, "path"_a, kWithoutGil)
      .def("new_pipeline", &new_pipeline, "function"_a, "max_threads"_a = 0, kWithoutGil)
      .def("new_archive", &new_archive, "path"_a = nb::none(), kPool)
      .def("archived_pipeline", &archived_pipeline, "function"_a, "archive"_a, kWithoutGil,
           "From the archive alone.")
      .def(
          "new_queue",
          [](const Device& self) { return require([self.object newCommandQueue], nil, "newCommandQueue"); },
          kPool);
}

}  // namespace metal_testing
