// The Metal engine: the weights and pipelines that sessions share, and how passes go through the GPU.
#include "../paged_cache.h"
#include "../prefix_tree.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "buffers.h"
#include "kv_pages.h"
#include "metal_encoder.h"
#include "padding.h"
#include "recorder.h"
#include "residency.h"
#include "rope_tables.h"

namespace metal_prefill {
namespace metal {
namespace {

// Rows of the rope tables that a session begins with, so that its first prompts need not wait for them.
constexpr int kFirstRopePositions = 2048;

// Most bytes of K and V where the caller sets no limit: half of what the weights leave of the memory that
// command buffers can use. Beyond it they fail. A cache that grows is copied from its buffer to a larger one,
// so that the two together must fit.
std::size_t default_kv_memory(const Device& device, const WeightBuffers& weights) {
  const std::size_t working_set = device.mtl().recommendedMaxWorkingSetSize;  // 0: unknown
  if (working_set == 0) return half_of_the_memory();
  const std::size_t taken = std::min(weights.mapped_bytes() + weights.copied_bytes(), working_set - 1);
  return std::min(half_of_the_memory(), (working_set - taken + 1) / 2);
}

class MetalEngine final : public Engine, private PassInspector {
 public:
  MetalEngine(Model model, const EngineOptions& options)
      : Engine(std::move(model), options),
        device_(Device::of_engine(options.metal)),
        padded_(fits_kernels(model_.config) ? model_ : pad_model(model_)),
        weights_(device_, padded_),
        forward_(device_.tuning(), padded_, options_, weights_),
        kernels_(device_, forward_.kernels(), forward_.cache_shape(), options_.metal.pipeline_folder),
        rope_tables_(padded_),
        residency_(device_, options_.metal.resident_seconds),
        store_(device_, residency_, forward_.page_layout(), options_.poison_cache),
        pool_(store_, options_.kv_memory > 0 ? options_.kv_memory : default_kv_memory(device_, weights_)),
        prefixes_(pool_, std::min(options_.prefix_memory, pool_.limit_bytes()) / pool_.page_bytes()) {
    weights_.wait_until_read();
    for (id<MTLBuffer> buffer : weights_.buffers()) residency_.add(buffer);
    pool_.reclaim = [this] { return prefixes_.evict(); };
    pool_.forget = [this](PageId page) { return prefixes_.forget(page); };
    kernels_.check(forward_.kernels([this](const KernelKey& key) { return kernels_.max_threads(key); }));
  }

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
            {"batch_pool_bytes", double(batches_.bytes())},
            {"rope_table_bytes", double(rope_tables_.bytes())},
            {"prefix_bytes", double(prefixes_.pages() * pool_.page_bytes())},
            {"kv_pool_bytes", double(pool_.pages_in_use() * pool_.page_bytes())},
            {"matmul_tensor", double(device_.tuning().matmul_tensor)},
            {"pipelines", double(kernels_.count())},
            {"pipelines_compiled", double(kernels_.compiled_now())}};
  }

  std::unique_ptr<Cache> make_cache(int max_context) override;
  PrefixTree* prefixes() override { return &prefixes_; }
  void check_fits(int positions) const override { pool_.check_fits(positions); }
  int pass_rows() const override { return forward_.pass_rows(); }
  bool runs_ahead() const override { return true; }
  int exact_rows() const override { return std::min(kFewTokens, pass_rows()); }
  void forward(std::span<Chunk> chunks, CallCounters& counters) override;
  void add_call_stats(const CallCounters& counters, Stats& stats) const override;
  const PassInspector* inspector() const override { return this; }

  // A forked process has neither the GPU nor usable locks of its driver: it does not touch its copy of the
  // engine, not even to free it.
  bool forked() const { return forked_; }

