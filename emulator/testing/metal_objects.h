// Shared by the parts of the test module: Metal's objects as Python sees them.
#pragma once

// Python's headers first: they use names that Foundation defines as macros.
#include <nanobind/nanobind.h>

#import <Metal/Metal.h>

#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "../foundation.h"

namespace metal_testing {

namespace nb = nanobind;

// Metal refused with this reason.
struct MetalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using metal_emulator::AutoreleasePool;
using metal_emulator::to_ns;
using metal_emulator::to_string;

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

// The result of a call that Metal ends on a thread of its own: `start` is given the function to call with it.
template <typename T, typename Start>
T made(const char* call, const Start& start) {
  const auto result = std::make_shared<std::promise<std::pair<T, NSError*>>>();
  start([result](T object, NSError* error) { result->set_value({object, error}); });
  const auto [object, error] = result->get_future().get();
  return require(object, error, call);
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
