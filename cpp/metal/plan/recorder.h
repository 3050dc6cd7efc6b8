// The forward pass without a GPU: lists the dispatches of a pass.
#pragma once

#include <algorithm>
#include <vector>

#include "../../engine/inspection.h"
#include "forward_pass.h"

namespace metal_prefill::metal {

// Copies a step, so that it outlives the call.
Dispatch describe(const Step& step, KvType cache);

class Recorder final : public Encoder {
 public:
  using Encoder::Encoder;
  std::vector<Dispatch> take() { return std::move(dispatches_); }

 protected:
  void encode(const Step& step) override { dispatches_.push_back(describe(step, cache())); }

 private:
  std::vector<Dispatch> dispatches_;
};

// Collects the keys of the kernels that are dispatched, with the largest threadgroup of each.
class KernelCollector final : public Encoder {
 public:
  KernelCollector(const Tuning& tuning, KvType cache, const ThreadLimit& limit)
      : Encoder(tuning, cache), limit_(limit) {}
  KernelThreads kernels() const { return kernels_; }

  std::size_t max_threads(const KernelKey& key) const override {
    return limit_ ? limit_(key) : Encoder::max_threads(key);
  }

 protected:
  void encode(const Step& step) override {
    std::size_t& threads = kernels_[step.kernel];
    threads = std::max(threads, step.grid.threads);
  }

 private:
  const ThreadLimit& limit_;
  KernelThreads kernels_;
};

// Views without memory.
class RecordedBuffers final : public PassBuffers {
 public:
  View get(BufferName name, std::size_t) override { return view(name); }
  LayerCache cache(int) override { return {view(BufferName::kKeys), view(BufferName::kValues)}; }
  View rope_table(int) override { return view(BufferName::kRopeTable); }
  View states(int) override { return view(BufferName::kStates); }

 private:
  View view(BufferName name) { return {this, 0, name}; }
};

// Views of weights as if the file were mapped in one buffer.
class RecordedWeights final : public WeightViews {
 public:
  explicit RecordedWeights(const Model& model) : file_(model.mapping.data) {}
  View view(const Tensor& t) const override {
    return {const_cast<RecordedWeights*>(this), std::size_t(t.data - file_), BufferName::kWeights};
  }
  View concatenate(BufferName name, std::span<const std::pair<const Tensor*, int>>, float) override {
    return {this, 0, name};
  }

 private:
  const std::byte* file_;
};

// The dispatches of a prompt, in the passes of a batch with this prompt alone. Only the last chunk has the
// output, but log probabilities are an output of every chunk.
std::vector<Dispatch> record_prompt(const ForwardPass& forward, int tokens, int position, RowOutput output);

// The dispatches of a model for which only configuration, types and dimensions are given, on a GPU of Apple's
// `family` with the name `gpu`. Throws std::invalid_argument for arguments out of range,
// UnsupportedModelError for dimensions that the engine would have to pad.
std::vector<Dispatch> plan(const Model& shape, int tokens, int position, RowOutput output, int family,
                           const std::string& gpu, const EngineOptions& options);

}  // namespace metal_prefill::metal
