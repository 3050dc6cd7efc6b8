// Encoders that run dispatches on the GPU.
#pragma once

#include <string>
#include <vector>

#include "../../engine/inspection.h"
#include "../plan/encoder.h"
#include "kernels.h"

namespace metal_prefill::metal {

// State of the GPU when a pass is encoded.
enum class Gpu { kIdle, kBusy };

// Encodes the dispatches of a pass in command buffers, which run in order, after those of earlier passes. If
// the GPU is idle, the first is committed early, so that it starts before the host has encoded the whole
// pass. Others are committed when they have enough work: macOS ends a command buffer that runs for seconds.
class MetalEncoder final : public Encoder {
 public:
  // `label` names the pass in errors.
  MetalEncoder(const Device& device, const Kernels& kernels, std::string label, Gpu gpu);
  // Waits for the GPU if finish() was not called: until then it uses the buffers of the pass.
  ~MetalEncoder() override;

  // Commits the remaining dispatches and returns the last command buffer.
  id<MTLCommandBuffer> send();
  // Waits for the GPU. Throws DeviceError if any of the command buffers failed.
  void finish();

  std::size_t max_threads(const KernelKey& key) const override { return kernels_.max_threads(key); }

 protected:
  void encode(const Step& step) override;

 private:
  void begin();
  void commit();
  // Whether another command buffer can and should begin with the step.
  bool cuts_before(const Step& step) const;

  const Device& device_;
  const Kernels& kernels_;
  const std::string label_;
  const Gpu gpu_;
  std::vector<id<MTLCommandBuffer>> committed_;
  id<MTLCommandBuffer> commands_;  // being encoded; null if there is none
  id<MTLComputeCommandEncoder> encoder_;
  int dispatches_ = 0;  // in commands_
  double work_ = 0;     // of these dispatches
};

// Runs each dispatch in a separate command buffer, waits for it, and appends it with its time to a trace.
class TracingEncoder final : public Encoder {
 public:
  TracingEncoder(const Device& device, const Kernels& kernels, Trace& trace);

  std::size_t max_threads(const KernelKey& key) const override { return kernels_.max_threads(key); }

 protected:
  void encode(const Step& step) override;

 private:
  const Device& device_;
  const Kernels& kernels_;
  Trace& trace_;
};

}  // namespace metal_prefill::metal