 private:
  std::vector<PipelineInfo> pipelines() const override { return kernels_.built(); }
  bool shaders_were_compiled() const override { return kernels_.compiled(); }
  std::string no_matmul_tensor() const override { return device_.no_matmul_tensor(); }
  std::vector<Dispatch> plan(int tokens, int position) const override;
  std::vector<float> intermediate(const Cache& cache, const std::string& name) const override;

  class MetalCache;
  class SentPass;
  struct RequestedPass;
  struct Ahead;
  void require_unforked() const {
    if (forked_)
      throw ForkError(
          "this process was forked from one that uses the GPU, which only that one can; open the model again "
          "here, or start processes by 'spawn'");
  }
  void run_pass(std::span<Chunk* const> chunks, CallCounters& counters);
  void trace_pass(std::span<Chunk* const> chunks, CallCounters& counters);
  std::vector<RequestedPass> passes_for(std::span<Chunk* const> chunks, KvPages::Hold& pages);
  std::shared_ptr<SentPass> send_after(std::span<Chunk* const> chunks, KvPages::Hold& pages,
                                       const SentPass& before);
  static void fill(const PassTables& tables, const PassRows& rows, std::span<Chunk* const> chunks);
  void deliver(const PassRows& rows, std::span<Chunk* const> chunks, const Batch& batch) const;
  void keep_intermediates(const PassRows& rows, std::span<Chunk* const> chunks, const Batch& batch) const;

  const Device device_;
  const Model padded_;  // the model itself, where its dimensions suit the kernels
  WeightBuffers weights_;
  const ForwardPass forward_;
  const Kernels kernels_;
  RopeTables rope_tables_;
  Residency residency_;
  KvPages store_;
  PagePool pool_;
  PrefixTree prefixes_;
  BatchPool batches_;
  std::atomic<int> sessions_{0};
  bool forked_ = false;
  const ForkHandler fork_handler_{[] {}, [this](bool child) { forked_ = forked_ || child; }};
};

// The buffers of a pass: pages of K and V, and activations from the pool.
class MetalPassBuffers final : public PassBuffers {
 public:
  // `choices`: of the pass before, or null.
  MetalPassBuffers(const Device& device, Batch& batch, const KvPages::Hold& pages,
                   RopeTables::ByLayer rope_tables, id<MTLBuffer> choices)
      : device_(device),
        batch_(batch),
        pages_(pages),
        rope_tables_(std::move(rope_tables)),
        choices_(choices) {}
  View get(BufferName name, std::size_t bytes) override { return batch_.get(device_, name, bytes); }
  LayerCache cache(int layer) override { return pages_.layer(layer); }
  View rope_table(int layer) override {
    return view_of((*rope_tables_)[std::size_t(layer)], BufferName::kRopeTable);
  }
  View choices() override { return choices_ ? view_of(choices_, BufferName::kResult) : View{}; }

 private:
  const Device& device_;
  Batch& batch_;
  const KvPages::Hold& pages_;
  const RopeTables::ByLayer rope_tables_;
  const id<MTLBuffer> choices_;
};

// A pass on the GPU, with all that it uses there but the pages.
class MetalEngine::SentPass {
 public:
  // `choices`: of a pass that was sent before it, which finds its tokens; null: the chunks have them.
  SentPass(MetalEngine& engine, std::span<Chunk* const> chunks, KvPages::Hold& pages, id<MTLBuffer> choices);

