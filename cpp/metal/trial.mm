#include "trial.h"

#include <array>
#include <cstdint>
#include <cstring>

#include "device.h"
#include "libraries.h"

namespace metal_prefill::metal {

namespace {

constexpr int kBlock = 8;
constexpr NSUInteger kLanes = 32;

// Small whole numbers: every product and sum is exact in half and float. Row and column matter, so that a
// transposed block shows.
int x_at(int row, int column) {
  return row - 2 * column + 3;
}
int w_at(int row, int column) {
  return 3 * row + column - 5;
}

using Expected = std::array<float, kBlock * kBlock + kLanes>;

Expected expected_results() {
  Expected results{};
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kBlock; ++j)
      for (int k = 0; k < kBlock; ++k) results[std::size_t(i * kBlock + j)] += float(x_at(i, k) * w_at(j, k));
  for (NSUInteger lane = 0; lane < kLanes; ++lane)
    results[kBlock * kBlock + lane] = 0.5f * float(kLanes * (kLanes - 1));
  return results;
}

id<MTLBuffer> make_block(id<MTLDevice> device, int (*at)(int, int)) {
  std::array<std::uint16_t, std::size_t(kBlock) * kBlock> values{};
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kBlock; ++j) values[std::size_t(i * kBlock + j)] = float_to_half(float(at(i, j)));
  return [device newBufferWithBytes:values.data() length:sizeof values options:MTLResourceStorageModeShared];
}

std::string run(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  id<MTLFunction> function = open_trial(device).function("trial");
  if (!function) return "the shaders have no kernel 'trial'";
  NSError* error = nil;
  id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:function error:&error];
  if (!pipeline) return "the kernel 'trial' cannot be built: " + describe(error);
  if (pipeline.threadExecutionWidth != kLanes)
    return "its simdgroups have " + std::to_string(pipeline.threadExecutionWidth) + " threads";

  const Expected expected = expected_results();
  id<MTLBuffer> out = [device newBufferWithLength:sizeof expected options:MTLResourceStorageModeShared];
  id<MTLCommandBuffer> commands = [queue commandBuffer];  // which keeps the buffers
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (!out || !encoder) return "it gave no memory or no encoder";
  [encoder setComputePipelineState:pipeline];
  [encoder setBuffer:make_block(device, x_at) offset:0 atIndex:0];
  [encoder setBuffer:make_block(device, w_at) offset:0 atIndex:1];
  [encoder setBuffer:out offset:0 atIndex:2];
  [encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(kLanes, 1, 1)];
  [encoder endEncoding];
  [commands commit];
  [commands waitUntilCompleted];
  if (commands.status != MTLCommandBufferStatusCompleted)
    return "the kernel 'trial' failed: " + describe(commands.error);
  Expected results;
  std::memcpy(results.data(), out.contents, sizeof results);
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (results[i] != expected[i])
      return "the kernel 'trial' is wrong: result " + std::to_string(i) + " is " +
             std::to_string(results[i]) + ", not " + std::to_string(expected[i]);
  return {};
}

}  // namespace

std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    return run(device, queue);
  } catch (const DeviceError& error) {
    return error.what();
  }
}

}  // namespace metal_prefill::metal
