// Metal's objects for Python, shared by the parts of the test module.
#pragma once

// Python's headers come first: they use names that Foundation defines as macros.
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

// Metal refused a request for this reason.
struct MetalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using metal_emulator::AutoreleasePool;
using metal_emulator::to_ns;
using metal_emulator::to_string;

// Guards calls that autorelease objects, so that nothing remains in the pool of an outer scope.
inline constexpr nb::call_guard<AutoreleasePool> kPool;
inline constexpr nb::call_guard<AutoreleasePool, nb::gil_scoped_release> kWithoutGil;

using Size = std::tuple<NSUInteger, NSUInteger, NSUInteger>;
inline MTLSize to_mtl(const Size& size) {
  return MTLSizeMake(std::get<0>(size), std::get<1>(size), std::get<2>(size));
}

// A Metal object, with one Python class per protocol. A call that throws has changed nothing.
template <typename T>
struct Object {
  T object;
};
using Device = Object<id<MTLDevice>>;
using Buffer = Object<id<MTLBuffer>>;
using Fence = Object<id<MTLFence>>;
using Library = Object<id<MTLLibrary>>;
using Function = Object<id<MTLFunction>>;
using Pipeline = Object<id<MTLComputePipelineState>>;
using Archive = Object<id<MTLBinaryArchive>>;
using ResidencySet = Object<id>;  // id<MTLResidencySet>, which older SDKs lack
using Queue = Object<id<MTLCommandQueue>>;
using CommandBuffer = Object<id<MTLCommandBuffer>>;
using ComputeEncoder = Object<id<MTLComputeCommandEncoder>>;
using BlitEncoder = Object<id<MTLBlitCommandEncoder>>;

template <typename T>
Object<T> require(T object, NSError* error, const char* call) {
  if (object) return {object};
  throw MetalError(std::string(call) + ": " +
                   (error ? to_string(error.localizedDescription) : std::string("returned nil")));
}

// Returns the result of a call that Metal completes on its own thread. `start` takes the completion handler.
template <typename T, typename Start>
Object<T> made(const char* call, const Start& start) {
  const auto result = std::make_shared<std::promise<std::pair<T, NSError*>>>();
  start([result](T object, NSError* error) { result->set_value({object, error}); });
  // A shared future keeps the object: if the handler leaks what it has captured, a test finds the object
  // alive.
  const auto [object, error] = result->get_future().share().get();
  return require(object, error, call);
}

// Adds `release`, which releases the object even if Python still refers to it.
template <typename T>
nb::class_<Object<T>> bind_object(nb::module_& m, const char* name) {
  return nb::class_<Object<T>>(m, name).def("release", [](Object<T>& self) { self.object = nil; }, kPool);
}

void bind_device(nb::module_& m);
void bind_commands(nb::module_& m);

}  // namespace metal_testing