  // Waits for it and counts it, once. Throws DeviceError when the GPU failed, each time.
  void finish(KvPages::Hold& pages, CallCounters& counters) {
    if (!std::exchange(is_finished_, true)) {
      try {
        encoder_.finish();
        pages.finished(last_);
        counters += counters_;
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
    if (failure_) std::rethrow_exception(failure_);
  }
  const PassRows& rows() const { return rows_; }
  const Batch& batch() const { return *lease_; }

 private:
  CallCounters counters_;
  const Device device_;  // which counts
  const BatchPool::Lease lease_;
  [[maybe_unused]] const id<MTLBuffer> choices_;  // kept: its command buffers do not retain it
  const RopeTables::ByLayer rope_tables_;
  const PassRows rows_;
  id<MTLCommandBuffer> last_;
  bool is_finished_ = false;
  std::exception_ptr failure_;
  MetalEncoder encoder_;  // the last member: it waits for the GPU before the others are gone
};

// A pass, and by its chunks those of a call; null: nobody asks for that one any more.
struct MetalEngine::RequestedPass {
  std::shared_ptr<SentPass> pass;
  std::vector<Chunk*> chunks;
};

// A pass with the token after those of a session, and perhaps those of others, which the GPU began before the
// caller knew the token.
struct MetalEngine::Ahead {
  std::shared_ptr<SentPass> pass;
  std::size_t chunk;  // of the pass: that of the session
  int position;
  TokenId token;  // the choice that it computes with
  std::vector<PageId> pages;
};

// The pages of a session, and, when debugging, the intermediate results of its last pass.
class MetalEngine::MetalCache final : public PagedCache {
 public:
  explicit MetalCache(MetalEngine& engine) : PagedCache(engine.pool_), metal_(engine) { ++metal_.sessions_; }
  ~MetalCache() override {
    drop_ahead();
    if (metal_.forked_) return;
    if (--metal_.sessions_ == 0) metal_.batches_.trim();
  }

  void reserve(int kept, int end, CallCounters& counters) override;
  void truncate(int positions) override {
    drop_ahead();
    PagedCache::truncate(positions);
  }
  void share(const Cache& from, int positions) override {
    drop_ahead();
    PagedCache::share(from, positions);
  }
  void adopt(std::vector<PageId> pages) override {
    drop_ahead();
    PagedCache::adopt(std::move(pages));
  }
  void read(int layer, bool values, int positions, std::byte* out) const override;
  void write(int layer, bool values, int positions, const std::byte* in) override;

  void keep_ahead(Ahead ahead) { ahead_ = std::make_unique<Ahead>(std::move(ahead)); }
  // What computes the chunk, where it was sent ahead; null: it was not, and nothing is on its way any more.
  std::unique_ptr<Ahead> take_ahead(const Chunk& chunk);
  // The GPU may be at work on it still, and write to a page that another session takes now: passes and blits
  // that come later wait for it (see KvPages::Hold).
  void drop_ahead() {
    // A forked process has no GPU to wait for, so it leaves what its parent sent.
    if (ahead_ && metal_.forked_) {
      [[maybe_unused]] const Ahead* left = ahead_.release();
    }
    const AutoreleasePool pool;
    ahead_.reset();
  }

  using Intermediates = std::map<std::string, std::vector<float>>;
  std::shared_ptr<const Intermediates> intermediates;

 private:
  struct Heads {  // of K or V at one position
    std::size_t count, bytes, padded_bytes;
  };
  Heads heads_of(bool values) const;

  MetalEngine& metal_;
  std::unique_ptr<Ahead> ahead_;
};

// Chunks with few tokens get, bit for bit, what they would get alone, for which they need a pass without
// longer ones.
void MetalEngine::forward(std::span<Chunk> chunks, CallCounters& counters) {
  require_unforked();
  residency_.used();
  std::vector<Chunk*> few, many;
  for (Chunk& chunk : chunks) (chunk.tokens.size() <= std::size_t(kFewTokens) ? few : many).push_back(&chunk);
  for (const std::vector<Chunk*>* together : {&few, &many})
    if (!together->empty()) run_pass(*together, counters);
}

std::string label_of(const PassRows& rows, std::span<Chunk* const> chunks) {
  const std::string tokens = std::to_string(rows.all.count) + " tokens ";
  return chunks.size() == 1 ? tokens + "at position " + std::to_string(chunks[0]->position)
                            : tokens + "of " + std::to_string(chunks.size()) + " sequences";
}

std::vector<PassChunk> shapes_of(std::span<Chunk* const> chunks) {
  std::vector<PassChunk> shapes;
  for (const Chunk* chunk : chunks)
    shapes.push_back(
        {int(chunk->tokens.size()), chunk->position, row_output_of(chunk->output), rows_of(chunk->output)});
  return shapes;
}

MetalEngine::SentPass::SentPass(MetalEngine& engine, std::span<Chunk* const> chunks, KvPages::Hold& pages,
                                id<MTLBuffer> choices)
    : device_(engine.device_.counting(counters_)),
      lease_(engine.batches_.take()),
      choices_(choices),
      rope_tables_(engine.rope_tables_.by_layer()),
      rows_(engine.forward_.rows_of(shapes_of(chunks))),
      encoder_(device_, engine.kernels_, label_of(rows_, chunks),
               choices || pages.is_in_use() ? Gpu::kBusy : Gpu::kIdle) {
  MetalPassBuffers buffers(device_, *lease_, pages, rope_tables_, choices);
  fill(engine.forward_.tables(rows_, buffers), rows_, chunks);
  engine.forward_.encode(encoder_, rows_, buffers);
  last_ = encoder_.send();
  pages.sent(last_);
}

void MetalEngine::run_pass(std::span<Chunk* const> chunks, CallCounters& counters) {
  const AutoreleasePool pool;
  if (chunks[0]->trace) return trace_pass(chunks, counters);
  KvPages::Hold pages(store_);
  const std::vector<RequestedPass> passes = passes_for(chunks, pages);
  std::shared_ptr<SentPass> next;
  const bool goes_on = std::all_of(chunks.begin(), chunks.end(), [](const Chunk* chunk) {
    const auto* greedy = std::get_if<GreedyOutput>(&chunk->output);
    return greedy && greedy->continues;
  });
  // Its rows are those that the pass after it finds the tokens of.
  if (goes_on && std::equal(chunks.begin(), chunks.end(), passes[0].chunks.begin(), passes[0].chunks.end()))
    next = send_after(chunks, pages, *passes[0].pass);
  for (const auto& [pass, asking] : passes) {
    pass->finish(pages, counters);
    if (device_.debug()) keep_intermediates(pass->rows(), asking, pass->batch());
    deliver(pass->rows(), asking, pass->batch());
  }
  if (!next) return;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const std::span<const PageId> held = chunks[i]->cache->pages();
    static_cast<MetalCache&>(*chunks[i]->cache)
        .keep_ahead({next,
                     i,
                     chunks[i]->position + int(chunks[i]->tokens.size()),
                     std::get<GreedyOutput>(chunks[i]->output).choices.chosen[0],
                     {held.begin(), held.end()}});
  }
}

// Those of the chunks that were sent ahead, and one with the others.
std::vector<MetalEngine::RequestedPass> MetalEngine::passes_for(std::span<Chunk* const> chunks,
                                                                KvPages::Hold& pages) {
  std::vector<RequestedPass> passes;
  std::vector<Chunk*> others;
  for (Chunk* chunk : chunks) {
    const std::unique_ptr<Ahead> ahead = static_cast<MetalCache&>(*chunk->cache).take_ahead(*chunk);
    if (!ahead) {
      others.push_back(chunk);
      continue;
    }
    auto asked = std::find_if(passes.begin(), passes.end(),
                              [&](const RequestedPass& other) { return other.pass == ahead->pass; });
    if (asked == passes.end()) {
      const std::size_t n = std::size_t(ahead->pass->rows().all.count);  // chunks of one token
      asked = passes.insert(passes.end(), {ahead->pass, std::vector<Chunk*>(n)});
    }
    asked->chunks[ahead->chunk] = chunk;
  }
  if (!others.empty())
    passes.push_back({std::make_shared<SentPass>(*this, others, pages, nil), std::move(others)});
  return passes;
}

void MetalEngine::trace_pass(std::span<Chunk* const> chunks, CallCounters& counters) {
  const Device device = device_.counting(counters);
  const BatchPool::Lease lease = batches_.take();
  for (Chunk* chunk : chunks) static_cast<MetalCache&>(*chunk->cache).drop_ahead();
  KvPages::Hold pages(store_);
  pages.settle();
  MetalPassBuffers buffers(device, *lease, pages, rope_tables_.by_layer(), nil);
  const PassRows rows = forward_.rows_of(shapes_of(chunks));
  fill(forward_.tables(rows, buffers), rows, chunks);
  TracingEncoder encoder(device, kernels_, *chunks[0]->trace);
  forward_.encode(encoder, rows, buffers);
  if (device.debug()) keep_intermediates(rows, chunks, *lease);
  deliver(rows, chunks, *lease);
}

// The pass with the tokens that `before` chooses. An error of it is not one of the call that sends it: null.
std::shared_ptr<MetalEngine::SentPass> MetalEngine::send_after(std::span<Chunk* const> chunks,
                                                               KvPages::Hold& pages, const SentPass& before) {
  static constexpr TokenId kUnknown[] = {0};       // the host writes no tokens that a kernel reads
  std::vector<TokenId> chosen(chunks.size(), -1);  // filled by the calls that ask for the pass, not here
  std::vector<Chunk> next(chunks.size());
  std::vector<Chunk*> pointers;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    next[i].tokens = kUnknown;
    next[i].position = chunks[i]->position + int(chunks[i]->tokens.size());
    next[i].cache = chunks[i]->cache;
    next[i].output = GreedyOutput{.choices = {.chosen = {&chosen[i], 1}}};
    pointers.push_back(&next[i]);
  }
  try {
    return std::make_shared<SentPass>(*this, pointers, pages, before.batch().peek(BufferName::kResult));
  } catch (const DeviceError&) {
    return nullptr;
  }
}

std::unique_ptr<MetalEngine::Ahead> MetalEngine::MetalCache::take_ahead(const Chunk& chunk) {
  if (!ahead_) return nullptr;
  const std::span<const PageId> held = pages();
  const bool same_pages = held.size() >= ahead_->pages.size() &&
                          std::equal(ahead_->pages.begin(), ahead_->pages.end(), held.begin());
  const bool is_it =
      chunk.tokens.size() == 1 && chunk.tokens[0] == ahead_->token && chunk.position == ahead_->position &&
      std::holds_alternative<GreedyOutput>(chunk.output) && rows_of(chunk.output) == 1 && same_pages;
  if (!is_it) drop_ahead();
  return std::move(ahead_);
}

template <typename T>
void copy(std::span<const T> from, const View& to, std::size_t index = 0) {
  if (!from.empty())
    std::memcpy(static_cast<T*>(buffer_of(to).contents) + index, from.data(), from.size_bytes());
}

void MetalEngine::fill(const PassTables& tables, const PassRows& rows, std::span<Chunk* const> chunks) {
  copy(std::span(rows.rows), tables.rows);
  copy(std::span(rows.tiles), tables.tiles);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const std::size_t first = rows.first_page[i], end = rows.first_page[i + 1];
    copy(chunks[i]->cache->pages().first(end - first), tables.pages, first);
  }
  const auto tokens_of = [](const RowRun& run, std::span<const TokenId> tokens) {
    return tokens.subspan(std::size_t(run.token), std::size_t(run.count));
  };
  for (const RowRun& run : rows.all.runs)
    copy(tokens_of(run, chunks[std::size_t(run.chunk)]->tokens), tables.ids, std::size_t(run.row));
  for (const RowRun& run : rows.wanted.runs)
    if (const auto* scored = std::get_if<LogProbsOutput>(&chunks[std::size_t(run.chunk)]->output))
      copy(scored->targets, tables.targets, std::size_t(run.row - rows.scored.first));
}

