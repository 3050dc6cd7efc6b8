// Queues, command buffers and encoders for Python.
#include "metal_objects.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

using namespace nanobind::literals;

namespace metal_testing {
namespace {

const char* status_name(const CommandBuffer& self) {
  switch (self.object.status) {
    case MTLCommandBufferStatusNotEnqueued:
      return "not enqueued";
    case MTLCommandBufferStatusCompleted:
      return "completed";
    case MTLCommandBufferStatusError:
      return "error";
    default:
      return "in flight";
  }
}

CommandBuffer new_command_buffer(const Queue& self, bool retained) {
  id<MTLCommandBuffer> buffer =
      retained ? [self.object commandBuffer] : [self.object commandBufferWithUnretainedReferences];
  return require(buffer, nil, "commandBuffer");
}

ComputeEncoder compute_encoder(const CommandBuffer& self, bool concurrent) {
  const MTLDispatchType type = concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
  return require([self.object computeCommandEncoderWithDispatchType:type], nil, "computeCommandEncoder");
}

void set_buffer(const ComputeEncoder& self, NSUInteger index, const Buffer* buffer, NSUInteger offset) {
  [self.object setBuffer:buffer ? buffer->object : nil offset:offset atIndex:index];
}

void bind_command_buffer(nb::module_& m) {
  bind_object<id<MTLCommandBuffer>>(m, "CommandBuffer")
      .def_prop_ro("status", &status_name)
      .def_prop_ro(
          "error",
          [](const CommandBuffer& self) { return to_string(self.object.error.localizedDescription); }, kPool)
      .def_prop_ro("gpu_start", [](const CommandBuffer& self) { return self.object.GPUStartTime; })
      .def_prop_ro("gpu_end", [](const CommandBuffer& self) { return self.object.GPUEndTime; })
      .def(
          "commit", [](const CommandBuffer& self) { [self.object commit]; }, kWithoutGil)
      .def(
          "wait", [](const CommandBuffer& self) { [self.object waitUntilCompleted]; }, kWithoutGil)
      .def("compute_encoder", &compute_encoder, "concurrent"_a = false, kPool)
      .def(
          "blit_encoder",
          [](const CommandBuffer& self) {
            return require([self.object blitCommandEncoder], nil, "blitCommandEncoder");
          },
          kPool);
}

// An encoder with the calls that all encoders have.
template <typename T>
nb::class_<Object<T>> bind_encoder(nb::module_& m, const char* name) {
  using Encoder = Object<T>;
  return bind_object<T>(m, name)
      .def(
          "wait_for_fence",
          [](const Encoder& self, const Fence& fence) { [self.object waitForFence:fence.object]; }, kPool)
      .def(
          "update_fence",
          [](const Encoder& self, const Fence& fence) { [self.object updateFence:fence.object]; }, kPool)
      .def("end", [](const Encoder& self) { [self.object endEncoding]; });
}

void bind_encoders(nb::module_& m) {
  bind_encoder<id<MTLComputeCommandEncoder>>(m, "ComputeEncoder")
      .def("set_pipeline",
           [](const ComputeEncoder& self, const Pipeline& pipeline) {
             [self.object setComputePipelineState:pipeline.object];
           })
      .def("set_buffer", &set_buffer, "index"_a, "buffer"_a.none(), "offset"_a = 0, kPool)
      .def(
          "set_bytes",
          [](const ComputeEncoder& self, NSUInteger index, nb::bytes bytes) {
            [self.object setBytes:bytes.data() length:bytes.size() atIndex:index];
          },
          "index"_a, "data"_a)
      .def(
          "set_threadgroup_memory",
          [](const ComputeEncoder& self, NSUInteger index, NSUInteger length) {
            [self.object setThreadgroupMemoryLength:length atIndex:index];
          },
          "index"_a, "length"_a)
      .def(
          "dispatch_threadgroups",
          [](const ComputeEncoder& self, const Size& groups, const Size& threads) {
            [self.object dispatchThreadgroups:to_mtl(groups) threadsPerThreadgroup:to_mtl(threads)];
          },
          "groups"_a, "threads"_a, kPool)
      .def("barrier",
           [](const ComputeEncoder& self) { [self.object memoryBarrierWithScope:MTLBarrierScopeBuffers]; });
  bind_encoder<id<MTLBlitCommandEncoder>>(m, "BlitEncoder")
      .def(
          "copy",
          [](const BlitEncoder& self, const Buffer& source, NSUInteger source_offset,
             const Buffer& destination, NSUInteger destination_offset, NSUInteger size) {
            [self.object copyFromBuffer:source.object
                           sourceOffset:source_offset
                               toBuffer:destination.object
                      destinationOffset:destination_offset
                                   size:size];
          },
          "source"_a, "source_offset"_a, "destination"_a, "destination_offset"_a, "size"_a)
      .def(
          "fill",
          [](const BlitEncoder& self, const Buffer& buffer, NSUInteger offset, NSUInteger length,
             std::uint8_t value) {
            [self.object fillBuffer:buffer.object range:NSMakeRange(offset, length) value:value];
          },
          "buffer"_a, "offset"_a, "length"_a, "value"_a);
}

}  // namespace

void bind_commands(nb::module_& m) {
  bind_object<id<MTLCommandQueue>>(m, "Queue")
      .def("command_buffer", &new_command_buffer, "retained"_a = true, kWithoutGil);
  bind_command_buffer(m);
  bind_encoders(m);
}

}  // namespace metal_testing
