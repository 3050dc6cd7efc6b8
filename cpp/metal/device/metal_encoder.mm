#include "metal_encoder.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

#include "../plan/recorder.h"
#include "waits.h"

namespace metal_prefill::metal {

namespace {

constexpr std::size_t kMostBindings = 16;  // maximum of a dispatch, without its arguments

// Dispatches of the first command buffer of a pass. Encoding them takes the host some tens of microseconds,
// about as long as committing a command buffer.
constexpr int kFirstDispatches = 64;

id<MTLComputeCommandEncoder> encoder_of(id<MTLCommandBuffer> commands) {
  id<MTLComputeCommandEncoder> encoder =
      [commands computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
  if (!encoder)
    throw DeviceError("the GPU gave no compute encoder for " + std::string(commands.label.UTF8String));
  return encoder;
}

// Does not retain the encoder for each message, since every dispatch of every token is encoded here.
void encode_step(__unsafe_unretained id<MTLComputeCommandEncoder> encoder, const Step& step,
                 bool after_barrier, const Kernels& kernels) {
  if (after_barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  [encoder setComputePipelineState:kernels.pipeline(step.kernel)];
  // One message sets all buffers; the array holds no references itself.
  std::array<__unsafe_unretained id<MTLBuffer>, kMostBindings> buffers;
  std::array<NSUInteger, kMostBindings> offsets;
  const std::size_t n = step.buffers.size();
  for (std::size_t i = 0; i < n; ++i) {
    buffers[i] = buffer_of(step.buffers[i]);
    offsets[i] = step.buffers[i].offset;
  }
  [encoder setBuffers:reinterpret_cast<const id<MTLBuffer> __strong*>(buffers.data())
              offsets:offsets.data()
            withRange:NSMakeRange(0, n)];
  [encoder setBytes:step.args length:step.layout.bytes atIndex:n];
  const Grid& grid = step.grid;
  if (grid.threadgroup_bytes > 0) [encoder setThreadgroupMemoryLength:grid.threadgroup_bytes atIndex:0];
  [encoder dispatchThreadgroups:MTLSizeMake(grid.x, grid.y, grid.z)
          threadsPerThreadgroup:MTLSizeMake(grid.threads, 1, 1)];
}

// Copies each buffer once for all of its views, as one buffer has the keys and values of every layer.
std::vector<Contents> contents_of(const Device& device, std::span<const View> views) {
  std::map<void*, std::shared_ptr<const std::vector<std::byte>>> copies;
  std::vector<Contents> found;
  for (const View& view : views) {
    id<MTLBuffer> buffer = buffer_of(view);
    // With Metal's validation layer, asking for the contents of a Private buffer ends the process.
    const bool is_private = buffer.storageMode == MTLStorageModePrivate;
    const auto* host = is_private ? nullptr : static_cast<const std::byte*>(buffer.contents);
    if (view.name == BufferName::kWeights) {
      found.push_back({{host + view.offset, buffer.length - view.offset}, nullptr});
      continue;
    }
    auto& copy = copies[view.buffer];
    if (!copy) {
      std::vector<std::byte> bytes(buffer.length);
      if (host)
        std::copy_n(host, bytes.size(), bytes.data());
      else
        device.download({{{buffer, 0, bytes.size()}}}, bytes.data());
      copy = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
    }
    found.push_back({std::span(*copy).subspan(view.offset), copy});
  }
  return found;
}

}  // namespace

MetalEncoder::MetalEncoder(const Device& device, const Kernels& kernels, std::string label, Gpu gpu)
    : Encoder(device.tuning(), kernels.cache()),
      device_(device),
      kernels_(kernels),
      label_(std::move(label)),
      gpu_(gpu) {}

MetalEncoder::~MetalEncoder() {
  [encoder_ endEncoding];
  for (id<MTLCommandBuffer> commands : committed_) wait_briefly_for(commands);
}

void MetalEncoder::begin() {
  commands_ = device_.command_buffer(label_, References::kUnretained);
  encoder_ = encoder_of(commands_);
  // The buffers are untracked: without a fence the GPU may run command buffers of a queue at the same time.
  if (!committed_.empty() || gpu_ == Gpu::kBusy) [encoder_ waitForFence:device_.fence()];
}

void MetalEncoder::commit() {
  [encoder_ updateFence:device_.fence()];
  [encoder_ endEncoding];
  encoder_ = nil;
  // Appended only after the commit: a command buffer whose commit throws never completes.
  committed_.reserve(committed_.size() + 1);
  device_.commit(commands_);
  committed_.push_back(std::exchange(commands_, nil));
  dispatches_ = 0;
  work_ = 0;
}

bool MetalEncoder::cuts_before(const Step& step) const {
  if (!step.after_barrier || !commands_) return false;
  const bool early = gpu_ == Gpu::kIdle && committed_.empty() && dispatches_ >= kFirstDispatches;
  return early || work_ + step.grid.work > tuning().buffer_work;
}

void MetalEncoder::encode(const Step& step) {
  if (cuts_before(step)) commit();
  const bool first = !commands_;
  if (first) begin();
  encode_step(encoder_, step, step.after_barrier && !first, kernels_);
  ++dispatches_;
  work_ += step.grid.work;
  device_.count_dispatch();
}

id<MTLCommandBuffer> MetalEncoder::send() {
  if (commands_) commit();
  return committed_.back();
}

void MetalEncoder::finish() {
  // After a failure Metal may abort later command buffers as well: the first error has the cause.
  for (id<MTLCommandBuffer> commands : committed_) wait_for(commands, Interrupts::kTaken);
  for (id<MTLCommandBuffer> commands : std::exchange(committed_, {})) device_.check(commands);
}

TracingEncoder::TracingEncoder(const Device& device, const Kernels& kernels, Trace& trace)
    : Encoder(device.tuning(), kernels.cache()), device_(device), kernels_(kernels), trace_(trace) {}

void TracingEncoder::encode(const Step& step) {
  const AutoreleasePool pool;
  Dispatch noted = describe(step, cache());
  const bool keeps = trace_.kept.contains(trace_.dispatches.size());
  if (keeps) noted.before = contents_of(device_, step.buffers);
  id<MTLCommandBuffer> commands = device_.command_buffer(noted.kernel, References::kUnretained);
  id<MTLComputeCommandEncoder> encoder = encoder_of(commands);
  encode_step(encoder, step, false, kernels_);
  [encoder endEncoding];
  device_.count_dispatch();
  device_.run(commands);
  noted.start = commands.GPUStartTime;
  noted.end = commands.GPUEndTime;
  if (keeps) noted.after = contents_of(device_, step.buffers);
  trace_.dispatches.push_back(std::move(noted));
}

}  // namespace metal_prefill::metal