std::vector<Dispatch> MetalEngine::plan(int tokens, int position) const {
  return record_prompt(forward_, tokens, position, RowOutput::kGreedy);
}

// Copies the outputs from the buffers that the host can read.
void MetalEngine::deliver(const PassRows& rows, std::span<Chunk* const> chunks, const Batch& batch) const {
  const auto contents = [&](BufferName name) { return batch.peek(name).contents; };
  const std::size_t vocab_size = std::size_t(config().vocab_size);
  // Logits of rows for the host, [rows][vocab_size].
  const auto logits_of = [&](const RowRun& run) {
    const auto* logits = static_cast<const float*>(contents(BufferName::kHostLogits));
    return logits + std::size_t(run.row - rows.logits.first) * vocab_size;
  };
  for (const RowRun& run : rows.wanted.runs) {
    if (!chunks[std::size_t(run.chunk)]) continue;
    std::visit(Overloaded{[](const NoOutput&) {},
                          [&](const GreedyOutput& greedy) {
                            const auto* best = static_cast<const Candidate*>(contents(BufferName::kResult));
                            best += run.row - rows.greedy.first;
                            for (TokenId& chosen : greedy.choices.chosen) {
                              chosen = best->index == ARGMAX_NONE ? -1 : TokenId(best->index);
                              ++best;
                            }
                          },
                          [&](SampledOutput& sampled) {
                            const float* logits = logits_of(run);
                            for (int i = 0; i < run.count; ++i)
                              sampled.choose(i, {logits + std::size_t(i) * vocab_size, vocab_size});
                          },
                          [&](const LogitsOutput& all) {
                            std::memcpy(all.logits, logits_of(run), vocab_size * sizeof(float));
                          },
                          [&](const LogProbsOutput& scored) {
                            const auto* log_probs =
                                static_cast<const float*>(contents(BufferName::kLogProbs));
                            log_probs += run.row - rows.scored.first;
                            std::memcpy(scored.log_probs, log_probs, std::size_t(run.count) * sizeof(float));
                          },
                          [&](const HiddenOutput& hidden) {
                            // Rows of the residual stream follow those that are normed.
                            const auto* states = static_cast<const float*>(contents(BufferName::kHidden));
                            const std::size_t first = std::size_t(run.row - rows.hidden.first);
                            const std::size_t dim = std::size_t(hidden.dim),
                                              padded_dim = std::size_t(padded_.config.dim);
                            const float factor = hidden.normed ? 1.0f : config().residual_scale;
                            for (std::size_t i = 0; i < std::size_t(run.count); ++i) {
                              const float* x = states + (first + i) * padded_dim;
                              std::transform(x, x + dim, hidden.states + i * dim,
                                             [&](float value) { return value * factor; });
                            }
                          }},
               chunks[std::size_t(run.chunk)]->output);
  }
}

