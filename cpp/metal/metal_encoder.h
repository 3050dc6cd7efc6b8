// Encoders that run dispatches on the GPU.
#pragma once

#include "../inspection.h"
#include "encoder.h"
#include "kernels.h"

namespace metal_prefill::metal {

// Encodes all dispatches in one command buffer.
class MetalEncoder final : public Encoder {
 public:
  MetalEncoder(id<MTLCommandBuffer> commands, const Device& device, const Kernels& kernels);
  ~MetalEncoder() override;  // ends the encoding, also during an exception

 protected:
  void encode(const Step& step) override;

 private:
  friend class TracingEncoder;
  id<MTLComputeCommandEncoder> encoder_;
  const Device& device_;
  const Kernels& kernels_;
};

// Runs each dispatch in a command buffer of its own, waits for it, and appends it with its time to a trace.
class TracingEncoder final : public Encoder {
 public:
  TracingEncoder(const Device& device, const Kernels& kernels, Trace& trace);

 protected:
  void encode(const Step& step) override;

 private:
  const Device& device_;
  const Kernels& kernels_;
  Trace& trace_;
};

}  // namespace metal_prefill::metal
