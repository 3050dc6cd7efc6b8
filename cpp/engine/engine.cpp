#include "engine.h"

#include <algorithm>
#include <new>
#include <utility>

#include "../base/long_wait.h"

namespace metal_prefill {

CallCounters& CallCounters::operator+=(const CallCounters& other) {
  passes += other.passes;
  multiply_adds += other.multiply_adds;
  seconds += other.seconds;
  dispatches += other.dispatches;
  command_buffers += other.command_buffers;
  allocations += other.allocations;
  gpu_seconds += other.gpu_seconds;
  return *this;
}

Session::Session(std::shared_ptr<Engine> engine, int max_context, std::string prefix_namespace)
    : engine_(std::move(engine)),
      max_context_(max_context),
      prefix_namespace_(std::move(prefix_namespace)),
      cache_(engine_->make_cache(max_context)),
      fork_handler_(
          [this] {
            state_mutex_.lock();
            lock_.before_fork();
          },
          [this](bool child) {
            lock_.after_fork(child);
            state_mutex_.unlock();
          }) {}

Session::~Session() {
  if (lock_.lost()) {
    [[maybe_unused]] const Cache* lost =
        cache_.release();  // leaked: another thread was changing it, so that its form is unknown
    return;
  }
  // A thread that takes pages holds the pool's lock while it waits for a pass, which may need the GIL.
  long_wait([this] {
    if (remembers_) remember(cached());
    cache_.reset();
  });
}

std::size_t Session::cached() const {
  const SequenceStates* states = cache_->states();
  return states ? std::min(tokens_.size(), std::size_t(states->current().position)) : tokens_.size();
}

// Keeps the longest known prefix of `tokens`, with cached pages if they have more of it, and returns its
// length. Reserves room for `room` tokens. States may be known for fewer tokens.
std::size_t Session::keep_known(std::span<const TokenId> tokens, std::size_t room) {
  {
    const std::scoped_lock lock(state_mutex_);
    tokens_.reserve(room);  // cache and tokens then change together, or not at all
  }
  std::size_t known = std::size_t(common_prefix(tokens, tokens_));
  remembers_ = true;
  PrefixTree& tree = engine_->memory().prefixes();
  tree.count_prompt();
  SequenceStates* states = cache_->states();
  const int own = states ? states->nearest(int(known)) : int(known);
  const PrefixTree::Known others = tree.known(prefix_namespace_, tokens);
  if (std::pair(others.usable, others.positions) > std::pair(own, int(known))) {
    PrefixTree::Match match = tree.find(prefix_namespace_, tokens);
    if (states) states->replace(int(known), std::move(match.state));
    known = std::size_t(match.positions);
    cache_->adopt(std::move(match.pages));
  } else if (states) {
    states->rewind(int(known));
  }
  keep_first(tokens.first(known));
  return known;
}

// Reduces the tokens of the session to a prefix of the cached ones. Later rows of the cache are ignored.
void Session::keep_first(std::span<const TokenId> tokens) {
  {
    const std::scoped_lock lock(state_mutex_);
    tokens_.assign(tokens.begin(), tokens.end());
    reused_ = tokens.size();
    remembered_ = std::min(remembered_, tokens.size() / kPagePositions);
  }
  count_bytes();
}

void Session::remember_pages() {
  const std::size_t full = cached() / kPagePositions;
  if (remembers_ && full > remembered_ && remember(full * kPagePositions)) remembered_ = full;
}

// Returns false if memory runs out: the call itself has succeeded, and later prompts find shorter prefixes.
bool Session::remember(std::size_t positions) try {
  SequenceStates* states = cache_->states();
  const auto points = states ? states->points(int(positions)) : std::vector<StatePoint>();
  return engine_->memory().prefixes().insert(prefix_namespace_, std::span(tokens_).first(positions),
                                             cache_->pages(), points);
} catch (const std::bad_alloc&) {
  return false;
}

void Session::check_room(std::size_t position, std::size_t tokens) const {
  if (tokens > std::size_t(max_context_) - position)
    throw ContextOverflowError("position " + std::to_string(position) + " + " + std::to_string(tokens) +
                               " tokens exceeds the context of " + std::to_string(max_context_));
}

int Session::reuse(std::span<const TokenId> tokens) {
  const SessionLock::Hold hold(lock_, "reuse");
  if (tokens.empty()) throw std::invalid_argument("the prompt is empty: at least one token is needed");
  for (std::size_t i = 0; i < tokens.size(); ++i) engine_->check_token(tokens[i], i);
  check_room(0, tokens.size());
  const std::size_t known = keep_known(tokens.first(tokens.size() - 1), tokens.size());
  cache_->truncate(int(known));
  count_bytes();
  const std::scoped_lock lock(state_mutex_);
  claim_ = 0;
  return int(known);
}

void Session::drop_uncounted_rows() {
  cache_->truncate(int(tokens_.size()));
  count_bytes();
}

void Session::count_bytes() {
  const std::size_t bytes = cache_->bytes();
  const std::scoped_lock lock(state_mutex_);
  cache_bytes_ = bytes;
}

int Session::position() const {
  const std::scoped_lock lock(state_mutex_);
  return int(tokens_.size());
}

std::vector<TokenId> Session::tokens() const {
  const std::scoped_lock lock(state_mutex_);
  return tokens_;
}

void Session::check_claim(Claim claim) const {
  const std::scoped_lock lock(state_mutex_);
  if (claim != claim_)
    throw SessionBusyError(
        "another call changed the session while text was generated with it: its position is " +
        std::to_string(tokens_.size()) + "; give each generator a session of its own");
}

void Session::rewind(int position, Claim claim) {
  const SessionLock::Hold hold(lock_, "rewind");
  if (claim != 0 && claim != claim_) return;
  if (position < 0 || std::size_t(position) > tokens_.size())
    throw std::invalid_argument("cannot rewind to position " + std::to_string(position) +
                                ": the position of the session is " + std::to_string(tokens_.size()));
  cache_->truncate(position);
  if (SequenceStates* states = cache_->states()) states->rewind(position);
  remembered_ = std::min(remembered_, std::size_t(position) / kPagePositions);
  {
    const std::scoped_lock state(state_mutex_);
    tokens_.resize(std::size_t(position));
    claim_ = claim;
  }
  count_bytes();
}

std::unique_ptr<Session> Session::fork() {
  auto copy = engine_->session(max_context_, prefix_namespace_);
  const SessionLock::Hold hold(lock_, "fork", SessionLock::Access::kRead);
  copy->cache_->share(*cache_, int(tokens_.size()));
  if (SequenceStates* states = cache_->states()) copy->cache_->states()->share(*states, int(tokens_.size()));
  copy->cache_bytes_ = copy->cache_->bytes();
  copy->tokens_ = tokens_;
  return copy;
}

std::size_t Session::kv_row_bytes(int layer, bool values) const {
  const Config c = engine_->config().of_layer(layer);
  return std::size_t(c.n_kv_heads) *
         row_bytes(tensor_type(engine_->options().kv_type), std::size_t(values ? c.value_dim : c.key_dim));
}

template <typename Visit>
void Session::each_part(std::size_t cached, const Visit& visit) const {
  const Config& c = engine_->config();
  for (int layer = 0; layer < c.n_layers; ++layer) {
    if (c.caches(layer)) {
      visit(layer, Part::kKeys, cached * kv_row_bytes(layer, false));
      visit(layer, Part::kValues, cached * kv_row_bytes(layer, true));
    }
    if (c.state_values(layer) > 0) visit(layer, Part::kState, c.state_values(layer) * sizeof(float));
  }
}

Session::Exported Session::export_state(const StateSink& sink) {
  const SessionLock::Hold hold(lock_, "save", SessionLock::Access::kRead);
  const std::size_t cached = this->cached();
  each_part(cached, [&](int layer, Part part, std::size_t bytes) {
    std::byte* out = sink(layer, part, bytes);
    if (part != Part::kState) return cache_->read(layer, part == Part::kValues, int(cached), out);
    const StateRef& state = cache_->states()->current().state;
    if (state)
      cache_->read_state(state, layer, reinterpret_cast<float*>(out));
    else
      std::fill_n(out, bytes, std::byte(0));
  });
  return {tokens_, cached};
}

void Session::import_state(std::span<const TokenId> tokens, std::size_t cached, const StateSource& source) {
  const SessionLock::Hold hold(lock_, "import_state");
  if (tokens.size() > std::size_t(max_context_))
    throw ContextOverflowError("a state of " + std::to_string(tokens.size()) +
                               " tokens exceeds the context of " + std::to_string(max_context_));
  for (std::size_t i = 0; i < tokens.size(); ++i) engine_->check_token(tokens[i], i);
  // Imports into a separate cache: if anything fails, the session is unchanged.
  std::vector<TokenId> replacement(tokens.begin(), tokens.end());
  std::unique_ptr<Cache> cache = engine_->make_cache(max_context_);
  SequenceStates* states = cache->states();
  if (cached > tokens.size() || (!states && cached < tokens.size()))
    throw std::invalid_argument("a state of " + std::to_string(cached) + " cached tokens is not one of " +
                                std::to_string(tokens.size()));
  CallCounters counters;
  cache->reserve(0, int(tokens.size()), counters);
  StatePoint point{int(cached), states && cached > 0 ? states->pool().take() : StateRef()};
  each_part(cached, [&](int layer, Part part, std::size_t bytes) {
    const std::byte* in = source(layer, part, bytes);
    if (part != Part::kState) return cache->write(layer, part == Part::kValues, int(cached), in);
    if (point.state) cache->write_state(point.state, layer, reinterpret_cast<const float*>(in));
  });
  if (states) states->replace(0, std::move(point));
  cache_ = std::move(cache);
  remembered_ = 0;
  {
    const std::scoped_lock state(state_mutex_);
    tokens_ = std::move(replacement);
    claim_ = 0;
  }
  count_bytes();
}

std::size_t Session::memory_bytes() const {
  const std::scoped_lock lock(state_mutex_);
  return cache_bytes_;
}

Stats Session::stats() const {
  Stats stats = engine_->stats();
  const std::scoped_lock lock(state_mutex_);
  stats["kv_cache_bytes"] = double(cache_bytes_);
  stats["position"] = double(tokens_.size());
  stats["tokens_reused"] = double(reused_);
  stats["tokens_recomputed"] = double(recomputed_);
  engine_->add_call_stats(counters_, stats);
  return stats;
}

void Engine::check_token(TokenId token, std::size_t index) const {
  if (token < 0 || token >= config().vocab_size)
    throw std::invalid_argument("token id " + std::to_string(token) + " at index " + std::to_string(index) +
                                " is outside the vocabulary of " + std::to_string(config().vocab_size));
}

std::unique_ptr<Session> Engine::session(int max_context, std::string prefix_namespace) {
  const int limit = config().context_length;
  if (max_context < 0 || max_context > limit)
    throw std::invalid_argument("max_context=" + std::to_string(max_context) + " is outside 1 to " +
                                std::to_string(limit) + ", the model's context length");
  return std::unique_ptr<Session>(
      new Session(shared_from_this(), max_context == 0 ? limit : max_context, std::move(prefix_namespace)));
}

#ifndef METAL_PREFILL_METAL
namespace {

constexpr const char* kNoMetal =
    "this build has no Metal engine: use device='cpu', install on a Mac with Apple Silicon, or build with "
    "METAL_PREFILL_EMULATOR=ON to run it on the emulator";

}  // namespace

std::map<std::string, std::string> metal_device() {
  return {{"problem", kNoMetal}};
}

std::vector<CompiledSource> compile_shaders() {
  throw DeviceError(kNoMetal);
}

std::shared_ptr<metal::SharedKernels> make_shared_kernels() {
  return nullptr;
}

std::shared_ptr<Engine> make_metal_engine(Model, const EngineOptions&) {
  throw DeviceError(kNoMetal);
}
#endif

}  // namespace metal_prefill
