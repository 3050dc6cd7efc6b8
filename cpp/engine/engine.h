// The contract between the Python API and the engines.
//
// An Engine holds what is shared: weights, pipelines, thread pool, pages of K and V. A Session owns a cache
// (a block table over those pages), a position and the ids of the tokens in the cache; many sessions share
// one engine. The rules of sessions are implemented once, here and in batch.h: arguments are checked before
// anything changes, prompts are cut into chunks, chunks of several sessions go through the layers in one
// pass, progress is reported between passes, and position and cache stay consistent when a pass fails. An
// engine computes passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../base/errors.h"
#include "../base/fork_handler.h"
#include "../base/token.h"
#include "../cache/cache.h"
#include "../cache/states.h"
#include "../model/model.h"
#include "../sampling/sampling.h"
#include "output.h"
#include "session_lock.h"

namespace metal_prefill {

// Formats of the numbers that products multiply.
enum class Compute {
  kInt8,  // 8-bit activations per block of 32 for quantized weights, bfloat16 ones for bfloat16 weights
  kF32,
  kBf16,   // weights and activations rounded to bfloat16 if the processor multiplies such pairs; else kF32
  kW8A8,   // weights and activations rotated, in 8 bits with one scale per row
  kInt16,  // kW8A8 with 16 bits if the processor multiplies those faster than float32; else kF32
};
// Type of K and V in a cache.
enum class KvType : std::uint32_t {
  kF16 = std::uint32_t(TensorType::kF16),
  kF32 = std::uint32_t(TensorType::kF32),
  kQ8_0 = std::uint32_t(TensorType::kQ8_0),
};
inline TensorType tensor_type(KvType type) {
  return TensorType(type);
}

namespace metal {
class SharedKernels;
}

// Options of the Metal engine alone.
struct MetalOptions {
  std::optional<bool> fused_norm;  // RMSNorm inside the projections (decode); none: chosen for the GPU
  int matvec_rows = 0;             // rows per simdgroup of a matvec: 1, 2 or 4; 0: chosen for the GPU
  double buffer_work = 0;          // multiply-adds per command buffer; 0: chosen for the GPU
  double resident_seconds = 180;   // how long memory stays resident on the GPU after a pass
  std::string pipeline_folder;     // of compiled pipelines; empty: they are not kept
  bool is_measured = false;        // for timing only: stores no pipelines and keeps no memory resident
  // Libraries and pipelines that several engines share; null: this one has its own.
  std::shared_ptr<metal::SharedKernels> shared_kernels;
  // Reason why a GPU's matrix units are not used, empty if they are or if it has none; and whether they
  // compute tall tiles of products and attention.
  std::string no_matmul_tensor;
  bool tall_tiles = true, attention_tensor = true;
};

struct EngineOptions {
  int threads = 0;  // 0: one per available core
  Compute compute = Compute::kInt8;
  KvType kv_type = KvType::kF16;
  int chunk_tokens = 512;  // tokens of a prompt that go through the layers together
  int max_context = 0;     // context for which the page layout is optimized; 0: the model's
  std::size_t prefix_memory = std::size_t(256) << 20;  // most bytes of pages kept for later sessions
  // Bytes of K and V that all sessions may hold together; 0: half of the memory, and on a GPU at most half of
  // its working set without the weights.
  std::size_t kv_memory = 0;
  bool poison_cache = false;  // fills pages with NaN before they are used, for tests
  MetalOptions metal;
};

class PassInspector;  // inspection.h
struct Trace;         // inspection.h

// Tokens that a model appends to a query (ColBERT, arXiv:2004.12832). Unless they are `seen`, all tokens
// attend only to the text before them.
struct Expansion {
  int tokens = 0;
  bool seen = false;

  int hidden() const { return seen ? 0 : tokens; }
};

// The next tokens of one session in a pass.
struct Chunk {
  std::span<const TokenId> tokens;
  int position = 0;        // of tokens[0]
  Cache* cache = nullptr;  // of the session, with room for the tokens
  Output output;           // of the last tokens
  Expansion expansion;     // of a whole text
  int segment = -1;        // number of its first tokens with type 0; -1: see first_segment
  ChunkStates states;      // of recurrent layers
  Trace* trace = nullptr;  // if not null: each dispatch runs alone and is recorded there

