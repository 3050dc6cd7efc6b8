#include "engine.h"

#include <algorithm>

namespace metal_prefill {

namespace {

void check_token(TokenId token, int vocab_size, std::size_t index) {
  if (token < 0 || token >= vocab_size)
    throw std::invalid_argument("token id " + std::to_string(token) + " at index " + std::to_string(index) +
                                " is outside the vocabulary of " + std::to_string(vocab_size));
}

}  // namespace

Session::Session(std::shared_ptr<Engine> engine, int max_context)
    : engine_(std::move(engine)), max_context_(max_context) {}

// A call that computes with the session or changes it. What it counted shows when it ends, however it does.
class Session::Call {
 public:
  Call(Session& session, const char* name) : session_(session), hold_(session.turn_, name) {}
  ~Call() {
    session_.change([] {});
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  Session& session_;
  const Turn::Hold hold_;
};

void Session::publish() noexcept {
  cache_bytes_ = cache_bytes();
  publish_counters();
}

void Session::check_room(std::size_t position, std::size_t tokens) const {
  if (tokens > std::size_t(max_context_) - position)
    throw ContextOverflowError("position " + std::to_string(position) + " + " + std::to_string(tokens) +
                               " tokens exceeds the context of " + std::to_string(max_context_));
}

void Session::require_dispatches() const {
  if (!makes_dispatches())
    throw DeviceError("the engine '" + engine_->backend() +
                      "' makes no dispatches that could be listed or timed; use device='metal'");
}

std::size_t Session::check_prompt(std::span<const TokenId> tokens, Prefix prefix) const {
  if (tokens.empty()) throw std::invalid_argument("the prompt is empty: at least one token is needed");
  for (std::size_t i = 0; i < tokens.size(); ++i) check_token(tokens[i], engine_->config().vocab_size, i);
  const std::size_t position = prefix == Prefix::kAppend ? tokens_.size() : 0;
  check_room(position, tokens.size());
  if (prefix == Prefix::kAppend) return 0;
  // The last token is always computed: what follows it is what the caller asks for.
  const std::size_t limit = std::min(tokens_.size(), tokens.size() - 1);
  return std::size_t(
      std::mismatch(tokens.begin(), tokens.begin() + std::ptrdiff_t(limit), tokens_.begin()).first -
      tokens.begin());
}

PromptResult Session::run(const char* name, std::span<const TokenId> tokens, Chunk wanted, Prefix prefix,
                          const Progress& progress, Claim claim) {
  const Call call(*this, name);
  if (claim != 0 && prefix == Prefix::kAppend && claim != claim_)
    throw SessionBusyError(
        "another call changed the session while text was generated with it: it stands at " +
        std::to_string(tokens_.size()) + "; give each generator a session of its own");
  begin_call();
  const std::size_t reused = check_prompt(tokens, prefix);
  const std::size_t start = prefix == Prefix::kAppend ? tokens_.size() : 0;  // position of tokens[0]
  reserve(int(start + tokens.size()));
  const std::size_t before = start + reused;
  change([&] {
    tokens_.reserve(start + tokens.size());  // what follows a computed chunk must not fail
    if (prefix == Prefix::kReuse) reused_ = reused;
    tokens_.resize(before);
    claim_ = claim;
  });

  PromptResult result;
  result.done = int(reused);
  const int total = int(tokens.size());
  while (result.done < total) {
    const int n = std::min(engine_->options().chunk_tokens, total - result.done);
    const bool last = result.done + n == total;
    Chunk chunk;
    chunk.tokens = tokens.subspan(std::size_t(result.done), std::size_t(n));
    chunk.position = int(start) + result.done;
    chunk.trace = wanted.trace;
    if (wanted.output == Output::kLogProbs) {
      chunk.output = Output::kLogProbs;
      chunk.targets = wanted.targets.subspan(std::size_t(result.done), std::size_t(n));
      chunk.log_probs = wanted.log_probs + result.done;
    } else if (last) {
      chunk.output = wanted.output;
      chunk.logits = wanted.logits;
    }
    TokenId token = -1;
    try {
      token = forward_chunk(chunk);
    } catch (...) {
      change([&] { tokens_.resize(before); });  // a failed call leaves what the session held before it
      throw;
    }
    change([&] { tokens_.insert(tokens_.end(), chunk.tokens.begin(), chunk.tokens.end()); });
    result.done += n;
    if (last) result.token = token;
    if (progress && !progress(result.done, total)) break;
  }
  return result;
}

PromptResult Session::forward_prompt(std::span<const TokenId> tokens, Prefix prefix, const Progress& progress,
                                     Claim claim) {
  Chunk wanted;
  wanted.output = Output::kGreedy;
  return run("forward_prompt", tokens, wanted, prefix, progress, claim);
}

PromptResult Session::forward_prompt_logits(std::span<const TokenId> tokens, float* logits, Prefix prefix,
                                            const Progress& progress, Claim claim) {
  Chunk wanted;
  wanted.output = Output::kLogits;
  wanted.logits = logits;
  return run("forward_prompt_logits", tokens, wanted, prefix, progress, claim);
}

PromptResult Session::score(std::span<const TokenId> tokens, float* log_probs, const Progress& progress) {
  if (tokens.size() < 2) throw std::invalid_argument("scoring needs at least two tokens");
  check_token(tokens.back(), engine_->config().vocab_size, tokens.size() - 1);
  Chunk wanted;
  wanted.output = Output::kLogProbs;
  wanted.targets = tokens.subspan(1);
  wanted.log_probs = log_probs;
  return run("score", tokens.first(tokens.size() - 1), wanted, Prefix::kAppend, progress);
}

TokenId Session::forward_token_greedy(TokenId token) {
  Chunk wanted;
  wanted.output = Output::kGreedy;
  return run("forward_token_greedy", {&token, 1}, wanted, Prefix::kAppend, {}).token;
}

void Session::forward_token(TokenId token, float* logits) {
  Chunk wanted;
  wanted.output = Output::kLogits;
  wanted.logits = logits;
  run("forward_token", {&token, 1}, wanted, Prefix::kAppend, {});
}

std::vector<Dispatch> Session::plan(int tokens) {
  require_dispatches();
  if (tokens < 1)
    throw std::invalid_argument("a plan needs at least one token, got " + std::to_string(tokens));
  const Call call(*this, "plan");
  begin_call();
  check_room(tokens_.size(), std::size_t(tokens));
  reserve(int(tokens_.size()) + tokens);
  const std::vector<TokenId> unread(std::size_t(tokens), 0);
  std::vector<Dispatch> dispatches;
  for (int done = 0; done < tokens;) {
    const int n = std::min(engine_->options().chunk_tokens, tokens - done);
    Chunk chunk;
    chunk.tokens = std::span(unread).first(std::size_t(n));
    chunk.position = int(tokens_.size()) + done;
    done += n;
    if (done == tokens) chunk.output = Output::kGreedy;
    plan_chunk(chunk, dispatches);
  }
  return dispatches;
}

PromptResult Session::trace(std::span<const TokenId> tokens, std::vector<Dispatch>& trace,
                            const Progress& progress) {
  require_dispatches();
  Chunk wanted;
  wanted.output = Output::kGreedy;
  wanted.trace = &trace;
  return run("trace", tokens, wanted, Prefix::kAppend, progress);
}

void Session::plan_chunk(const Chunk&, std::vector<Dispatch>&) {
  require_dispatches();
}

int Session::position() const {
  const std::scoped_lock lock(state_);
  return int(tokens_.size());
}

std::vector<TokenId> Session::tokens() const {
  const std::scoped_lock lock(state_);
  return tokens_;
}

void Session::rewind(int position) {
  const Call call(*this, "rewind");
  if (position < 0 || std::size_t(position) > tokens_.size())
    throw std::invalid_argument("cannot rewind to position " + std::to_string(position) +
                                ": the session stands at " + std::to_string(tokens_.size()));
  change([&] {
    tokens_.resize(std::size_t(position));
    claim_ = 0;
  });
}

std::unique_ptr<Session> Session::fork() {
  auto copy = engine_->session(max_context_);
  const Turn::Share share(turn_, "fork");
  std::vector<std::byte> rows;
  copy->import_state(tokens_, [&](int layer, bool values, std::size_t bytes) {
    rows.resize(bytes);
    read_kv(layer, values, int(tokens_.size()), rows.data());
    return rows.data();
  });
  return copy;
}

std::size_t Session::kv_row_bytes(bool values) const {
  const Config& c = engine_->config();
  const std::size_t element = engine_->options().kv_type == KvType::kF16 ? 2 : 4;
  return std::size_t(c.n_kv_heads) * std::size_t(values ? c.value_dim : c.key_dim) * element;
}

std::vector<TokenId> Session::export_state(const KvSink& sink) {
  const Turn::Share share(turn_, "save");
  for (int layer = 0; layer < engine_->config().n_layers; ++layer)
    for (const bool values : {false, true})
      read_kv(layer, values, int(tokens_.size()), sink(layer, values, tokens_.size() * kv_row_bytes(values)));
  return tokens_;
}

void Session::import_state(std::span<const TokenId> tokens, const KvSource& source) {
  const Call call(*this, "import_state");
  if (tokens.size() > std::size_t(max_context_))
    throw ContextOverflowError("a state of " + std::to_string(tokens.size()) +
                               " tokens exceeds the context of " + std::to_string(max_context_));
  for (std::size_t i = 0; i < tokens.size(); ++i) check_token(tokens[i], engine_->config().vocab_size, i);
  std::vector<TokenId> replacement(tokens.begin(), tokens.end());
  reserve(int(tokens.size()));
  change([&] {
    tokens_.clear();  // until every row is in, the cache holds nothing of use
    claim_ = 0;
  });
  const int n = int(replacement.size());
  for (int layer = 0; layer < engine_->config().n_layers; ++layer)
    for (const bool values : {false, true})
      write_kv(layer, values, n, source(layer, values, replacement.size() * kv_row_bytes(values)));
  change([&] { tokens_ = std::move(replacement); });
}

std::size_t Session::memory_bytes() const {
  const std::scoped_lock lock(state_);
  return cache_bytes_;
}

Stats Session::stats() const {
  Stats stats = engine_->stats();
  const std::scoped_lock lock(state_);
  stats["kv_cache_bytes"] = double(cache_bytes_);
  stats["position"] = double(tokens_.size());
  stats["tokens_reused"] = double(reused_);
  collect_stats(stats);
  return stats;
}

std::vector<float> Session::intermediate(const std::string& name) const {
  const Turn::Share share(turn_, "intermediate");
  return read_intermediate(name);
}

std::vector<float> Session::read_intermediate(const std::string& name) const {
  throw std::invalid_argument("the " + engine_->backend() + " engine keeps no intermediate '" + name + "'");
}

std::unique_ptr<Session> Engine::session(int max_context) {
  const int limit = config().context_length;
  if (max_context < 0 || max_context > limit)
    throw std::invalid_argument("max_context " + std::to_string(max_context) + " is outside 1 to " +
                                std::to_string(limit) + ", the model's context length");
  std::unique_ptr<Session> session = make_session(max_context == 0 ? limit : max_context);
  session->change([] {});  // its cache may have bytes already
  return session;
}

#ifndef METAL_PREFILL_METAL
bool metal_available() {
  return false;
}

std::shared_ptr<Engine> make_metal_engine(Model, const EngineOptions&) {
  throw DeviceError(
      "this build has no Metal engine: use device='cpu', install on a Mac with Apple Silicon, or build with "
      "METAL_PREFILL_EMULATOR=ON to run it on the emulator");
}
#endif

}  // namespace metal_prefill
