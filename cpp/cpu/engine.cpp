// The portable engine: the forward pass, and what holds its memory.
//
// All threads run the same pass; each step divides its work among them and ends with a barrier. A step is one
// call for all tokens of the chunk, layer by layer.
#include "../engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "buffer.h"
#include "kernels.h"
#include "kv_cache.h"
#include "ops.h"
#include "threads.h"
#include "weights.h"

namespace metal_prefill::cpu {

namespace {

constexpr int kHeadBatch = 32;  // tokens whose logits exist at a time when a chunk is scored
// Tokens of a chunk that go through the layers together: what a step leaves for the next still lies in the
// cache then, and reading the weights again for the others costs less.
constexpr int kPassTokens = 256;

// Tokens [first, first + n) of a chunk. What the chunk is to put out of its last token, only the last piece
// does.
Chunk piece_of(const Chunk& chunk, int first, int n) {
  Chunk piece = chunk;
  piece.position += first;
  piece.tokens = chunk.tokens.subspan(std::size_t(first), std::size_t(n));
  if (chunk.output == Output::kLogProbs) {
    piece.targets = chunk.targets.subspan(std::size_t(first), std::size_t(n));
    piece.log_probs += first;
  } else if (first + n < int(chunk.tokens.size())) {
    piece.output = Output::kNone;
  }
  return piece;
}

// Frequencies that several layers share, and their rotation of the current chunk.
struct Rope {
  std::vector<float> frequencies;  // [rope_dim / 2]
  float magnitude = 1;
};

// Intermediate results of a chunk, for up to `tokens` tokens. One pool serves all sessions of an engine.
struct Workspace {
  int tokens = 0;
  Buffer memory;
  FloatRows x, y, q, k, v;     // residual stream; step output before its own norm; projections
  Activations a, att, h;       // normalized residual; attention; feed-forward
  float* rotations = nullptr;  // [ropes][tokens][rope_dim]
  float* logits = nullptr;     // [kHeadBatch][vocab_size] or one row
};

}  // namespace

class CpuEngine final : public Engine {
 public:
  CpuEngine(Model model, const EngineOptions& options);

  std::string device_name() const override;
  std::string backend() const override { return "cpu"; }
  Stats stats() const override;

  // Computes a chunk on top of what the cache holds. One chunk at a time.
  TokenId forward(KvCache& cache, const Chunk& chunk);

 protected:
  std::unique_ptr<Session> make_session(int max_context) override;

 private:
  void reserve(int tokens, int logit_rows);
  void forward_layers(const Context& c, const KvCache& cache, const Chunk& chunk);
  void forward_layer(const Context& c, const KvCache& cache, const Chunk& chunk, int layer, int first);
  void forward_head(const Context& c, const Chunk& chunk);
  int first_needed(const Chunk& chunk, int layer) const;

