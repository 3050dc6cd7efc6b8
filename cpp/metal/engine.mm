// The Metal engine: the weights and pipelines that sessions share, and a session's way through one chunk.
#include "../engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "forward_pass.h"
#include "padding.h"

namespace metal_prefill {
namespace metal {
namespace {

// Rows of the rope tables that a session begins with, so that its first prompts need not wait for them.
constexpr int kFirstRopePositions = 2048;

class MetalEngine final : public Engine {
 public:
  MetalEngine(Model model, const EngineOptions& options)
      : Engine(std::move(model), options),
        padded_(fits_kernels(model_.config) ? model_ : pad_model(model_)),
        forward_(device_, padded_, options_),
        kernels_(device_, forward_.kernels(), forward_.cache_shape()),
        rope_tables_(device_, padded_),
        batches_(device_) {}

  std::string device_name() const override {
    const AutoreleasePool pool;
    return device_.name();
  }
  std::string backend() const override { return "metal"; }

  Stats stats() const override {
    return {{"weights_mapped_bytes", double(forward_.weights().mapped_bytes())},
            {"weights_copied_bytes", double(forward_.weights().copied_bytes())},
            {"batch_pool_bytes", double(batches_.bytes())},
            {"rope_table_bytes", double(rope_tables_.bytes())},
            {"pipelines", double(kernels_.count())}};
  }

  const Device& device() const { return device_; }
  const Config& padded_config() const { return padded_.config; }
  const ForwardPass& forward() const { return forward_; }
  const Kernels& kernels() const { return kernels_; }
  RopeTables& rope_tables() { return rope_tables_; }
  BatchPool& batches() { return batches_; }

  void session_closed() {
    if (--sessions_ == 0) batches_.trim();
  }

 private:
  std::unique_ptr<Session> make_session(int max_context) override;

  const Device device_;
  const Model padded_;  // the model itself, where its dimensions suit the kernels
  const ForwardPass forward_;
  const Kernels kernels_;
  RopeTables rope_tables_;
  BatchPool batches_;
  std::atomic<int> sessions_{0};
};

class MetalSession final : public Session {
 public:
  MetalSession(std::shared_ptr<MetalEngine> engine, int max_context)
      : Session(engine, max_context),
        metal_(*engine),
        cache_(std::in_place, metal_.device(), engine->padded_config(), engine->options().kv_type,
               max_context) {}
  ~MetalSession() override {
    const AutoreleasePool pool;
    cache_.reset();
    metal_.session_closed();
  }

 protected:
  TokenId forward_chunk(const Chunk& chunk) override;
  void reserve(int positions) override;
  void read_kv(int layer, bool values, int positions, std::byte* out) override;
  void write_kv(int layer, bool values, int positions, const std::byte* in) override;
  std::size_t cache_bytes() const override { return cache_->bytes(); }
  void publish_counters() noexcept override { published_ = counters_; }
  void collect_stats(Stats& stats) const override;
  void begin_call() override { counters_ = {}; }
  std::vector<float> read_intermediate(const std::string& name) const override;
  bool makes_dispatches() const override { return true; }
  void plan_chunk(const Chunk& chunk, std::vector<Dispatch>& plan) override;

 private:
  struct Heads {  // of K or V at one position
    std::size_t count, bytes, padded_bytes;
  };
  Heads heads_of(bool values) const;
  TokenId deliver(const Chunk& chunk, const Batch& batch) const;
  void keep_intermediates(const Chunk& chunk, const Batch& batch);