  // End of the positions that tokens attend to, if they attend to later ones.
  int visible_end() const { return position + int(tokens.size()) - expansion.hidden(); }
};

// Called between chunks with the number of finished prompt tokens and the total. Returning false stops the
// prompt there.
using Progress = std::function<bool(int done, int total)>;

struct PromptResult {
  int done = 0;        // tokens of the prompt that are now in the cache
  TokenId token = -1;  // the next token, if one is chosen; -1 if the prompt was stopped
  int accepted = 0;    // drafts that were chosen; only these are in the cache
  int computed = 0;    // rows of passes, including tokens that were computed again
};

// Whether the tokens of a prompt are appended to those in the cache or, with kReuse, replace them: the
// longest common prefix is kept and only the rest is computed.
enum class Prefix { kAppend, kReuse };

// Identifies a chain of prompts: the first, with kReuse, claims the session, and later ones append to it. A
// prompt throws SessionBusyError if any other call has changed the session in between. 0 claims nothing.
using Claim = std::uint64_t;

using Stats = std::map<std::string, double>;

class Engine;

class Session {
 public:
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Each of these functions is safe to call from several threads. Calls that compute (batch.h), change the
  // session or copy its cache run one after another; position(), tokens(), memory_bytes() and stats() never
  // wait for them and return the state after the last finished pass. A progress callback runs without a lock:
  // in it, these reads, fork() and export_state() see the finished chunks, and a call that would change its
  // session throws SessionBusyError.

  // Reduces the cache to the longest known prefix of `tokens`, known here or from other sessions, and returns
  // its length: at most all but the last token. Computes nothing.
  int reuse(std::span<const TokenId> tokens);

  int position() const;
  int max_context() const { return max_context_; }
  std::vector<TokenId> tokens() const;  // ids in the cache, [position]
  // Throws std::invalid_argument beyond the current position. With a claim, does nothing if another call has
  // changed the session since.
  void rewind(int position, Claim claim = 0);
  // Throws SessionBusyError if another call has changed the session since it was claimed.
  void check_claim(Claim claim) const;

  // Returns a new session with the same cache contents and position; they share the engine's pages.
  std::unique_ptr<Session> fork();
  // Export and import of the state, layer by layer. K and V of a layer with attention are in canonical layout
  // [position][kv_head][head_dim] with elements or blocks of kv_type, the state of a recurrent layer in
  // float32. In a model with recurrent layers, both are of the first `cached` tokens; otherwise of all. The
  // caller provides the memory that they are written to or read from; an import may reuse one buffer for all.
  enum class Part { kKeys, kValues, kState };
  using StateSink = std::function<std::byte*(int layer, Part part, std::size_t bytes)>;
  using StateSource = std::function<const std::byte*(int layer, Part part, std::size_t bytes)>;
  std::size_t kv_row_bytes(int layer, bool values) const;  // of one position
  struct Exported {
    std::vector<TokenId> tokens;
    std::size_t cached;
  };
  Exported export_state(const StateSink& sink);
  void import_state(std::span<const TokenId> tokens, std::size_t cached, const StateSource& source);

  std::size_t memory_bytes() const;  // of the KV cache and the states as allocated now
  Stats stats() const;               // of the last call
  Engine& engine() const { return *engine_; }

 private:
  friend class Engine;
  friend class Batch;
  friend class BatchRequest;
  friend class SessionInspector;

  Session(std::shared_ptr<Engine> engine, int max_context, std::string prefix_namespace);
  // Keep the known prefix of a prompt with kReuse, and update `cache_bytes_` and `reused_`.
  std::size_t keep_known(std::span<const TokenId> tokens, std::size_t room);
  void keep_first(std::span<const TokenId> tokens);
  // Drops rows of the cache after the session's tokens.
  void drop_uncounted_rows();
  // Updates `cache_bytes_`. Pools may wait for a pass, which may need the GIL, while threads with the GIL
  // wait for `state_mutex_`: so nothing that takes or releases memory of a pool holds it.
  void count_bytes();
  // Lets other sessions find the full pages.
  void remember_pages();
  // Lets them find the first `positions`. Returns false if memory ran out before all were added.
  bool remember(std::size_t positions);
  void check_room(std::size_t position, std::size_t tokens) const;
  // Number of tokens whose K, V and states are in the cache. Those of later tokens are not, and their pages
  // are not needed.
  std::size_t cached() const;
  // Calls visit(layer, part, bytes) for the exported data of `cached` tokens.
  template <typename Visit>
  void each_part(std::size_t cached, const Visit& visit) const;