  const Kernels& kernels_;
  Team team_;
  Weights weights_;
  std::vector<Rope> ropes_;
  std::vector<int> layer_rope_;  // index into ropes_
  std::atomic<std::size_t> workspace_bytes_{0};
  std::mutex mutex_;  // guards what follows and the team
  std::vector<Scratch> scratch_;
  Workspace work_;
  Buffer logits_;  // behind work_.logits
};

void CpuEngine::forward_layers(const Context& c, const KvCache& cache, const Chunk& chunk) {
  const Config& m = config();
  const int n = int(chunk.tokens.size());
  c.worker.for_each(n, [&](int t) {
    float* x = work_.x.row(t);
    dequantize_row(model_.token_embedding.type, model_.token_embedding.row(chunk.tokens[std::size_t(t)]), x,
                   std::size_t(m.dim));
    if (m.embedding_scale != 1.0f)
      for (int d = 0; d < m.dim; ++d) x[d] *= m.embedding_scale;
  });
  for (std::size_t i = 0; i < ropes_.size(); ++i) {
    rope_table(c, ropes_[i].frequencies, ropes_[i].magnitude, chunk.position, n,
               work_.rotations + i * std::size_t(n) * std::size_t(m.rope_dim));
  }
  for (int layer = 0; layer < m.n_layers; ++layer)
    forward_layer(c, cache, chunk, layer, first_needed(chunk, layer));
  forward_head(c, chunk);
}

// The first token of the chunk whose output of this layer anything reads. Keys and values are needed of all.
int CpuEngine::first_needed(const Chunk& chunk, int layer) const {
  const int n = int(chunk.tokens.size());
  if (layer + 1 < config().n_layers || chunk.output == Output::kLogProbs) return 0;
  return chunk.output == Output::kNone ? n : n - 1;
}

void CpuEngine::forward_layer(const Context& c, const KvCache& cache, const Chunk& chunk, int layer,
                              int first) {
  const Config& m = config();
  const LayerWeights& w = model_.layers[std::size_t(layer)];
  const CpuLayer& l = weights_.layers[std::size_t(layer)];
  const int n = int(chunk.tokens.size());
  auto& [tokens, memory, x, y, q, k, v, a, att, h, rotations, logits] = work_;

  normalize(c, x, w.attn_norm, m.norm_eps, 0, n, a);
  multiply(c,
           {{l.wq, q.data, q.stride, &w.bq, false, first},
            {l.wk, k.data, k.stride, &w.bk},
            {l.wv, v.data, v.stride, &w.bv}},
           a, n);
  const std::size_t rope = std::size_t(layer_rope_[std::size_t(layer)]);
  const AttentionInput in{
      .config = m,
      .weights = w,
      .layer = layer,
      .position = chunk.position,
      .first = first,
      .tokens = n,
      .exact = options().compute == Compute::kF32,
      .rotation = m.uses_rope(layer) ? rotations + rope * std::size_t(n) * std::size_t(m.rope_dim) : nullptr,
      .q = q,
      .k = k,
      .v = v,
  };
  append_to_cache(c, in, cache);
  if (first == n) return;
  attend(c, in, cache, att.f32);
  quantize(c, att, first, n);
  if (w.post_attn_norm) {
    multiply(c, {{l.wo, y.data, y.stride, nullptr, false, first}}, att, n);
    add_normalized(c, y, w.post_attn_norm, m.norm_eps, first, n, x);
  } else {
    multiply(c, {{l.wo, x.data, x.stride, nullptr, true, first}}, att, n);
  }

  normalize(c, x, w.ffn_norm, m.norm_eps, first, n, a);
  multiply_gated(c, l.w_gate, l.w_up, m.activation, a, first, n, h);
  if (w.post_ffn_norm) {
    multiply(c, {{l.w_down, y.data, y.stride, nullptr, false, first}}, h, n);
    add_normalized(c, y, w.post_ffn_norm, m.norm_eps, first, n, x);
  } else {
    multiply(c, {{l.w_down, x.data, x.stride, nullptr, true, first}}, h, n);
  }
}

void CpuEngine::forward_head(const Context& c, const Chunk& chunk) {
  const Config& m = config();
  const int n = int(chunk.tokens.size());
  const std::size_t vocab_size = std::size_t(m.vocab_size);
  if (chunk.output == Output::kGreedy || chunk.output == Output::kLogits) {
    normalize(c, work_.x, model_.output_norm, m.norm_eps, n - 1, n, work_.a, n - 1);
    multiply_head(c, weights_.output, work_.a, 1,
                  chunk.output == Output::kLogits ? chunk.logits : work_.logits);
  } else if (chunk.output == Output::kLogProbs) {
    for (int first = 0; first < n; first += kHeadBatch) {
      const int end = std::min(n, first + kHeadBatch);
      normalize(c, work_.x, model_.output_norm, m.norm_eps, first, end, work_.a, first);
      multiply_head(c, weights_.output, work_.a, end - first, work_.logits);
      c.worker.for_each(end - first, [&](int i) {
        const std::size_t t = std::size_t(first + i);
        const TokenId target = chunk.targets[t];
        if (target < 0) return;
        const float* logits = work_.logits + std::size_t(i) * vocab_size;
        const float largest = *std::max_element(logits, logits + vocab_size);
        const double log_sum = std::log(kernels_.sum_exp(logits, largest, m.vocab_size));
        chunk.log_probs[t] = float(double(logits[target]) - double(largest) - log_sum);
      });
    }
  }
}

TokenId CpuEngine::forward(KvCache& cache, const Chunk& chunk) {
  const std::scoped_lock lock(mutex_);
  const int n = int(chunk.tokens.size());
  const int rows = chunk.output == Output::kLogProbs ? std::min(kHeadBatch, n)
                   : chunk.output == Output::kGreedy ? 1
                                                     : 0;
  reserve(std::min(kPassTokens, n), rows);
  for (Scratch& scratch : scratch_) scratch.best = {};
  team_.run([&](Worker& worker) {
    for (int first = 0; first < n; first += kPassTokens) {
      forward_layers({worker, kernels_, scratch_[std::size_t(worker.index())]}, cache,
                     piece_of(chunk, first, std::min(kPassTokens, n - first)));
    }
  });
  if (chunk.output != Output::kGreedy) return -1;
  const Best best = best_of(scratch_);
  if (best.index < 0)
    throw NumericalError("every logit of the token at position " + std::to_string(chunk.position + n - 1) +
                         " is NaN");
  return best.index;
}

// Lays out the workspace in one allocation. Reused as long as it is large enough.
void CpuEngine::reserve(int tokens, int logit_rows) {
  const std::size_t vocab_size = std::size_t(config().vocab_size);
  if (tokens > work_.tokens) {
    const Config& m = config();
    const std::size_t n = std::size_t(tokens);
    std::size_t bytes = 0;
    Workspace next;
    const auto lay_out = [&](std::byte* base) {
      bytes = 0;
      const auto take = [&](std::size_t count, std::size_t size) {
        std::byte* p = base ? base + bytes : nullptr;
        bytes += round_up(count * size, 64);
        return p;
      };
      const auto floats = [&](std::size_t cols) {
        const std::size_t stride = round_up(cols, kFloatPad);
        return FloatRows{reinterpret_cast<float*>(take(n * stride, sizeof(float))), stride};
      };
      const auto activations = [&](std::size_t cols, Forms forms, bool always_f32) {
        Activations a{forms, {}, {}};
        if (forms.f32 || always_f32) a.f32 = floats(cols);
        if (forms.int8) {
          a.int8.blocks = int(cols) / kBlockCols;
          a.int8.tiles = reinterpret_cast<ActivationTile*>(take(
              round_up(n, kTileTokens) / kTileTokens * std::size_t(a.int8.blocks), sizeof(ActivationTile)));
        }
        return a;
      };
      const std::size_t heads = std::size_t(m.n_heads), kv_heads = std::size_t(m.n_kv_heads);
      next.x = floats(std::size_t(m.dim));
      next.y = floats(std::size_t(m.dim));
      next.q = floats(heads * std::size_t(m.key_dim));
      next.k = floats(kv_heads * std::size_t(m.key_dim));
      next.v = floats(kv_heads * std::size_t(m.value_dim));
      next.a = activations(std::size_t(m.dim), weights_.dim_input, true);
      next.att = activations(heads * std::size_t(m.value_dim), weights_.attention_input, true);
      next.h = activations(std::size_t(m.ffn_dim), weights_.ffn_input, false);
      next.rotations =
          reinterpret_cast<float*>(take(ropes_.size() * n * std::size_t(m.rope_dim), sizeof(float)));
    };
    lay_out(nullptr);
    next.memory = Buffer(bytes, "the workspace of a prompt chunk");
    lay_out(next.memory.data());
    next.tokens = tokens;
    work_ = std::move(next);
  }
  const std::size_t logit_bytes = std::size_t(logit_rows) * vocab_size * sizeof(float);
  if (logit_bytes > logits_.bytes()) logits_ = Buffer(logit_bytes, "logits");
  work_.logits = logits_.as<float>();
  workspace_bytes_.store(work_.memory.bytes() + logits_.bytes(), std::memory_order_relaxed);
}

CpuEngine::CpuEngine(Model model, const EngineOptions& options)
    : Engine(std::move(model), options),
      kernels_(select_kernels()),
      team_(options.threads),
      weights_(model_, options.compute, team_) {
  const Config& m = config();
  if (m.key_dim > kMaxHeadDim || m.value_dim > kMaxHeadDim)
    throw UnsupportedModelError("heads of " + std::to_string(std::max(m.key_dim, m.value_dim)) +
                                " dimensions: the CPU engine takes up to " + std::to_string(kMaxHeadDim));
  for (int layer = 0; layer < m.n_layers; ++layer) {
    Rope rope;
    rope.frequencies = rope_frequencies(model_, layer, &rope.magnitude);
    const auto same = [&](const Rope& other) {
      return other.frequencies == rope.frequencies && other.magnitude == rope.magnitude;
    };
    const auto found = std::find_if(ropes_.begin(), ropes_.end(), same);
    layer_rope_.push_back(int(found - ropes_.begin()));
    if (found == ropes_.end()) ropes_.push_back(std::move(rope));
  }
  scratch_.resize(std::size_t(team_.size()));
  const std::size_t row = round_up(std::size_t(weights_.max_float_cols), kFloatPad);
  for (Scratch& scratch : scratch_)
    scratch.weights = Buffer(kGroupRows * row * sizeof(float), "dequantized weights");
}

std::string CpuEngine::device_name() const {
  return std::string("CPU (") + kernels_.name + ", " + std::to_string(team_.size()) +
         (team_.size() == 1 ? " thread)" : " threads)");
}

Stats CpuEngine::stats() const {
  return {{"threads", double(team_.size())},
          {"weight_bytes", double(weights_.packed_bytes())},
          {"workspace_bytes", double(workspace_bytes_.load(std::memory_order_relaxed))}};
}

class CpuSession final : public Session {
 public:
  CpuSession(std::shared_ptr<CpuEngine> engine, int max_context)
      : Session(engine, max_context),
        cpu_(*engine),
        cache_(engine->config(), engine->options().kv_type, max_context) {}

