#include "metal_encoder.h"

#include "recorder.h"

namespace metal_prefill::metal {

MetalEncoder::MetalEncoder(id<MTLCommandBuffer> commands, const Device& device, const Kernels& kernels)
    : Encoder(device.tuning(), kernels.cache()),
      encoder_([commands computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent]),
      device_(device),
      kernels_(kernels) {
  if (!encoder_)
    throw DeviceError("the GPU gave no compute encoder for " + std::string(commands.label.UTF8String));
}

MetalEncoder::~MetalEncoder() {
  [encoder_ endEncoding];
}

void MetalEncoder::encode(const Step& step) {
  // Not retained for every message, since every dispatch of every token comes through here.
  __unsafe_unretained const id<MTLComputeCommandEncoder> encoder = encoder_;
  if (step.after_barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  [encoder setComputePipelineState:kernels_.pipeline(step.kernel)];
  NSUInteger index = 0;
  for (const View& view : step.buffers) {
    __unsafe_unretained const id<MTLBuffer> buffer = buffer_of(view);
    [encoder setBuffer:buffer offset:view.offset atIndex:index++];
  }
  [encoder setBytes:step.args length:step.layout.bytes atIndex:index];
  const Grid& grid = step.grid;
  if (grid.threadgroup_bytes > 0) [encoder setThreadgroupMemoryLength:grid.threadgroup_bytes atIndex:0];
  [encoder dispatchThreadgroups:MTLSizeMake(grid.x, grid.y, grid.z)
          threadsPerThreadgroup:MTLSizeMake(grid.threads, 1, 1)];
  device_.count_dispatch();
}

TracingEncoder::TracingEncoder(const Device& device, const Kernels& kernels, Trace& trace)
    : Encoder(device.tuning(), kernels.cache()), device_(device), kernels_(kernels), trace_(trace) {}

void TracingEncoder::encode(const Step& step) {
  const AutoreleasePool pool;
  Dispatch noted = describe(step, cache());
  id<MTLCommandBuffer> commands = device_.command_buffer(noted.kernel);
  {
    MetalEncoder alone(commands, device_, kernels_);
    Step first = step;
    first.after_barrier = false;
    alone.encode(first);
  }
  device_.run(commands);
  noted.start = commands.GPUStartTime;
  noted.end = commands.GPUEndTime;
  trace_.dispatches.push_back(std::move(noted));
}

}  // namespace metal_prefill::metal
