// Shared by the parts of the test module: Metal's objects as Python sees them.
#pragma once

// Python's headers first: they use names that Foundation defines as macros.
#include <nanobind/nanobind.h>

#import <Metal/Metal.h>

#include <stdexcept>
#include <string>
#include <tuple>

extern "C" {
void* objc_autoreleasePoolPush();
void objc_autoreleasePoolPop(void* pool);
}

namespace metal_testing {

namespace nb = nanobind;

// Metal refused with this reason.
struct MetalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Unlike @autoreleasepool it is also emptied when an exception leaves its scope.
class AutoreleasePool {
 public:
  AutoreleasePool() : pool_(objc_autoreleasePoolPush()) {}
  ~AutoreleasePool() { objc_autoreleasePoolPop(pool_); }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  void* pool_;
};

inline NSString* to_ns(const std::string& text) {
  return [NSString stringWithUTF8String:text.c_str()];
}
inline std::string to_string(NSString* text) {
  return text ? text.UTF8String : "";
}

using Size = std::tuple<NSUInteger, NSUInteger, NSUInteger>;
inline MTLSize to_mtl(const Size& size) {
  return MTLSizeMake(std::get<0>(size), std::get<1>(size), std::get<2>(size));
}

template <typename T>
T require(T object, NSError* error, const char* call) {
  if (object) return object;
  throw MetalError(std::string(call) + ": " +
                   (error ? to_string(error.localizedDescription) : std::string("returned nil")));
}

// One Python class each. A call that ends in an exception has changed nothing.
struct Device {
  id<MTLDevice> object;
};
struct Buffer {
  id<MTLBuffer> object;
};
struct Fence {
  id<MTLFence> object;
};
struct Library {
  id<MTLLibrary> object;
};
struct Function {
  id<MTLFunction> object;
};
struct Pipeline {
  id<MTLComputePipelineState> object;
};
struct Archive {
  id<MTLBinaryArchive> object;
};
struct ResidencySet {
  id object;  // id<MTLResidencySet>, which older SDKs lack
};
struct Queue {
  id<MTLCommandQueue> object;
};
struct CommandBuffer {
  id<MTLCommandBuffer> object;
};
struct ComputeEncoder {
  id<MTLComputeCommandEncoder> object;
};
struct BlitEncoder {
  id<MTLBlitCommandEncoder> object;
};

// Releases an object within a pool, so that nothing remains in the pool of an outer scope.
template <typename T>
void release(T& self) {
  const AutoreleasePool pool;
  self.object = nil;
}

void bind_device(nb::module_& m);
void bind_commands(nb::module_& m);
void bind_objc_checks(nb::module_& m);

}  // namespace metal_testing
