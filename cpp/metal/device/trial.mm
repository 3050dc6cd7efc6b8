#include "trial.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <optional>
#include <system_error>
#include <vector>

#include "../../../shaders/attention.h"
#include "../plan/args_layout.h"
#include "../plan/shader_language.h"
#include "checksum.h"
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

using Bytes = std::vector<std::byte>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The inputs of a kernel, and the output that it should produce.
struct Trial {
  const char* kernel;
  MTLSize groups;
  NSUInteger threads;
  std::vector<Bytes> buffers;  // by binding
  std::size_t output;          // the binding of the results
  Bytes args;                  // bound after the buffers; empty if there are none
  Bytes expected;              // expected results
  bool half_results = false;   // whether results are half rather than float
};

float result_at(const void* results, bool half, std::size_t i) {
  if (half) return half_to_float(static_cast<const std::uint16_t*>(results)[i]);
  return static_cast<const float*>(results)[i];
}

std::string failure_of(const Trial& trial, const Libraries& libraries, id<MTLDevice> device,
                       id<MTLCommandQueue> queue) {
  const std::string kernel = std::string("the kernel '") + trial.kernel + "'";
  id<MTLFunction> function = libraries.function(trial.kernel);
  if (!function) return "the shaders have no kernel '" + std::string(trial.kernel) + "'";
  struct Result {
    id<MTLComputePipelineState> pipeline;
    NSError* error;
  };
  const auto [pipeline, error] = run_concurrently<Result>(1, [&](std::size_t, auto done) {
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
    descriptor.computeFunction = function;
    [device newComputePipelineStateWithDescriptor:descriptor
                                          options:MTLPipelineOptionNone
                                completionHandler:^(id<MTLComputePipelineState> built,
                                                    MTLComputePipelineReflection*, NSError* why) {
                                  done({built, why});
                                }];
  })[0];
  if (!pipeline) return kernel + " cannot be built: " + describe(error);
  if (pipeline.threadExecutionWidth != kLanes)
    return "its simdgroups have " + std::to_string(pipeline.threadExecutionWidth) + " threads";
  if (pipeline.maxTotalThreadsPerThreadgroup < trial.threads)
    return kernel + " runs with at most " + std::to_string(pipeline.maxTotalThreadsPerThreadgroup) +
           " threads";

  std::vector<id<MTLBuffer>> buffers;
  for (const Bytes& bytes : trial.buffers) {
    buffers.push_back([device newBufferWithBytes:bytes.data()
                                          length:bytes.size()
                                         options:MTLResourceStorageModeShared]);
    if (!buffers.back()) return "it gave no memory";
  }
  id<MTLCommandBuffer> commands = [queue commandBuffer];  // keeps the buffers
  commands.label = to_ns(kernel);
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (!encoder) return "it gave no encoder";
  [encoder setComputePipelineState:pipeline];
  for (std::size_t i = 0; i < buffers.size(); ++i) [encoder setBuffer:buffers[i] offset:0 atIndex:i];
  if (!trial.args.empty())
    [encoder setBytes:trial.args.data() length:trial.args.size() atIndex:buffers.size()];
  [encoder dispatchThreadgroups:trial.groups threadsPerThreadgroup:MTLSizeMake(trial.threads, 1, 1)];
  [encoder endEncoding];
  [commands commit];
  wait_for(commands, Interrupts::kIgnored);
  if (commands.status != MTLCommandBufferStatusCompleted)
    return kernel + " failed: " + describe(commands.error);
  const void* results = buffers[trial.output].contents;
  const std::size_t size = trial.half_results ? sizeof(std::uint16_t) : sizeof(float);
  for (std::size_t i = 0; i < trial.expected.size() / size; ++i) {
    const float found = result_at(results, trial.half_results, i);
    const float expected = result_at(trial.expected.data(), trial.half_results, i);
    if (found != expected)
      return kernel + " is wrong: result " + std::to_string(i) + " is " + std::to_string(found) + ", not " +
             std::to_string(expected);
  }
  return {};
}

Bytes operand(int rows, int columns, int (*at)(int, int)) {
  std::vector<std::uint16_t> values;
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) values.push_back(float_to_half(float(at(i, j))));
  return bytes_of(values);
}

// Computes x w^T + addend, row by row.
std::vector<float> product(int x_rows, int w_rows, int columns, float addend) {
  std::vector<float> results(std::size_t(x_rows) * std::size_t(w_rows), addend);
  for (int i = 0; i < x_rows; ++i)
    for (int j = 0; j < w_rows; ++j)
      for (int k = 0; k < columns; ++k)
        results[std::size_t(i * w_rows + j)] += float(x_at(i, k) * w_at(j, k));
  return results;
}