  MetalEngine& metal_;            // kept alive by the base class
  std::optional<KvCache> cache_;  // until the destructor
  CallCounters counters_, published_;
  std::map<std::string, std::vector<float>> intermediates_;
};

TokenId MetalSession::forward_chunk(const Chunk& chunk) {
  const AutoreleasePool pool;
  const Device& device = metal_.device();
  const BatchPool::Lease lease = metal_.batches().take();
  Batch& batch = *lease;
  const std::vector<id<MTLBuffer>> rope_tables = metal_.rope_tables().by_layer();

  const View ids = batch.get(Name::kIds, chunk.tokens.size_bytes(), counters_);
  std::memcpy(ids.buffer.contents, chunk.tokens.data(), chunk.tokens.size_bytes());
  if (chunk.output == Output::kLogProbs) {
    const View targets = batch.get(Name::kTargets, chunk.targets.size_bytes(), counters_);
    std::memcpy(targets.buffer.contents, chunk.targets.data(), chunk.targets.size_bytes());
  }
  const auto encode = [&](Encoder&& encoder) {
    metal_.forward().encode(encoder, chunk, batch, *cache_, rope_tables, counters_);
  };
  if (chunk.trace) {
    encode(Encoder(device, metal_.kernels(), counters_, *chunk.trace, true));
  } else {
    id<MTLCommandBuffer> commands = device.command_buffer(
        std::to_string(chunk.tokens.size()) + " tokens at position " + std::to_string(chunk.position));
    encode(Encoder(commands, metal_.kernels(), device.tuning(), counters_));
    device.run(commands, counters_);
  }
  if (device.debug()) keep_intermediates(chunk, batch);
  return deliver(chunk, batch);
}

void MetalSession::plan_chunk(const Chunk& chunk, std::vector<Dispatch>& plan) {
  const AutoreleasePool pool;
  const BatchPool::Lease lease = metal_.batches().take();
  Batch& batch = *lease;
  CallCounters uncounted;
  batch.get(Name::kIds, chunk.tokens.size_bytes(), uncounted);
  Encoder encoder(metal_.device(), metal_.kernels(), uncounted, plan, false);
  metal_.forward().encode(encoder, chunk, batch, *cache_, metal_.rope_tables().by_layer(), uncounted);
}

// Brings what was asked for from the buffers that the host can read.
TokenId MetalSession::deliver(const Chunk& chunk, const Batch& batch) const {
  const auto contents = [&](Name name) { return batch.peek(name).contents; };
  switch (chunk.output) {
    case Output::kNone:
      break;
    case Output::kGreedy: {
      const auto* best = static_cast<const Candidate*>(contents(Name::kResult));
      if (best->index == ARGMAX_NONE)
        throw NumericalError("every logit of the token at position " +
                             std::to_string(chunk.position + int(chunk.tokens.size()) - 1) + " is NaN");
      return TokenId(best->index);
    }
    case Output::kLogits:
      std::memcpy(chunk.logits, contents(Name::kHostLogits),
                  std::size_t(engine_->config().vocab_size) * sizeof(float));
      break;
    case Output::kLogProbs:
      std::memcpy(chunk.log_probs, contents(Name::kLogProbs), chunk.tokens.size() * sizeof(float));
      break;
  }
  return -1;
}

void MetalSession::keep_intermediates(const Chunk& chunk, const Batch& batch) {
  intermediates_.clear();
  for (const ForwardPass::Intermediate& wanted : metal_.forward().intermediates(chunk)) {
    const void* contents = batch.peek(wanted.name).contents;
    std::vector<float>& kept = intermediates_[name_of(wanted.name)];
    if (wanted.half) {
      const auto* bits = static_cast<const std::uint16_t*>(contents);
      for (std::size_t i = 0; i < wanted.elements; ++i) kept.push_back(half_to_float(bits[i]));
    } else {
      const auto* values = static_cast<const float*>(contents);
      kept.assign(values, values + wanted.elements);
    }
  }
}

std::vector<float> MetalSession::read_intermediate(const std::string& name) const {
  if (!metal_.device().debug())
    throw std::invalid_argument("intermediates are kept with METAL_PREFILL_DEBUG=1 only");
  const auto kept = intermediates_.find(name);
  if (kept == intermediates_.end())
    throw std::invalid_argument("the last call left no intermediate '" + name + "'");
  return kept->second;
}

void MetalSession::reserve(int positions) {
  const AutoreleasePool pool;
  metal_.rope_tables().reserve(positions, counters_);
  cache_->reserve(positions, counters_);
}

// Rows travel without the dimensions that padding added to the heads.
void MetalSession::read_kv(int layer, bool values, int positions, std::byte* out) {
  const AutoreleasePool pool;
  const View rows = values ? cache_->values(layer) : cache_->keys(layer);
  const Heads heads = heads_of(values);
  const std::size_t n = std::size_t(positions) * heads.count;
  if (heads.bytes == heads.padded_bytes)
    return metal_.device().download(rows.buffer, rows.offset, out, n * heads.bytes, counters_);
  std::vector<std::byte> padded(n * heads.padded_bytes);
  metal_.device().download(rows.buffer, rows.offset, padded.data(), padded.size(), counters_);
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(out + i * heads.bytes, padded.data() + i * heads.padded_bytes, heads.bytes);
}

void MetalSession::write_kv(int layer, bool values, int positions, const std::byte* in) {
  const AutoreleasePool pool;
  const View rows = values ? cache_->values(layer) : cache_->keys(layer);
  const Heads heads = heads_of(values);
  const std::size_t n = std::size_t(positions) * heads.count;
  if (heads.bytes == heads.padded_bytes)
    return metal_.device().upload(rows.buffer, rows.offset, in, n * heads.bytes, counters_);
  std::vector<std::byte> padded(n * heads.padded_bytes);
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(padded.data() + i * heads.padded_bytes, in + i * heads.bytes, heads.bytes);
  metal_.device().upload(rows.buffer, rows.offset, padded.data(), padded.size(), counters_);
}

MetalSession::Heads MetalSession::heads_of(bool values) const {
  const Config& own = engine_->config();
  const Config& padded = metal_.padded_config();
  const std::size_t element = engine_->options().kv_type == KvType::kF16 ? 2 : 4;
  return {std::size_t(own.n_kv_heads), std::size_t(values ? own.value_dim : own.key_dim) * element,
          std::size_t(values ? padded.value_dim : padded.key_dim) * element};
}

void MetalSession::collect_stats(Stats& stats) const {
  stats["dispatches"] = double(published_.dispatches);
  stats["command_buffers"] = double(published_.command_buffers);
  stats["allocations"] = double(published_.allocations);
  stats["gpu_seconds"] = published_.gpu_seconds;
}

std::unique_ptr<Session> MetalEngine::make_session(int max_context) {
  const AutoreleasePool pool;
  CallCounters uncounted;  // of no call
  rope_tables_.reserve(std::min(max_context, kFirstRopePositions), uncounted);
  auto session =
      std::make_unique<MetalSession>(std::static_pointer_cast<MetalEngine>(shared_from_this()), max_context);
  ++sessions_;
  return session;
}

}  // namespace
}  // namespace metal

std::shared_ptr<Engine> make_metal_engine(Model model, const EngineOptions& options) {
  const metal::AutoreleasePool pool;
  return {new metal::MetalEngine(std::move(model), options), [](metal::MetalEngine* engine) {
            const metal::AutoreleasePool drained;
            delete engine;
          }};
}

bool metal_available() {
  const metal::AutoreleasePool pool;
  try {
    return metal::Device().mtl() != nil;
  } catch (const DeviceError&) {
    return false;
  }
}

}  // namespace metal_prefill