void MetalEngine::keep_intermediates(const PassRows& rows, std::span<Chunk* const> chunks,
                                     const Batch& batch) const {
  auto all = std::make_shared<MetalCache::Intermediates>();
  for (const ForwardPass::Intermediate& wanted : forward_.intermediates(rows)) {
    const void* contents = batch.peek(wanted.name).contents;
    std::vector<float>& kept = (*all)[traits_of(wanted.name).label];
    if (wanted.precision == Precision::kF16) {
      const auto* bits = static_cast<const std::uint16_t*>(contents);
      for (std::size_t i = 0; i < wanted.elements; ++i) kept.push_back(half_to_float(bits[i]));
    } else {
      const auto* values = static_cast<const float*>(contents);
      kept.assign(values, values + wanted.elements);
    }
  }
  for (Chunk* chunk : chunks)
    if (chunk) static_cast<MetalCache&>(*chunk->cache).intermediates = all;
}

std::vector<float> MetalEngine::intermediate(const Cache& cache, const std::string& name) const {
  if (!device_.debug()) throw std::invalid_argument("intermediates are kept with METAL_PREFILL_DEBUG=1 only");
  const auto intermediates = static_cast<const MetalCache&>(cache).intermediates;
  const auto kept = intermediates ? intermediates->find(name) : MetalCache::Intermediates::const_iterator();
  if (!intermediates || kept == intermediates->end())
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
  return std::make_unique<MetalCache>(*this);
}