// Expects a block, the sum of the lane indices in each lane, and the block minus the maximum and minus the
// sum of each row.
Trial trial_of_simdgroups() {
  const std::vector<float> block = product(kBlock, kBlock, kBlock, 0.0f);
  std::vector<float> expected = block, without_sums;
  expected.insert(expected.end(), kLanes, 0.5f * float(kLanes * (kLanes - 1)));
  for (auto row = block.begin(); row != block.end(); row += kBlock) {
    const float largest = *std::max_element(row, row + kBlock),
                sum = std::accumulate(row, row + kBlock, 0.0f);
    std::transform(row, row + kBlock, std::back_inserter(expected), [&](float x) { return x - largest; });
    std::transform(row, row + kBlock, std::back_inserter(without_sums), [&](float x) { return x - sum; });
  }
  expected.insert(expected.end(), without_sums.begin(), without_sums.end());
  return {.kernel = "trial",
          .groups = MTLSizeMake(1, 1, 1),
          .threads = kLanes,
          .buffers = {operand(kBlock, kBlock, x_at), operand(kBlock, kBlock, w_at),
                      Bytes(expected.size() * sizeof(float))},
          .output = 2,
          .args = {},
          .expected = bytes_of(expected)};
}

// Two tiles in each dimension, the last ones partial, with more columns than one step, added to ones.
Trial trial_of_tensors(const char* kernel, int tile_tokens, int tile_rows, int columns) {
  const int tokens = tile_tokens + 3, rows = tile_rows + 5;
  const MatmulArgs args = {.weights = {.offset = {},
                                       .rows = {u32_t(rows)},
                                       .row_bytes = u32_t(std::size_t(columns) * sizeof(std::uint16_t))},
                           .in_dim = u32_t(columns),
                           .out_dim = u32_t(rows),
                           .tokens = u32_t(tokens),
                           .out_stride = u32_t(rows),
                           .accumulate = true,
                           .activation = ACTIVATION_SILU};
  const std::vector<float> expected = product(tokens, rows, columns, 1.0f);
  return {.kernel = kernel,
          .groups = MTLSizeMake(2, 2, 1),
          .threads = MATMUL_THREADS,
          .buffers = {operand(rows, columns, w_at), operand(tokens, columns, x_at),
                      bytes_of(std::vector<float>(expected.size(), 1.0f))},
          .output = 2,
          .args = bytes_of(std::vector{args}),
          .expected = bytes_of(expected)};
}

// Attention that finds one key per row: its score exceeds the others by so much that their weights are
// exactly 0, and the result is its value. Covers two tiles, two unordered pages, and keys of earlier chunks.
// The key after a row's own would exceed all others if it were seen; keys after the last one are NaN.
Trial trial_of_attention(const char* kernel, int dims) {
  constexpr int kHeads = 3, kTokens = 40, kPosition = 30, kEnd = kPosition + kTokens;
  constexpr int kRows = kHeads * kTokens, kPool = 2 * PAGE_POSITIONS;
  constexpr int kDistinct = 64;  // keys with their own dimension; others repeat the first ones
  static_assert(kEnd < kPool && kEnd > PAGE_POSITIONS && kRows > ATTENTION_TENSOR_ROWS);
  const auto at = [&](int row, int d) { return std::size_t(row * dims + d); };
  const auto place = [](int key) { return (key + PAGE_POSITIONS) % kPool; };
  constexpr std::uint16_t kNotANumber = 0x7e00;
  std::vector<std::uint16_t> keys(at(kPool, 0), kNotANumber), values = keys, expected(at(kRows, 0));
  std::vector<float> q(at(kRows, 0));
  for (int key = 0; key < kEnd; ++key)
    for (int d = 0; d < dims; ++d) {
      keys[at(place(key), d)] = float_to_half(d == key % kDistinct ? 64.0f : 0.0f);
      values[at(place(key), d)] = float_to_half(float(w_at(key, d)));
    }
  for (int row = 0; row < kRows; ++row) {
    constexpr int kFirst = kEnd - kDistinct;  // first of the keys that are not repeated
    const int position = kPosition + row / kHeads, after = position + 1;
    const int wanted = std::min(kFirst + 11 * row % (position - kFirst), kDistinct - 1);
    q[at(row, wanted)] = 64.0f;
    q[at(row, after % kDistinct)] = 128.0f;
    const int found = after < kDistinct ? wanted : after % kDistinct;  // the key that the next one repeats
    for (int d = 0; d < dims; ++d) expected[at(row, d)] = float_to_half(float(w_at(found, d)));
  }
  std::vector<AttentionTile> tiles;
  for (int first = 0; first < kRows; first += ATTENTION_TENSOR_ROWS)
    tiles.push_back({0, kTokens, kPosition, 0, u32_t(first), kEnd});
  const AttentionArgs args = {.n_heads = kHeads,
                              .n_kv_heads = 1,
                              .key_dim = u32_t(dims),
                              .value_dim = u32_t(dims),
                              .q_stride = u32_t(kHeads * dims),
                              .page_stride = u32_t(PAGE_POSITIONS * dims),
                              .window = 0,
                              .both_ways = false,
                              .splits = 1,
                              .tiles = u32_t(tiles.size()),
                              .scale = 1.0f,
                              .alibi_heads = 0,
                              .max_alibi_bias = 0.0f,
                              .position_bias = false,
                              .added_keys = 0,
                              .query_step = u32_t(dims),
                              .score_cap = 0.0f,
                              .has_sinks = false};
  return {.kernel = kernel,
          .groups = MTLSizeMake(tiles.size(), 1, 1),
          .threads = MATMUL_THREADS,
          .buffers = {bytes_of(q), bytes_of(tiles), bytes_of(std::vector<u32_t>{1, 0}), bytes_of(keys),
                      bytes_of(values), Bytes(sizeof(float)), Bytes(sizeof(float)),
                      Bytes(expected.size() * sizeof(std::uint16_t))},
          .output = 7,
          .args = bytes_of(std::vector{args}),
          .expected = bytes_of(expected),
          .half_results = true};
}

