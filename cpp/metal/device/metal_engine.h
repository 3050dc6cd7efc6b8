// The Metal engine: weights, pipelines and buffers that all sessions of a model share.
#pragma once

#include <atomic>
#include <memory>

#include "../../base/fork_handler.h"
#include "../../engine/inspection.h"
#include "../plan/forward_pass.h"
#include "../plan/recorder.h"
#include "buffers.h"
#include "device.h"
#include "kernels.h"
#include "residency.h"
#include "rope_tables.h"
#include "slots.h"

namespace metal_prefill::metal {

class MetalEngine final : public Engine, private PassInspector {
 public:
  MetalEngine(Model model, const EngineOptions& options);

  std::string device_name() const override {
    const AutoreleasePool pool;
    return device_.name();
  }
  std::string backend() const override { return "metal"; }

  Stats stats() const override {
    if (forked_) return {};
    return {{"weights_mapped_bytes", double(weights_.mapped_bytes())},
            {"weights_copied_bytes", double(weights_.copied_bytes())},
            {"weights_mapping_refused", double(weights_.mapping_refused())},
            {"resident_bytes", double(residency_.bytes())},
            {"pass_memory_bytes", double(pass_memory_.bytes())},
            {"rope_table_bytes", double(rope_tables_.bytes())},
            {"prefix_bytes", double(memory_.prefixes().bytes())},
            {"kv_pool_bytes", double(memory_.bytes_in_use())},
            {"kv_page_bytes", double(memory_.pages().page_bytes())},
            {"kv_limit_bytes", double(memory_.pages().limit_bytes())},
            {"matmul_tensor", double(device_.tuning().matmul_tensor)},
            {"matmul_tall", double(device_.tuning().matmul_tensor && device_.tuning().tall_tiles)},
            {"attention_tensor", double(device_.tuning().matmul_tensor && device_.tuning().attention_tensor)},
            {"fused_norm", double(device_.tuning().fused_norm)},
            {"matvec_rows", double(device_.tuning().matvec_rows)},
            {"pipelines", double(kernels_.count())},
            {"pipelines_compiled", double(kernels_.compiled_now())}};
  }

  std::unique_ptr<Cache> make_cache(int max_context) override;
  CacheMemory& memory() override { return memory_; }
  int pass_rows() const override { return forward_.pass_rows(); }
  // The host reads rows of the layers' inputs, so it must know the tokens of a pass.
  bool runs_ahead() const override { return config().per_layer_dim == 0; }
  int exact_rows() const override { return std::min(kFewTokens, pass_rows()); }
  void forward(std::span<Chunk> chunks, CallCounters& counters) override;
  void add_call_stats(const CallCounters& counters, Stats& stats) const override;
  const PassInspector* inspector() const override { return this; }
  void finish() const override {
    if (!forked_) kernels_.finish();
  }

  // A forked process has neither the GPU nor usable locks of its driver: it does not touch its copy of the
  // engine, not even to free it.
  bool forked() const { return forked_; }

 private:
  std::vector<PipelineInfo> pipelines() const override { return kernels_.built(); }
  bool shaders_were_compiled() const override { return kernels_.compiled(); }
  std::string no_matmul_tensor() const override { return device_.no_matmul_tensor(); }
  std::vector<Dispatch> plan(int tokens, int position) const override;

  class Buffers;
  class MetalCache;
  class SentPass;
  struct RequestedPass;
  struct Ahead;
  void require_unforked() const {
    if (forked_)
      throw ForkError(
          "this process was forked from one that uses the GPU, which macOS gives to no forked process; start "
          "processes by 'spawn', or open the model here with device='cpu'");
  }
  void run_pass(std::span<Chunk* const> chunks, CallCounters& counters);
  void trace_pass(std::span<Chunk* const> chunks, CallCounters& counters);
  static std::vector<Chunk*> take_ahead(std::span<Chunk* const> chunks, std::vector<RequestedPass>& passes);
  std::shared_ptr<SentPass> send_after(std::span<Chunk> chunks, const SentPass& before);
  void fill(const PassTables& tables, const PassRows& rows, std::span<Chunk* const> chunks) const;
  void fill_layer_rows(const View& out, const PassRows& rows, std::span<Chunk* const> chunks) const;
  void deliver(const PassRows& rows, std::span<Chunk* const> chunks, const PassMemory& memory) const;

  const Device device_;
  const Model padded_;  // the model itself, if its dimensions suit the kernels
  WeightBuffers weights_;
  const ForwardPass forward_;
  const Kernels kernels_;
  RopeTables rope_tables_;
  Residency residency_;
  SlotUse slot_use_;
  Slots pages_, states_;
  CacheMemory memory_;
  PassMemoryPool pass_memory_;
  std::atomic<int> sessions_{0};
  bool forked_ = false;
  const ForkHandler fork_handler_{[] {},
                                  [this](bool child) {
                                    if (child) forked_ = true;
                                  }};
};

}  // namespace metal_prefill::metal
