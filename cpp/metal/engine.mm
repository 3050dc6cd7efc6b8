// The Metal engine: the weights and pipelines that sessions share, and how a chunk goes through the GPU.
#include "../engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "buffers.h"
#include "kv_cache.h"
#include "metal_encoder.h"
#include "padding.h"
#include "recorder.h"

namespace metal_prefill {
namespace metal {
namespace {

// Rows of the rope tables that a session begins with, so that its first prompts need not wait for them.
constexpr int kFirstRopePositions = 2048;

class MetalEngine final : public Engine, private PassInspector {
 public:
  MetalEngine(Model model, const EngineOptions& options)
      : Engine(std::move(model), options),
        padded_(fits_kernels(model_.config) ? model_ : pad_model(model_)),
        weights_(device_, padded_),
        forward_(device_.tuning(), padded_, options_, weights_),
        kernels_(device_, forward_.kernels(), forward_.cache_shape()),
        rope_tables_(padded_) {}

  std::string device_name() const override {
    const AutoreleasePool pool;
    return device_.name();
  }
  std::string backend() const override { return "metal"; }

  Stats stats() const override {
    if (forked_) return {};
    return {{"weights_mapped_bytes", double(weights_.mapped_bytes())},
            {"weights_copied_bytes", double(weights_.copied_bytes())},
            {"batch_pool_bytes", double(batches_.bytes())},
            {"rope_table_bytes", double(rope_tables_.bytes())},
            {"pipelines", double(kernels_.count())}};
  }

  std::unique_ptr<Cache> make_cache(int max_context) override;
  int pass_rows() const override { return options().chunk_tokens; }
  void forward(std::span<Chunk> chunks, CallCounters& counters) override;
  void add_call_stats(const CallCounters& counters, Stats& stats) const override;
  const PassInspector* inspector() const override { return this; }

  // A forked process has neither the GPU nor usable locks of its driver: it does not touch its copy of the
  // engine, not even to free it.
  bool forked() const { return forked_; }

 private:
  std::vector<Dispatch> plan(int tokens, int position) const override;
  std::vector<float> intermediate(const Cache& cache, const std::string& name) const override;

  class SessionCache;
  void require_unforked() const {
    if (forked_)
      throw ForkError(
          "this process was forked from one that uses the GPU, which only that one can; open the model again "
          "here, or start processes by 'spawn'");
  }
  void forward(Chunk& chunk, CallCounters& counters);
  void deliver(Chunk& chunk, const Batch& batch) const;
  void keep_intermediates(const Chunk& chunk, const Batch& batch) const;

  const Device device_;
  const Model padded_;  // the model itself, where its dimensions suit the kernels
  WeightBuffers weights_;
  const ForwardPass forward_;
  const Kernels kernels_;
  RopeTables rope_tables_;
  BatchPool batches_;
  std::atomic<int> sessions_{0};
  bool forked_ = false;
  const ForkHandler fork_handler_{[] {}, [this](bool child) { forked_ = forked_ || child; }};
};

// K and V of a session in buffers of its own, and, when debugging, the intermediate results of its last
// chunk.
class MetalEngine::SessionCache final : public Cache {
 public:
  SessionCache(MetalEngine& engine, int max_context)
      : metal_(engine),
        cache_(std::make_unique<KvCache>(engine.padded_.config, engine.options().kv_type, max_context)) {
    ++metal_.sessions_;
  }
  ~SessionCache() override {
    if (metal_.forked_) {
      static_cast<void>(cache_.release());
      return;
    }
    const AutoreleasePool pool;
    cache_.reset();
    if (--metal_.sessions_ == 0) metal_.batches_.trim();
  }

  void reserve(int kept, int end, CallCounters& counters) override;
  void truncate(int) override {}
  void share(const Cache& from, int positions) override;
  std::span<const PageId> pages() const override { return {}; }
  void adopt(std::vector<PageId>) override {}
  void read(int layer, bool values, int positions, std::byte* out) const override;
  void write(int layer, bool values, int positions, const std::byte* in) override;
  std::size_t bytes() const override { return cache_->bytes(); }

  const KvCache& buffers() const { return *cache_; }
  std::map<std::string, std::vector<float>> intermediates;

 private:
  struct Heads {  // of K or V at one position
    std::size_t count, bytes, padded_bytes;
  };
  Heads heads_of(bool values) const;
  View rows_of(int layer, bool values) const;

