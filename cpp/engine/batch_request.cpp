#include "batch_request.h"

#include <algorithm>
#include <string>

namespace metal_prefill {

BatchRequest::BatchRequest(Engine& engine, Request& request) : engine_(engine), request_(request) {
  const Output& output = request.output;
  if (std::holds_alternative<NoOutput>(output)) return;
  const bool pooled = std::holds_alternative<PooledOutput>(output);
  if (pooled && engine.config().causal)
    throw std::invalid_argument("only texts whose tokens see later ones are pooled in their pass");
  if (!engine.config().has_head && !pooled && !std::holds_alternative<HiddenOutput>(output))
    throw std::invalid_argument(
        "this model is an encoder: it has no output projection, and so no logits and "
        "no next token; use its hidden states, as embed, rerank and classify do");
  const int rows = rows_of(output);
  const auto* sampled = std::get_if<SampledOutput>(&output);
  if (rows < 1 || (rows > 1 && sampled && sampled->choices.drafts.empty()))
    throw std::invalid_argument("an output of " + std::to_string(rows) + " rows is not known");
}

int BatchRequest::to_recompute() const {
  const Session* session = request_.session;
  return session ? int(session->tokens_.size() - session->cached()) : 0;
}

void BatchRequest::check() const {
  const std::span<const TokenId> tokens = request_.tokens;
  if (request_.claim != 0 && !reuses()) request_.session->check_claim(request_.claim);
  if (tokens.empty()) throw std::invalid_argument("the prompt is empty: at least one token is needed");
  if (without_output() < 0)
    throw std::invalid_argument("an output of " + std::to_string(rows_of(request_.output)) +
                                " rows is wanted of " + std::to_string(tokens.size()) + " tokens");
  for (std::size_t i = 0; i < tokens.size(); ++i) engine_.check_token(tokens[i], i);
  if (!engine_.config().causal && (request_.start > 0 || reuses()))
    throw std::invalid_argument(
        "the tokens of this model see those after them: a text goes in whole, into an empty session");
  if (const Expansion& expansion = request_.expansion; expansion.tokens != 0) {
    if (engine_.config().causal)
      throw std::invalid_argument("only texts whose tokens see later ones are expanded");
    if (expansion.tokens < 0 || std::size_t(expansion.tokens) >= tokens.size())
      throw std::invalid_argument("an expansion of " + std::to_string(expansion.tokens) + " tokens leaves " +
                                  std::to_string(std::int64_t(tokens.size()) - expansion.tokens) +
                                  " of the text: at least one is needed");
  }
  if (request_.session) request_.session->check_room(request_.start, tokens.size());
}

void BatchRequest::begin() {
  const Session* session = request_.session;
  if (session) {
    const std::scoped_lock lock(request_.session->state_mutex_);
    request_.session->counters_ = {};
    request_.session->recomputed_ = 0;
  }
  if (request_.own || request_.result.computed > 0) {
    check_unchanged();
  } else {
    if (session) {
      request_.before = session->tokens_.size();
      if (states()) request_.state = states()->current();
    }
    request_.start = reuses() ? 0 : request_.before;
    check();
    if (session) find_known();
    if (const Choices* choices = choices_of(request_.output))
      std::fill(choices->chosen.begin(), choices->chosen.end(), TokenId(-1));
  }
  whole = !engine_.config().causal;
  scope = request_.scratch;
  if (session) prefix_namespace = session->prefix_namespace_;
  shares = reuses();
  scored = std::holds_alternative<LogProbsOutput>(request_.output);
  plan();
}

void BatchRequest::find_known() {
  Session& session = *request_.session;
  std::size_t again = std::size_t(to_recompute());  // known tokens to recompute
  if (reuses()) {
    const std::span<const TokenId> wanted = request_.tokens;
    const int most = std::min(without_output(), int(wanted.size()) - 1);
    const std::size_t known = session.keep_known(wanted.first(std::size_t(most)), wanted.size());
    request_.before = session.cached();
    session.keep_first(wanted.first(request_.before));  // later tokens are computed with the rest
    if (states()) request_.state = states()->current();
    request_.result.done = int(request_.before);
    again = known - request_.before;
    // Keeps a state where the known prefix ends: other prompts may diverge there, too.
    if (again >= kPagePositions) request_.marks.push_back(int(known));
  }
  const std::scoped_lock lock(session.state_mutex_);
  session.tokens_.reserve(request_.start + request_.tokens.size());  // from here on nothing may fail
  session.claim_ = request_.claim;
  session.recomputed_ = again;
}

void BatchRequest::check_unchanged() const {
  const std::size_t end = request_.start + std::size_t(request_.result.done);
  if (request_.session->tokens_.size() != end)
    throw SessionBusyError("another call changed the session between two passes of a request");
}

// Updates the fields that the planner reads.
void BatchRequest::plan() {
  const int again = to_recompute();
  tokens = request_.tokens;
  done = request_.result.done;
  left = again > 0 ? again : int(tokens.size()) - done;
  shareable = std::min(without_output(), int(tokens.size()) - 1);
}

void BatchRequest::follow_leader() {
  const BatchRequest& from = static_cast<const BatchRequest&>(*std::exchange(leader, nullptr));
  if (from.request_.error || from.request_.result.done < shared) return;
  const int prefix = from.states() ? from.states()->nearest(shared) : shared;
  if (prefix <= request_.result.done) return;
  make_own_session();
  if (states()) states()->share(*from.states(), prefix);
  cache().share(from.cache(), prefix);
  request_.session->keep_first(request_.tokens.first(std::size_t(prefix)));
  if (const int first = std::max(without_output(), request_.result.done); prefix > first) {
    const float* known = std::get<LogProbsOutput>(from.request_.output).log_probs - from.without_output();
    float* log_probs = std::get<LogProbsOutput>(request_.output).log_probs - without_output();
    std::copy(known + first, known + prefix, log_probs + first);
  }
  request_.before = std::size_t(prefix);
  if (states()) request_.state = states()->current();
  request_.result.done = prefix;
  plan();
}

void BatchRequest::make_own_session() {
  if (request_.session) return;
  request_.own = engine_.session(int(request_.tokens.size()));
  request_.session = request_.own.get();
  request_.own->tokens_.reserve(request_.tokens.size());
}

void BatchRequest::release_own() {
  if (!request_.finished || !request_.own) return;
  request_.own.reset();
  request_.session = nullptr;
}

void BatchRequest::make_room(int end) {
  Session& session = *request_.session;
  CallCounters counters;
  session.cache_->reserve(int(session.cached()), end, counters);
  session.count_bytes();
  count(counters);
}

void BatchRequest::reserve(bool to_the_end) {
  const auto room = [&] {
    make_room(to_the_end ? int(request_.start + request_.tokens.size())
                         : int(request_.session->cached()) + rows);
  };
  try {
    room();
  } catch (const KvMemoryError&) {
    if (!drop_drafts()) throw;
    rows = std::min(rows, left);
    room();  // a text that fits without drafts must not fail because of them
  }
}

// Whether the engine may start on the token at position `end` early. Reserves room for it; a lack of memory
// is not an error here, as the token has not been requested yet.
bool BatchRequest::continues(int end, StateRef* state) {
  const auto* greedy = std::get_if<GreedyOutput>(&request_.output);
  if (!greedy || !greedy->continues || !engine_.runs_ahead() || rows_of(request_.output) != 1 ||
      request_.trace || end >= request_.session->max_context())
    return false;
  try {
    make_room(end + 1);
    if (state) *state = states()->pool().take();
  } catch (const KvMemoryError&) {
    return false;
  } catch (const DeviceError&) {
    return false;
  }
  return true;
}

Chunk BatchRequest::chunk(bool to_the_end, std::span<const int> marks) {
  make_own_session();
  reserve(to_the_end);
  return to_recompute() > 0 ? chunk_again(marks) : next_chunk(marks);
}

Chunk BatchRequest::next_chunk(std::span<const int> marks) {
  Chunk chunk;
  chunk.tokens = request_.tokens.subspan(std::size_t(done), std::size_t(rows));
  chunk.position = int(request_.start) + done;
  chunk.cache = &cache();
  chunk.expansion = request_.expansion;
  chunk.segment = request_.segment;
  chunk.trace = request_.trace;
  const int first = std::max(done, without_output());  // first token with an output
  chunk.output = part_of(request_.output, first - without_output(), std::max(done + rows - first, 0));
  if (states()) {
    const Choices* choices = choices_of(request_.output);
    const bool drafts = choices && !choices->drafts.empty();
    chunk.states = states()->plan({.tokens = rows,
                                   .first_draft = drafts ? without_output() + 1 - done : rows,
                                   .keep_last = rows == left && request_.tokens.size() > 1 && !drafts,
                                   .marks = marks});
  }
  if (auto* greedy = std::get_if<GreedyOutput>(&chunk.output))
    greedy->continues = continues(chunk.position + rows, states() ? &chunk.states.ahead : nullptr);
  return chunk;
}

// Returns a chunk that recomputes tokens of the session after its last known state.
Chunk BatchRequest::chunk_again(std::span<const int> marks) const {
  const Session& session = *request_.session;
  Chunk chunk;
  chunk.position = int(session.cached());
  chunk.tokens = std::span(session.tokens_).subspan(session.cached(), std::size_t(rows));
  chunk.cache = &cache();
  chunk.states =
      states()->plan({.tokens = rows, .first_draft = rows, .keep_last = rows == left, .marks = marks});
  return chunk;
}

void BatchRequest::finish(const Chunk& chunk) {
  check_results(chunk.output, chunk.position + int(chunk.tokens.size()) - rows_of(chunk.output),
                std::size_t(engine_.config().vocab_size));
  Session& session = *request_.session;
  request_.result.computed += int(chunk.tokens.size());
  if (to_recompute() > 0) {
    states()->advance(chunk.states, int(chunk.tokens.size()));
    return plan();
  }
  const int kept = accepted_tokens(chunk);
  if (states()) states()->advance(chunk.states, kept);
  {
    const std::scoped_lock lock(session.state_mutex_);
    session.tokens_.insert(session.tokens_.end(), chunk.tokens.begin(), chunk.tokens.begin() + kept);
  }
  if (std::size_t(kept) < chunk.tokens.size())
    session.drop_uncounted_rows();
  else if (states())
    session.count_bytes();
  request_.result.done += kept;
  plan();
  if (std::size_t(kept) == chunk.tokens.size() && left > 0) return;
  request_.finished = true;
  request_.state = {};
  left = 0;
  Choices* choices = choices_of(request_.output);
  if (!choices) return;
  if (!choices->drafts.empty())
    choices->chosen = choices->chosen.first(std::size_t(request_.result.accepted) + 1);
  request_.result.token = choices->chosen.back();
  if (const auto* sampled = std::get_if<SampledOutput>(&request_.output))
    for (const TokenId token : choices->chosen) sampled->sampler->accept(token);
}

// Number of tokens of the chunk before the first rejected draft.
int BatchRequest::accepted_tokens(const Chunk& chunk) {
  const Choices* choices = choices_of(chunk.output);
  if (!choices) return int(chunk.tokens.size());
  int& right = request_.result.accepted;
  for (const TokenId token : choices->chosen) {
    if (std::size_t(right) == choices->drafts.size()) break;
    if (token != choices->drafts[std::size_t(right)])
      return without_output() + 1 + right - request_.result.done;
    ++right;
  }
  return int(chunk.tokens.size());
}

bool BatchRequest::drop_drafts() {
  Choices* choices = choices_of(request_.output);
  const std::size_t right = std::size_t(request_.result.accepted);
  if (!choices || choices->drafts.size() == right) return false;
  request_.tokens = request_.tokens.first(std::size_t(without_output()) + right + 1);
  choices->drafts = choices->drafts.first(right);
  choices->chosen = choices->chosen.first(right + 1);
  std::copy(choices->drafts.begin(), choices->drafts.end(), choices->chosen.begin());
  choices->chosen.back() = -1;
  request_.session->drop_uncounted_rows();
  plan();
  return true;
}

void BatchRequest::fail(std::exception_ptr error) {
  request_.error = std::move(error);
  request_.finished = true;
  left = 0;
  if (!request_.session || request_.own) return;
  Session& session = *request_.session;
  if (states()) states()->replace(int(request_.before), std::exchange(request_.state, {}));
  {
    const std::scoped_lock lock(session.state_mutex_);
    if (session.tokens_.size() > request_.before) session.tokens_.resize(request_.before);
  }
  session.drop_uncounted_rows();
}

void BatchRequest::count(const CallCounters& counters) const {
  const std::scoped_lock lock(request_.session->state_mutex_);
  request_.session->counters_ += counters;
}

void BatchRequest::remember_pages() const {
  if (request_.session && !request_.own) request_.session->remember_pages();
}

}  // namespace metal_prefill
