// The portable engine: the weights and threads that sessions share, and their pages.
#include "../engine/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "../cache/cache.h"
#include "forward_pass.h"
#include "kernels/kernels.h"
#include "kv_pages.h"
#include "state_slots.h"
#include "threads.h"

namespace metal_prefill::cpu {

namespace {

void check_heads(const Config& config) {
  const int head_dim = std::max(config.key_dim, config.value_dim);
  if (head_dim > kMaxHeadDim)
    throw UnsupportedModelError("heads of " + std::to_string(head_dim) +
                                " dimensions: the CPU engine takes up to " + std::to_string(kMaxHeadDim));
}

// Throws if a head is not a whole number of the cache's blocks.
void check_cache(const Config& config, KvType type) {
  const TypeInfo& info = type_info(tensor_type(type));
  std::vector<int> dims = config.layer_head_dim;
  dims.insert(dims.end(), {config.key_dim, config.value_dim});
  for (const int dim : dims)
    if (std::size_t(dim) % info.block_values != 0)
      throw UnsupportedModelError("a KV cache in q8_0 has blocks of " + std::to_string(info.block_values) +
                                  " dimensions, which heads of " + std::to_string(dim) +
                                  " are not a multiple of: use kv_dtype='f16'");
}

// Attention on pairs of bfloat16 rounds about as coarsely as 8-bit products, but several times as coarsely as
// products of 16-bit weights. With such weights, attention is in float32.
KvLayout kv_layout(const Kernels& kernels, const EngineOptions& options, const Model& model) {
  if (options.kv_type == KvType::kQ8_0) return KvLayout::kQ8;
  if (options.kv_type == KvType::kF32) return KvLayout::kFloat;
  return rounds_coarsely(model, options.compute) ? kernels.half_layout : KvLayout::kHalf;
}

}  // namespace

class CpuEngine final : public Engine {
 public:
  CpuEngine(Model model, const EngineOptions& options)
      : Engine(std::move(model), options),
        vectors_(gather_vectors(model_)),
        kernels_(select_kernels()),
        team_(options.threads),
        store_(config(), kv_layout(kernels_, options, model_), kernels_.key_multiple,
               options.max_context > 0 ? options.max_context : config().context_length, options.poison_cache),
        states_(config(), options.poison_cache),
        memory_(store_, states_.layout().values > 0 ? &states_ : nullptr,
                options.kv_memory > 0 ? options.kv_memory : half_of_the_memory(), options.prefix_memory),
        forward_(model_, options_, kernels_, store_, states_, team_) {}

  std::string device_name() const override {
    return std::string("CPU (") + kernels_.name + ", " + std::to_string(team_.size()) +
           (team_.size() == 1 ? " thread)" : " threads)");
  }
  std::string backend() const override { return "cpu"; }
  std::span<const std::byte> packed_weights() const override { return forward_.packed_weights(); }
  Stats stats() const override;

  std::unique_ptr<Cache> make_cache(int max_context) override;
  CacheMemory& memory() override { return memory_; }
  int pass_rows() const override {
    return config().causal ? std::min(options().chunk_tokens, forward_.max_rows()) : forward_.max_rows();
  }
  int exact_rows() const override { return pass_rows(); }
  void forward(std::span<Chunk> chunks, CallCounters& counters) override;
  void add_call_stats(const CallCounters& counters, Stats& stats) const override;

 private:
  class CpuCache;

  const Buffer vectors_;  // of model_
  const Kernels& kernels_;
  Team team_;
  KvPages store_;
  StateSlots states_;
  CacheMemory memory_;
  std::mutex mutex_;  // guards the members below and the team: one pass at a time
  ForwardPass forward_;
  std::atomic<std::size_t> workspace_bytes_{0};  // read without waiting for a pass
  bool idle_at_fork_ = false;
  bool lost_ = false;  // this process was forked while another thread was in a pass: mutex_ stays locked
  const ForkHandler fork_handler_{[this] { idle_at_fork_ = mutex_.try_lock(); },
                                  [this](bool child) {
                                    if (idle_at_fork_) return mutex_.unlock();
                                    if (child) lost_ = true;
                                  }};
};

class CpuEngine::CpuCache final : public Cache {
 public:
  explicit CpuCache(CpuEngine& engine)
      : Cache(engine.memory_), store_(engine.store_), slots_(engine.states_), config_(engine.config()) {}

  void read(int layer, bool values, int positions, std::byte* out) const override {
    store_.read(pages(), layer, values, positions, out);
  }
  void write(int layer, bool values, int positions, const std::byte* in) override {
    store_.write(pages(), layer, values, positions, in);
  }
  void read_state(const StateRef& state, int layer, float* out) const override {
    std::copy_n(values_of(state, layer), config_.state_values(layer), out);
  }
  void write_state(const StateRef& state, int layer, const float* in) override {
    std::copy_n(in, config_.state_values(layer), values_of(state, layer));
  }

 private:
  float* values_of(const StateRef& state, int layer) const {
    return slots_.values(state) + slots_.layout().first[std::size_t(layer)];
  }

  KvPages& store_;
  const StateSlots& slots_;
  const Config& config_;
};

std::unique_ptr<Cache> CpuEngine::make_cache(int) {
  return std::make_unique<CpuCache>(*this);
}

void CpuEngine::forward(std::span<Chunk> chunks, CallCounters& counters) {
  if (lost_)
    throw ForkError(
        "this process was forked while another thread computed with the model; open the model again here");
  const std::scoped_lock lock(mutex_);
  const auto start = std::chrono::steady_clock::now();
  counters.multiply_adds += forward_.run(chunks);
  counters.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  workspace_bytes_ = forward_.workspace_bytes();
}

Stats CpuEngine::stats() const {
  return {{"threads", double(team_.size())},
          {"weight_bytes", double(forward_.weight_bytes())},
          {"weights_from_cache", double(forward_.weights_were_packed())},
          {"workspace_bytes", double(workspace_bytes_)},
          {"prefix_bytes", double(memory_.prefixes().bytes())},
          {"kv_pool_bytes", double(memory_.bytes_in_use())},
          {"kv_page_bytes", double(memory_.pages().page_bytes())},
          {"kv_limit_bytes", double(memory_.pages().limit_bytes())}};
}

void CpuEngine::add_call_stats(const CallCounters& counters, Stats& stats) const {
  stats["chunks"] = double(counters.passes);
  stats["compute_seconds"] = counters.seconds;
  stats["multiply_adds"] = counters.multiply_adds;
}

}  // namespace metal_prefill::cpu

namespace metal_prefill {

std::shared_ptr<Engine> make_cpu_engine(Model model, const EngineOptions& options) {
  cpu::check_heads(model.config);
  cpu::check_cache(model.config, options.kv_type);
  return std::make_shared<cpu::CpuEngine>(std::move(model), options);
}

}  // namespace metal_prefill