  MetalEngine& metal_;
  std::unique_ptr<KvCache> cache_;  // until the destructor
};

void MetalEngine::forward(std::span<Chunk> chunks, CallCounters& counters) {
  require_unforked();
  for (Chunk& chunk : chunks) forward(chunk, counters);
}

// The buffers of a pass: K and V of a session, and activations from the pool.
class MetalPassBuffers final : public PassBuffers {
 public:
  MetalPassBuffers(const Device& device, Batch& batch, const KvCache& cache, RopeTables::ByLayer rope_tables)
      : device_(device), batch_(batch), cache_(cache), rope_tables_(std::move(rope_tables)) {}
  View get(BufferName name, std::size_t bytes) override { return batch_.get(device_, name, bytes); }
  LayerCache cache(int layer) override { return cache_.layer(layer); }
  View rope_table(int layer) override {
    return view_of((*rope_tables_)[std::size_t(layer)], BufferName::kRopeTable);
  }

 private:
  const Device& device_;
  Batch& batch_;
  const KvCache& cache_;
  const RopeTables::ByLayer rope_tables_;
};

PassShape shape_of(const Chunk& chunk) {
  return {int(chunk.tokens.size()), chunk.position, chunk.output};
}

void MetalEngine::forward(Chunk& chunk, CallCounters& counters) {
  const AutoreleasePool pool;
  const Device device = device_.counting(counters);
  const BatchPool::Lease lease = batches_.take();
  Batch& batch = *lease;
  const KvCache& cache = static_cast<const SessionCache&>(*chunk.cache).buffers();
  MetalPassBuffers buffers(device, batch, cache, rope_tables_.by_layer());

  const auto upload = [&](BufferName name, std::span<const TokenId> ids) {
    std::memcpy(buffer_of(buffers.get(name, ids.size_bytes())).contents, ids.data(), ids.size_bytes());
  };
  upload(BufferName::kIds, chunk.tokens);
  if (chunk.output == Output::kLogProbs) upload(BufferName::kTargets, chunk.targets);
  if (chunk.trace) {
    TracingEncoder encoder(device, kernels_, *chunk.trace);
    forward_.encode(encoder, shape_of(chunk), buffers);
  } else {
    id<MTLCommandBuffer> commands = device.command_buffer(
        std::to_string(chunk.tokens.size()) + " tokens at position " + std::to_string(chunk.position));
    {
      MetalEncoder encoder(commands, device, kernels_);
      forward_.encode(encoder, shape_of(chunk), buffers);
    }
    device.run(commands);
  }
  if (device.debug()) keep_intermediates(chunk, batch);
  deliver(chunk, batch);
}

std::vector<Dispatch> MetalEngine::plan(int tokens, int position) const {
  return record_prompt(forward_, {tokens, position, Output::kGreedy});
}

// Copies the output of the chunk from the buffers that the host can read.
void MetalEngine::deliver(Chunk& chunk, const Batch& batch) const {
  const auto contents = [&](BufferName name) { return batch.peek(name).contents; };
  switch (chunk.output) {
    case Output::kNone:
      break;
    case Output::kGreedy: {
      const auto* best = static_cast<const Candidate*>(contents(BufferName::kResult));
      chunk.token = best->index == ARGMAX_NONE ? -1 : TokenId(best->index);
      break;
    }
    case Output::kLogits:
      std::memcpy(chunk.logits, contents(BufferName::kHostLogits),
                  std::size_t(config().vocab_size) * sizeof(float));
      break;
    case Output::kSampled:
      chunk.choose_token({static_cast<const float*>(contents(BufferName::kHostLogits)),
                          std::size_t(config().vocab_size)});
      break;
    case Output::kLogProbs:
      std::memcpy(chunk.log_probs, contents(BufferName::kLogProbs), chunk.tokens.size() * sizeof(float));
      break;
  }
}

void MetalEngine::keep_intermediates(const Chunk& chunk, const Batch& batch) const {
  auto& intermediates = static_cast<SessionCache&>(*chunk.cache).intermediates;
  intermediates.clear();
  for (const ForwardPass::Intermediate& wanted : forward_.intermediates(shape_of(chunk))) {
    const void* contents = batch.peek(wanted.name).contents;
    std::vector<float>& kept = intermediates[traits_of(wanted.name).label];
    if (wanted.precision == Precision::kF16) {
      const auto* bits = static_cast<const std::uint16_t*>(contents);
      for (std::size_t i = 0; i < wanted.elements; ++i) kept.push_back(half_to_float(bits[i]));
    } else {
      const auto* values = static_cast<const float*>(contents);
      kept.assign(values, values + wanted.elements);
    }
  }
}

std::vector<float> MetalEngine::intermediate(const Cache& cache, const std::string& name) const {
  if (!device_.debug()) throw std::invalid_argument("intermediates are kept with METAL_PREFILL_DEBUG=1 only");
  const auto& intermediates = static_cast<const SessionCache&>(cache).intermediates;
  const auto kept = intermediates.find(name);
  if (kept == intermediates.end())
    throw std::invalid_argument("the last call left no intermediate '" + name + "'");
  return kept->second;
}

void MetalEngine::add_call_stats(const CallCounters& counters, Stats& stats) const {
  stats["dispatches"] = double(counters.dispatches);
  stats["command_buffers"] = double(counters.command_buffers);
  stats["allocations"] = double(counters.allocations);
  stats["gpu_seconds"] = counters.gpu_seconds;
}

std::unique_ptr<Cache> MetalEngine::make_cache(int max_context) {
  require_unforked();
  const AutoreleasePool pool;
  rope_tables_.reserve(device_, std::min(max_context, kFirstRopePositions));
  return std::make_unique<SessionCache>(*this, max_context);
}

void MetalEngine::SessionCache::reserve(int, int end, CallCounters& counters) {
  metal_.require_unforked();
  const AutoreleasePool pool;
  const Device device = metal_.device_.counting(counters);
  metal_.rope_tables_.reserve(device, end);
  cache_->reserve(device, end);
}

void MetalEngine::SessionCache::share(const Cache& from, int positions) {
  CallCounters uncounted;
  reserve(0, positions, uncounted);
  std::vector<std::byte> rows;
  for (int layer = 0; layer < metal_.config().n_layers; ++layer) {
    for (const bool values : {false, true}) {
      const Heads heads = heads_of(values);
      rows.resize(std::size_t(positions) * heads.count * heads.bytes);
      from.read(layer, values, positions, rows.data());
      write(layer, values, positions, rows.data());
    }
  }
}

// Rows are exported and imported without the dimensions that padding added to the heads.
void MetalEngine::SessionCache::read(int layer, bool values, int positions, std::byte* out) const {
  metal_.require_unforked();
  const AutoreleasePool pool;
  const View rows = rows_of(layer, values);
  const Heads heads = heads_of(values);
  const std::size_t n = std::size_t(positions) * heads.count;
  if (heads.bytes == heads.padded_bytes) return metal_.device_.download(rows, out, n * heads.bytes);
  std::vector<std::byte> padded(n * heads.padded_bytes);
  metal_.device_.download(rows, padded.data(), padded.size());
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(out + i * heads.bytes, padded.data() + i * heads.padded_bytes, heads.bytes);
}

void MetalEngine::SessionCache::write(int layer, bool values, int positions, const std::byte* in) {
  metal_.require_unforked();
  const AutoreleasePool pool;
  const View rows = rows_of(layer, values);
  const Heads heads = heads_of(values);
  const std::size_t n = std::size_t(positions) * heads.count;
  if (heads.bytes == heads.padded_bytes) return metal_.device_.upload(rows, in, n * heads.bytes);
  std::vector<std::byte> padded(n * heads.padded_bytes);
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(padded.data() + i * heads.padded_bytes, in + i * heads.bytes, heads.bytes);
  metal_.device_.upload(rows, padded.data(), padded.size());
}

MetalEngine::SessionCache::Heads MetalEngine::SessionCache::heads_of(bool values) const {
  const Config& own = metal_.config();
  const Config& padded = metal_.padded_.config;
  const std::size_t element = metal_.options().kv_type == KvType::kF16 ? 2 : 4;
  return {std::size_t(own.n_kv_heads), std::size_t(values ? own.value_dim : own.key_dim) * element,
          std::size_t(values ? padded.value_dim : padded.key_dim) * element};
}

View MetalEngine::SessionCache::rows_of(int layer, bool values) const {
  const LayerCache rows = cache_->layer(layer);
  return values ? rows.values : rows.keys;
}

}  // namespace
}  // namespace metal

std::shared_ptr<Engine> make_metal_engine(Model model, const EngineOptions& options) {
  const metal::AutoreleasePool pool;
  return {new metal::MetalEngine(std::move(model), options), [](metal::MetalEngine* engine) {
            if (engine->forked()) return;
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