void MetalEngine::MetalCache::reserve(int kept, int end, CallCounters& counters) {
  metal_.require_unforked();
  // Rows from `kept` on are written anew: what was sent ahead stays where it begins there, or after it.
  if (ahead_ && kept < ahead_->position) drop_ahead();
  const AutoreleasePool pool;
  metal_.rope_tables_.reserve(metal_.device_.counting(counters), end);
  PagedCache::reserve(kept, end, counters);
}

// Rows are exported and imported without the dimensions that padding added to the heads.
void MetalEngine::MetalCache::read(int layer, bool values, int positions, std::byte* out) const {
  metal_.require_unforked();
  const Heads heads = heads_of(values);
  if (heads.bytes == heads.padded_bytes) return metal_.store_.read(pages(), layer, values, positions, out);
  const std::size_t n = std::size_t(positions) * heads.count;
  std::vector<std::byte> padded(n * heads.padded_bytes);
  metal_.store_.read(pages(), layer, values, positions, padded.data());
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(out + i * heads.bytes, padded.data() + i * heads.padded_bytes, heads.bytes);
}

void MetalEngine::MetalCache::write(int layer, bool values, int positions, const std::byte* in) {
  metal_.require_unforked();
  drop_ahead();
  const Heads heads = heads_of(values);
  if (heads.bytes == heads.padded_bytes) return metal_.store_.write(pages(), layer, values, positions, in);
  const std::size_t n = std::size_t(positions) * heads.count;
  std::vector<std::byte> padded(n * heads.padded_bytes);
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(padded.data() + i * heads.padded_bytes, in + i * heads.bytes, heads.bytes);
  metal_.store_.write(pages(), layer, values, positions, padded.data());
}

