#include "trial.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "args_layout.h"
#include "device.h"
#include "libraries.h"

namespace metal_prefill::metal {

namespace {

constexpr int kBlock = 8;
constexpr NSUInteger kLanes = 32;

// Whole numbers: operands are exact in half, products and sums in float, but not in half. Row and column
// matter, so that a transposed or misplaced block shows.
int x_at(int row, int column) {
  return (5 * row + 31 * column) % 127 - 63;
}
int w_at(int row, int column) {
  return (7 * row + 29 * column) % 113 - 56;
}

// What a kernel is given, and what it should leave in its output.
struct Trial {
  const char* kernel;
  int x_rows, w_rows, columns;  // of its operands in half precision
  MTLSize groups;
  NSUInteger threads;
  std::vector<std::byte> args;          // bound after the output; empty: it has none
  bool weights_first;                   // the order of the operands' bindings
  std::vector<float> before, expected;  // of the output

  // x w^T, row by row.
  std::vector<float> product() const {
    std::vector<float> results(std::size_t(x_rows) * std::size_t(w_rows));
    for (int i = 0; i < x_rows; ++i)
      for (int j = 0; j < w_rows; ++j)
        for (int k = 0; k < columns; ++k)
          results[std::size_t(i * w_rows + j)] += float(x_at(i, k) * w_at(j, k));
    return results;
  }
};

id<MTLBuffer> make_operand(id<MTLDevice> device, int rows, int columns, int (*at)(int, int)) {
  std::vector<std::uint16_t> values;
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) values.push_back(float_to_half(float(at(i, j))));
  return [device newBufferWithBytes:values.data()
                             length:values.size() * sizeof(std::uint16_t)
                            options:MTLResourceStorageModeShared];
}

std::string failure_of(const Trial& trial, const Libraries& libraries, id<MTLDevice> device,
                       id<MTLCommandQueue> queue) {
  const std::string kernel = std::string("the kernel '") + trial.kernel + "'";
  id<MTLFunction> function = libraries.function(trial.kernel);
  if (!function) return "the shaders have no kernel '" + std::string(trial.kernel) + "'";
  NSError* error = nil;
  id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:function error:&error];
  if (!pipeline) return kernel + " cannot be built: " + describe(error);
  if (pipeline.threadExecutionWidth != kLanes)
    return "its simdgroups have " + std::to_string(pipeline.threadExecutionWidth) + " threads";
  if (pipeline.maxTotalThreadsPerThreadgroup < trial.threads)
    return kernel + " runs with at most " + std::to_string(pipeline.maxTotalThreadsPerThreadgroup) +
           " threads";

  id<MTLBuffer> x = make_operand(device, trial.x_rows, trial.columns, x_at);
  id<MTLBuffer> w = make_operand(device, trial.w_rows, trial.columns, w_at);
  id<MTLBuffer> out = [device newBufferWithBytes:trial.before.data()
                                          length:trial.before.size() * sizeof(float)
                                         options:MTLResourceStorageModeShared];
  id<MTLCommandBuffer> commands = [queue commandBuffer];  // which keeps the buffers
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (!x || !w || !out || !encoder) return "it gave no memory or no encoder";
  [encoder setComputePipelineState:pipeline];
  [encoder setBuffer:trial.weights_first ? w : x offset:0 atIndex:0];
  [encoder setBuffer:trial.weights_first ? x : w offset:0 atIndex:1];
  [encoder setBuffer:out offset:0 atIndex:2];
  if (!trial.args.empty()) [encoder setBytes:trial.args.data() length:trial.args.size() atIndex:3];
  [encoder dispatchThreadgroups:trial.groups threadsPerThreadgroup:MTLSizeMake(trial.threads, 1, 1)];
  [encoder endEncoding];
  [commands commit];
  [commands waitUntilCompleted];
  if (commands.status != MTLCommandBufferStatusCompleted)
    return kernel + " failed: " + describe(commands.error);
  std::vector<float> results(trial.expected.size());
  std::memcpy(results.data(), out.contents, results.size() * sizeof(float));
  for (std::size_t i = 0; i < results.size(); ++i)
    if (results[i] != trial.expected[i])
      return kernel + " is wrong: result " + std::to_string(i) + " is " + std::to_string(results[i]) +
             ", not " + std::to_string(trial.expected[i]);
  return {};
}

// A block, and the sum of the lanes' numbers in each lane.
Trial trial_of_simdgroups() {
  Trial trial{.kernel = "trial",
              .x_rows = kBlock,
              .w_rows = kBlock,
              .columns = kBlock,
              .groups = MTLSizeMake(1, 1, 1),
              .threads = kLanes,
              .args = {},
              .weights_first = false,
              .before = {},
              .expected = {}};
  trial.expected = trial.product();
  trial.expected.insert(trial.expected.end(), kLanes, 0.5f * float(kLanes * (kLanes - 1)));
  trial.before.resize(trial.expected.size());
  return trial;
}

// Two tiles each way, the last of them in part, of more columns than a step has, added to ones.
Trial trial_of_tensors(const char* kernel, int tile_tokens, int tile_rows, int columns) {
  Trial trial{.kernel = kernel,
              .x_rows = tile_tokens + 3,
              .w_rows = tile_rows + 5,
              .columns = columns,
              .groups = MTLSizeMake(2, 2, 1),
              .threads = MATMUL_THREADS,
              .args = std::vector<std::byte>(sizeof(MatmulArgs)),
              .weights_first = true,
              .before = {},
              .expected = {}};
  const MatmulArgs args = {.weights = {.offset = {},
                                       .rows = {u32_t(trial.w_rows)},
                                       .row_bytes = u32_t(std::size_t(columns) * sizeof(std::uint16_t))},
                           .in_dim = u32_t(columns),
                           .out_dim = u32_t(trial.w_rows),
                           .tokens = u32_t(trial.x_rows),
                           .out_stride = u32_t(trial.w_rows),
                           .accumulate = true,
                           .activation = ACTIVATION_SILU};
  std::memcpy(trial.args.data(), &args, sizeof args);
  trial.expected = trial.product();
  trial.before.assign(trial.expected.size(), 1.0f);
  for (float& result : trial.expected) result += 1.0f;
  return trial;
}

}  // namespace

std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    return failure_of(trial_of_simdgroups(), open_trial(device), device, queue);
  } catch (const DeviceError& error) {
    return error.what();
  }
}

TensorFailures failures_of_tensor_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    const Libraries libraries = open_tensors(device, {"f16"});
    const auto failure = [&](const char* kernel, int tokens, int rows, int columns) {
      return failure_of(trial_of_tensors(kernel, tokens, rows, columns), libraries, device, queue);
    };
    constexpr int kEdge = MATMUL_K + kBlock;  // columns whose last step is a part of one
    for (const auto& [kernel, tile] : {std::pair("matmul_tensor_f16_narrow", MATMUL_NARROW_TILE),
                                       std::pair("matmul_tensor_f16_wide", MATMUL_WIDE_TILE)})
      if (std::string why = failure(kernel, tile, tile, kEdge); !why.empty()) return {.any = std::move(why)};
    return {.tall = failure("matmul_tensor_f16_tall", MATMUL_TALL_TOKENS, MATMUL_WIDE_TILE, 2 * MATMUL_K)};
  } catch (const DeviceError& error) {
    return {.any = error.what()};
  }
}

}  // namespace metal_prefill::metal
