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

// Encodes the dispatches of a pass in command buffers, which run one after another, and after those of
// earlier passes. The first is committed early if the GPU is idle, so that it need not wait until the host
// has encoded the pass, others when they have enough work: macOS ends a command buffer that runs for seconds.
class MetalEncoder final : public Encoder {
 public:
  // `label` names the pass in errors.
  MetalEncoder(const Device& device, const Kernels& kernels, std::string label, Gpu gpu);
  // Waits for the GPU if finish() was not called: until then it uses the buffers of the pass.
  ~MetalEncoder() override;

  // Commits the rest, and returns the last command buffer.
  id<MTLCommandBuffer> send();
  // Waits for the GPU. Throws DeviceError when it failed in any of the command buffers.
  void finish();

  std::size_t max_threads(const KernelKey& key) const override { return kernels_.max_threads(key); }

 protected:
  void encode(const Step& step) override;

 private:
  void begin();
  void commit();
  // Whether the step may, and should, be the first of another command buffer.
  bool cuts_before(const Step& step) const;

  const Device& device_;
  const Kernels& kernels_;
  const std::string label_;
  const Gpu gpu_;
  std::vector<id<MTLCommandBuffer>> committed_;
  id<MTLCommandBuffer> commands_;  // being encoded; null: none
  id<MTLComputeCommandEncoder> encoder_;
  int dispatches_ = 0;  // in commands_
  double work_ = 0;     // of them
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