MetalEngine::MetalCache::Heads MetalEngine::MetalCache::heads_of(bool values) const {
  const Config& own = metal_.config();
  const Config& padded = metal_.padded_.config;
  const std::size_t element = metal_.forward_.page_layout().element;
  return {std::size_t(own.n_kv_heads), std::size_t(values ? own.value_dim : own.key_dim) * element,
          std::size_t(values ? padded.value_dim : padded.key_dim) * element};
}

}  // namespace
}  // namespace metal

std::shared_ptr<Engine> make_metal_engine(Model model, const EngineOptions& options) {
  const metal::AutoreleasePool pool;
  const auto make = [&model](const EngineOptions& chosen) {
    return std::shared_ptr<Engine>(new metal::MetalEngine(model, chosen), [](metal::MetalEngine* engine) {
      if (engine->forked()) return;
      const metal::AutoreleasePool drained;
      delete engine;
    });
  };
  try {
    return make(options);
  } catch (const metal::TensorKernelError& error) {
    EngineOptions without = options;
    without.metal.no_matmul_tensor = error.what();
    return make(without);
  }
}

std::map<std::string, std::string> metal_device() {
  const metal::AutoreleasePool pool;
  try {
    const metal::Device device;
    return {{"name", device.name()},
            {"matmul_tensor", device.tuning().matmul_tensor ? "where it passes a trial" : "not for this GPU"},
            {"families", device.families()},
            {"tuned_as_family", std::to_string(device.tuning().family)},
            {"tuned_for_cores", std::to_string(device.tuning().cores)},
            {"max_buffer_bytes", std::to_string(device.mtl().maxBufferLength)},
            {"working_set_bytes", std::to_string(device.mtl().recommendedMaxWorkingSetSize)}};
  } catch (const DeviceError& error) {
    return {{"problem", error.what()}};
  }
}

}  // namespace metal_prefill