std::string failure_of_attention_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    const Libraries libraries =
        open_tensors(device, kAttentionTensorSource, {"attention_tensor_f16_64", "attention_tensor_f16_128"});
    for (const auto& [kernel, dims] :
         {std::pair("attention_tensor_f16_64", 64), std::pair("attention_tensor_f16_128", 128)})
      if (std::string why = failure_of(trial_of_attention(kernel, dims), libraries, device, queue);
          !why.empty())
        return why;
    return {};
  } catch (const DeviceError& error) {
    return error.what();
  }
}

TensorFailures failures_of_tensor_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    const Libraries libraries = open_tensors(device, kMatmulTensorSource, {"f16"});
    const auto failure = [&](const char* kernel, int tokens, int rows, int columns) {
      return failure_of(trial_of_tensors(kernel, tokens, rows, columns), libraries, device, queue);
    };
    constexpr int kEdge = MATMUL_K + kBlock;  // columns with a partial last step
    for (const auto& [kernel, tile] : {std::pair("matmul_tensor_f16_narrow", MATMUL_NARROW_TILE),
                                       std::pair("matmul_tensor_f16_wide", MATMUL_WIDE_TILE)})
      if (std::string why = failure(kernel, tile, tile, kEdge); !why.empty()) return {.any = std::move(why)};
    return {.tall = failure("matmul_tensor_f16_tall", MATMUL_TALL_TOKENS, MATMUL_WIDE_TILE, 2 * MATMUL_K),
            .attention = failure_of_attention_trial(device, queue)};
  } catch (const DeviceError& error) {
    return {.any = error.what()};
  }
}

std::string text_of(const TensorFailures& failures) {
  std::string text = failures.any + '\0' + failures.tall + '\0' + failures.attention + '\0';
  Checksum sum;
  sum.add(text);
  return text + sum.text();
}

// Returns nullopt if the file is missing or damaged.
std::optional<TensorFailures> read_failures(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TensorFailures failures;
  for (std::string* text : {&failures.any, &failures.tall, &failures.attention})
    std::getline(file, *text, '\0');
  std::string sum;
  if (!std::getline(file, sum) || !text_of(failures).ends_with('\0' + sum) || sum.size() != 16)
    return std::nullopt;
  return failures;
}

}  // namespace

TensorFailures stored_failures_of_tensor_trial(id<MTLDevice> device, id<MTLCommandQueue> queue,
                                               const std::string& folder) {
  if (folder.empty()) return failures_of_tensor_trial(device, queue);
  namespace fs = std::filesystem;
  const fs::path path = fs::path(folder) / (checksum_of_kernels(device, {}) + ".trial");
  if (const auto known = read_failures(path)) return *known;
  TensorFailures failures = failures_of_tensor_trial(device, queue);
  std::error_code ignored;  // such as a read-only folder: later processes run the trial again
  fs::create_directories(folder, ignored);
  const fs::path part = path.string() + "." + std::to_string(getpid());
  if (std::ofstream(part, std::ios::binary) << text_of(failures)) fs::rename(part, path, ignored);
  fs::remove(part, ignored);
  return failures;
}

std::string failure_of_trial(id<MTLDevice> device, id<MTLCommandQueue> queue) {
  try {
    return failure_of(trial_of_simdgroups(), open_trial(device), device, queue);
  } catch (const DeviceError& error) {
    return error.what();
  }
}

}  // namespace metal_prefill::metal