  const std::shared_ptr<Engine> engine_;
  const int max_context_;
  const std::string prefix_namespace_;  // only sessions of the same one share prefixes

  mutable SessionLock lock_;      // held by a call that computes or changes something, until it ends
  std::unique_ptr<Cache> cache_;  // used only by the call that holds the lock
  bool remembers_ = false;        // used with kReuse: other sessions may find its pages, even after its end
  std::size_t remembered_ = 0;    // pages that they can find

  mutable std::mutex state_mutex_;  // guards the members below, briefly; the holder of lock_ reads without it
  std::vector<TokenId> tokens_;     // in the cache
  std::size_t reused_ = 0;          // tokens that the last prompt with kReuse found in the cache
  std::size_t recomputed_ = 0;      // tokens that the last call computed again for the states after them
  std::size_t cache_bytes_ = 0;
  Claim claim_ = 0;        // of the last change
  CallCounters counters_;  // of the last call

  const ForkHandler fork_handler_;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // `max_context` 0 selects the model's context length. With kReuse the session finds only prefixes that
  // sessions of the same `prefix_namespace` computed.
  std::unique_ptr<Session> session(int max_context = 0, std::string prefix_namespace = {});

  const Config& config() const { return model_.config; }
  const Model& model() const { return model_; }
  const EngineOptions& options() const { return options_; }
  // Throws std::invalid_argument for an id outside the vocabulary.
  void check_token(TokenId token, std::size_t index) const;
  virtual std::string device_name() const = 0;  // never presents an emulator as Metal
  virtual std::string backend() const = 0;      // "cpu" or "metal"
  virtual Stats stats() const = 0;              // bytes of weights and pools, pipelines
  // Waits for work that continues after calls, as the destructor does.
  virtual void finish() const {}
  // The weights as this engine packed them. Another engine that gets them as Model::packed does not pack
  // again. Empty if this one packed none itself.
  virtual std::span<const std::byte> packed_weights() const { return {}; }

  // The functions below are called by sessions.

  virtual CacheMemory& memory() = 0;
  virtual std::unique_ptr<Cache> make_cache(int max_context) = 0;
  // Maximum rows of one pass: the context length, if tokens attend to later ones.
  virtual int pass_rows() const = 0;
  // Maximum tokens of one sequence in a pass whose results are bit-identical to those of single tokens.
  virtual int exact_rows() const = 0;
  // Whether the engine starts the token after a chunk before the caller requests it
  // (GreedyOutput::continues).
  virtual bool runs_ahead() const { return false; }
  // Appends the chunks, each of a different session, to their caches and computes their outputs. If it
  // throws, the positions before the chunks are intact in all caches.
  virtual void forward(std::span<Chunk> chunks, CallCounters& counters) = 0;
  virtual void add_call_stats(const CallCounters& counters, Stats& stats) const = 0;
  // Access to the passes of an engine that makes dispatches; null for others.
  virtual const PassInspector* inspector() const { return nullptr; }

 protected:
  Engine(Model model, EngineOptions options) : model_(std::move(model)), options_(std::move(options)) {}

  Model model_;
  EngineOptions options_;
};

std::shared_ptr<Engine> make_cpu_engine(Model model, const EngineOptions& options);
// Throws DeviceError if there is neither a Metal device nor an emulator.
std::shared_ptr<Engine> make_metal_engine(Model model, const EngineOptions& options);
// Facts about the GPU, by name; only `problem` if the Metal engine cannot use any.
std::map<std::string, std::string> metal_device();
// Result of compiling one source of the shaders with all its kernels.
struct CompiledSource {
  std::string name;
  std::string problem;  // the compiler's message; empty: it compiles
  double seconds = 0;
  bool needs_tensors = false;  // uses Metal tensors, for which the system may be too old
};
std::vector<CompiledSource> compile_shaders();
std::shared_ptr<metal::SharedKernels> make_shared_kernels();

}  // namespace metal_prefill
