#include "trial.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <vector>

#include "device.h"
#include "libraries.h"
#include "waits.h"

namespace metal_prefill::metal {

namespace {

constexpr int kBlock = 8;
constexpr NSUInteger kLanes = 32;

// Integers: operands are exact in half, products and sums in float, but not in half. Values depend on row and
// column, so that a transposed or misplaced block is detected.
int x_at(int row, int column) {
  return (5 * row + 31 * column) % 127 - 63;
}
int w_at(int row, int column) {
  return (7 * row + 29 * column) % 113 - 56;
}

std::vector<std::uint16_t> operand(int (*at)(int, int)) {
  std::vector<std::uint16_t> values;
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kBlock; ++j) values.push_back(float_to_half(float(at(i, j))));
  return values;
}

// A block, the product x w^T; the sum of the lane indices in each lane; and the block minus the maximum and
// minus the sum of each row.
std::vector<float> expected_results() {
  std::vector<float> block(kBlock * kBlock);
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kBlock; ++j)
      for (int k = 0; k < kBlock; ++k) block[std::size_t(i * kBlock + j)] += float(x_at(i, k) * w_at(j, k));
  std::vector<float> expected = block, without_sums;
  expected.insert(expected.end(), kLanes, 0.5f * float(kLanes * (kLanes - 1)));
  for (auto row = block.begin(); row != block.end(); row += kBlock) {
    const float largest = *std::max_element(row, row + kBlock),
                sum = std::accumulate(row, row + kBlock, 0.0f);
    std::transform(row, row + kBlock, std::back_inserter(expected), [&](float x) { return x - largest; });
    std::transform(row, row + kBlock, std::back_inserter(without_sums), [&](float x) { return x - sum; });
  }
  expected.insert(expected.end(), without_sums.begin(), without_sums.end());
  return expected;
}

struct Built {
  id<MTLComputePipelineState> pipeline;  // null if there is an error
  NSError* error;
};

Built build(id<MTLDevice> device) {
  id<MTLFunction> function = open_trial(device).function("trial");
  return run_concurrently<Built>(1, [&](std::size_t, auto done) {
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
    descriptor.computeFunction = function;
    [device newComputePipelineStateWithDescriptor:descriptor
                                          options:MTLPipelineOptionNone
                                completionHandler:^(id<MTLComputePipelineState> built,
                                                    MTLComputePipelineReflection*, NSError* why) {
                                  done({built, why});
                                }];
  })[0];
}

std::string failure_of(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  const auto [pipeline, error] = build(device);
  if (!pipeline) return "the kernel 'trial' cannot be built: " + describe(error);
  if (pipeline.threadExecutionWidth != kLanes)
    return "its simdgroups have " + std::to_string(pipeline.threadExecutionWidth) + " threads";

  const std::vector<float> expected = expected_results();
  const auto shared = [&](const auto& values) {
    return [device newBufferWithBytes:values.data()
                               length:values.size() * sizeof values[0]
                              options:MTLResourceStorageModeShared];
  };
  id<MTLBuffer> results = shared(std::vector<float>(expected.size()));
  id<MTLBuffer> buffers[] = {shared(operand(x_at)), shared(operand(w_at)), results};
  for (id<MTLBuffer> buffer : buffers)
    if (!buffer) return "it gave no memory";
  id<MTLCommandBuffer> commands = [queue commandBuffer];  // keeps the buffers
  commands.label = to_ns("the kernel 'trial'");
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (!encoder) return "it gave no encoder";
  [encoder setComputePipelineState:pipeline];
  for (std::size_t i = 0; i < std::size(buffers); ++i) [encoder setBuffer:buffers[i] offset:0 atIndex:i];
  [encoder dispatchThreadgroups:MTLSizeMake(1, 1, 1) threadsPerThreadgroup:MTLSizeMake(kLanes, 1, 1)];
  [encoder endEncoding];
  [commands commit];
  wait_for(commands, Interrupts::kIgnored);
  if (commands.status != MTLCommandBufferStatusCompleted)
    return "the kernel 'trial' failed: " + describe(commands.error);
  const auto* found = static_cast<const float*>(results.contents);
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (found[i] != expected[i])
      return "the kernel 'trial' is wrong: result " + std::to_string(i) + " is " + std::to_string(found[i]) +
             ", not " + std::to_string(expected[i]);
  return {};
}

}  // namespace

std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    return failure_of(device, queue);
  } catch (const DeviceError& error) {
    return error.what();
  }
}

}  // namespace metal_prefill::metal