 protected:
  TokenId forward_chunk(const Chunk& chunk) override {
    const auto start = std::chrono::steady_clock::now();
    const TokenId token = cpu_.forward(cache_, chunk);
    counters_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++counters_.chunks;
    return token;
  }
  void reserve(int positions) override { cache_.reserve(positions); }
  void read_kv(int layer, bool values, int positions, std::byte* out) override {
    cache_.read(layer, values, positions, out);
  }
  void write_kv(int layer, bool values, int positions, const std::byte* in) override {
    cache_.write(layer, values, positions, in);
  }
  std::size_t cache_bytes() const override { return cache_.bytes(); }
  void publish_counters() noexcept override { published_ = counters_; }
  void collect_stats(Stats& stats) const override {
    stats["chunks"] = published_.chunks;
    stats["compute_seconds"] = published_.seconds;
  }
  void begin_call() override { counters_ = {}; }

 private:
  CpuEngine& cpu_;  // kept alive by the base class
  KvCache cache_;
  struct {
    double chunks = 0, seconds = 0;
  } counters_, published_;  // of the last call
};

std::unique_ptr<Session> CpuEngine::make_session(int max_context) {
  return std::make_unique<CpuSession>(std::static_pointer_cast<CpuEngine>(shared_from_this()), max_context);
}

}  // namespace metal_prefill::cpu

namespace metal_prefill {

std::shared_ptr<Engine> make_cpu_engine(Model model, const EngineOptions& options) {
  return std::make_shared<cpu::CpuEngine>(std::move(model), options);
}

}  // namespace metal_prefill
