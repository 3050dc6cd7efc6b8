#include "batch.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "planner.h"

namespace metal_prefill {

// The requests of one call, which holds the locks of all of their sessions.
class Batch {
 public:
  Batch(Engine& engine, std::span<const Share> shares, const char* call);
  ~Batch();

  // Until all requests are finished.
  void run(const Progress& progress);
  void run_pass();

 private:
  struct Item final : PlannedRequest {
    explicit Item(Request& of) : request(of) {}
    Request& request;

    // A session of the batch's own is made with the first rows.
    Session* session() const { return request.session; }
    Cache& cache() const { return *session()->cache_; }
    SequenceStates* states() const { return session() ? cache().states() : nullptr; }
    // Number of tokens before the first row with an output.
    int without_output() const { return int(request.tokens.size()) - rows_of(request.output); }
    bool reuses() const { return request.prefix == Prefix::kReuse; }
    // Tokens of the session whose state is unknown: they are computed again before those of the request.
    int behind() const { return session() ? int(session()->tokens_.size() - session()->cached()) : 0; }
  };

  void check_output(const Output& output) const;
  void check(const Item& item) const;
  void begin(Item& item) const;
  void find_known(Item& item) const;
  void resume(const Item& item) const;
  void plan(Item& item) const;
  bool compute_pass();
  void fill_chunks();
  void compute();
  void open(Item& item) const;
  void reserve(Item& item) const;
  void make_room(Item& item, int end) const;
  bool continues(Item& item, int end, StateRef* state) const;
  Chunk next_chunk(Item& item);
  Chunk chunk_again(Item& item);
  std::span<const int> marks_of(const Item& item);
  void check_results(const Chunk& chunk) const;
  void finish(Item& item, const Chunk& chunk) const;
  void follow_leader(Item& item) const;
  void release_own() const;
  static int accepted_tokens(Item& item, const Chunk& chunk);
  static bool drop_drafts(Item& item);
  static void fail(Item& item, std::exception_ptr error);
  void count(const CallCounters& counters) const;

  Engine& engine_;
  std::vector<Item> items_;
  std::vector<Lane> lanes_;
  std::deque<SessionLock::Hold> locks_;
  bool to_the_end_ = false;  // memory is then reserved for whole requests
  // The next pass. Capacities suffice for all items, so that no pass allocates.
  std::vector<PlannedRequest*> chosen_;
  std::vector<Chunk> chunks_;
  std::vector<Item*> members_;  // of the chunks
  std::vector<int> marks_;      // positions at which others follow
};

Batch::Batch(Engine& engine, std::span<const Share> shares, const char* call) : engine_(engine) {
  std::size_t requests = 0;
  for (const Share& share : shares) requests += share.requests.size();
  items_.reserve(requests);
  chosen_.reserve(requests);
  chunks_.reserve(requests);
  members_.reserve(requests);
  marks_.reserve(requests);
  std::vector<Session*> sessions;
  std::vector<const Sampler*> samplers;
  for (const Share& share : shares) {
    Lane& lane = lanes_.emplace_back(Lane{{}, share.rows, share.turn});
    for (Request* request : share.requests) {
      if (request->finished) continue;
      if (&(request->session ? request->session->engine() : *request->scratch->engine) != &engine)
        throw std::invalid_argument("a batch takes sessions of one model only");
      check_output(request->output);
      if (!request->own && request->session) sessions.push_back(request->session);
      if (const auto* sampled = std::get_if<SampledOutput>(&request->output))
        samplers.push_back(sampled->sampler);
      lane.requests.push_back(&items_.emplace_back(*request));
    }
  }
  // Locked in order of their addresses, so that two batches never wait for each other.
  std::sort(sessions.begin(), sessions.end(), std::less<>());
  if (std::adjacent_find(sessions.begin(), sessions.end()) != sessions.end())
    throw std::invalid_argument("a session appears twice in a batch");
  std::sort(samplers.begin(), samplers.end(), std::less<>());
  if (std::adjacent_find(samplers.begin(), samplers.end()) != samplers.end())
    throw std::invalid_argument("a sampler appears twice in a batch");
  for (Session* session : sessions) locks_.emplace_back(session->lock_, call);
  for (Item& item : items_) {
    try {
      begin(item);
    } catch (...) {
      fail(item, std::current_exception());
    }
  }
}

Batch::~Batch() {
  for (Item& item : items_)
    if (item.session() && !item.request.own) item.session()->remember_pages();
}

void Batch::check_output(const Output& output) const {
  if (std::holds_alternative<NoOutput>(output)) return;
  const bool pooled = std::holds_alternative<PooledOutput>(output);
  if (pooled && engine_.config().causal)
    throw std::invalid_argument("only texts whose tokens see later ones are pooled in their pass");
  if (!engine_.config().has_head && !pooled && !std::holds_alternative<HiddenOutput>(output))
    throw std::invalid_argument(
        "this model is an encoder: it has no output projection, and so no logits and "
        "no next token; use its hidden states, as embed, rerank and classify do");
  const int rows = rows_of(output);
  const auto* sampled = std::get_if<SampledOutput>(&output);
  if (rows < 1 || (rows > 1 && sampled && sampled->choices.drafts.empty()))
    throw std::invalid_argument("an output of " + std::to_string(rows) + " rows is not known");
}

// Checks the request before anything changes.
void Batch::check(const Item& item) const {
  const Request& request = item.request;
  const std::span<const TokenId> tokens = request.tokens;
  if (request.claim != 0 && !item.reuses()) item.session()->check_claim(request.claim);
  if (tokens.empty()) throw std::invalid_argument("the prompt is empty: at least one token is needed");
  if (item.without_output() < 0)
    throw std::invalid_argument("an output of " + std::to_string(rows_of(request.output)) +
                                " rows is wanted of " + std::to_string(tokens.size()) + " tokens");
  for (std::size_t i = 0; i < tokens.size(); ++i) engine_.check_token(tokens[i], i);
  if (!engine_.config().causal && (request.start > 0 || item.reuses()))
    throw std::invalid_argument(
        "the tokens of this model see those after them: a text goes in whole, into an empty session");
  if (const Expansion& expansion = request.expansion; expansion.tokens != 0) {
    if (engine_.config().causal)
      throw std::invalid_argument("only texts whose tokens see later ones are expanded");
    if (expansion.tokens < 0 || std::size_t(expansion.tokens) >= tokens.size())
      throw std::invalid_argument("an expansion of " + std::to_string(expansion.tokens) + " tokens leaves " +
                                  std::to_string(std::int64_t(tokens.size()) - expansion.tokens) +
                                  " of the text: at least one is needed");
  }
  if (item.session()) item.session()->check_room(request.start, tokens.size());
}

// Checks a request and finds its longest known prefix, or where an earlier pass left it.
void Batch::begin(Item& item) const {
  Request& request = item.request;
  Session* session = item.session();
  if (session) {
    const std::scoped_lock lock(session->state_mutex_);
    session->counters_ = {};
    session->recomputed_ = 0;
  }
  if (request.own || request.result.computed > 0) {
    resume(item);
  } else {
    if (session) {
      request.before = session->tokens_.size();
      if (SequenceStates* states = item.states()) request.state = states->current();
    }
    request.start = item.reuses() ? 0 : request.before;
    check(item);
    if (session) find_known(item);
    if (const Choices* choices = choices_of(request.output))
      std::fill(choices->chosen.begin(), choices->chosen.end(), TokenId(-1));
  }
  item.whole = !engine_.config().causal;
  item.scope = request.scratch;
  if (session) item.prefix_namespace = session->prefix_namespace_;
  item.shares = item.reuses();
  item.scored = std::holds_alternative<LogProbsOutput>(request.output);
  plan(item);
}

void Batch::find_known(Item& item) const {
  Request& request = item.request;
  Session& session = *item.session();
  std::size_t again = std::size_t(item.behind());  // known tokens to recompute
  if (item.reuses()) {
    const std::span<const TokenId> tokens = request.tokens;
    const int most = std::min(item.without_output(), int(tokens.size()) - 1);
    const std::size_t known = session.keep_known(tokens.first(std::size_t(most)), tokens.size());
    request.before = session.cached();
    session.keep_first(tokens.first(request.before));  // later tokens are computed with the rest
    if (SequenceStates* states = item.states()) request.state = states->current();
    request.result.done = int(request.before);
    again = known - request.before;
  }
  const std::scoped_lock lock(session.state_mutex_);
  session.tokens_.reserve(request.start + request.tokens.size());  // from here on nothing may fail
  session.claim_ = request.claim;
  session.recomputed_ = again;
}

void Batch::resume(const Item& item) const {
  const std::size_t end = item.request.start + std::size_t(item.request.result.done);
  if (item.session()->tokens_.size() != end)
    throw SessionBusyError("another call changed the session between two passes of a request");
}

// Updates what the planner knows.
void Batch::plan(Item& item) const {
  const Request& request = item.request;
  const int behind = item.behind();
  item.tokens = request.tokens;
  item.done = request.result.done;
  item.left = behind > 0 ? behind : int(request.tokens.size()) - request.result.done;
  item.shareable = std::min(item.without_output(), int(request.tokens.size()) - 1);
}

// Takes the prefix that the leader has computed. Log probabilities of its tokens are copied.
void Batch::follow_leader(Item& item) const {
  const Item& leader = static_cast<const Item&>(*std::exchange(item.leader, nullptr));
  Request& request = item.request;
  if (leader.request.error || leader.request.result.done < item.shared) return;
  const int shared = leader.states() ? leader.states()->nearest(item.shared) : item.shared;
  if (shared <= request.result.done) return;
  open(item);
  if (item.states()) item.states()->share(*leader.states(), shared);
  item.cache().share(leader.cache(), shared);
  item.session()->keep_first(request.tokens.first(std::size_t(shared)));
  if (const int first = std::max(item.without_output(), request.result.done); shared > first) {
    const float* known = std::get<LogProbsOutput>(leader.request.output).log_probs - leader.without_output();
    float* log_probs = std::get<LogProbsOutput>(request.output).log_probs - item.without_output();
    std::copy(known + first, known + shared, log_probs + first);
  }
  request.before = std::size_t(shared);
  if (item.states()) request.state = item.states()->current();
  request.result.done = shared;
  plan(item);
}

void Batch::open(Item& item) const {
  Request& request = item.request;
  if (request.session) return;
  request.own = engine_.session(int(request.tokens.size()));
  request.session = request.own.get();
  request.own->tokens_.reserve(request.tokens.size());
}

void Batch::make_room(Item& item, int end) const {
  Session& session = *item.session();
  CallCounters counters;
  session.cache_->reserve(int(session.cached()), end, counters);
  const std::scoped_lock lock(session.state_mutex_);
  session.cache_bytes_ = session.cache_->bytes();
  session.counters_ += counters;
}

// Before each pass: a progress callback may have forked the session, which then shares its next page.
void Batch::reserve(Item& item) const {
  const auto room = [&] {
    const int rows = int(item.session()->cached()) + item.rows;
    make_room(item, to_the_end_ ? int(item.request.start + item.request.tokens.size()) : rows);
  };
  try {
    room();
  } catch (const KvMemoryError&) {
    if (!drop_drafts(item)) throw;
    plan(item);
    item.rows = std::min(item.rows, item.left);
    room();  // a text that fits without drafts must not fail for them
  }
}

// Whether the engine may start on the token at position `end` early. Reserves room for it; a lack of memory
// is not an error here, as the token has not been requested yet.
bool Batch::continues(Item& item, int end, StateRef* state) const {
  const Request& request = item.request;
  const auto* greedy = std::get_if<GreedyOutput>(&request.output);
  if (!greedy || !greedy->continues || !engine_.runs_ahead() || rows_of(request.output) != 1 ||
      request.trace || end >= item.session()->max_context())
    return false;
  try {
    make_room(item, end + 1);
    if (state) *state = item.states()->pool().take();
  } catch (const KvMemoryError&) {
    return false;
  } catch (const DeviceError&) {
    return false;
  }
  return true;
}

Chunk Batch::next_chunk(Item& item) {
  const Request& request = item.request;
  const int tokens = item.rows, done = request.result.done;
  Chunk chunk;
  chunk.tokens = request.tokens.subspan(std::size_t(done), std::size_t(tokens));
  chunk.position = int(request.start) + done;
  chunk.cache = &item.cache();
  chunk.expansion = request.expansion;
  chunk.trace = request.trace;
  const int first = std::max(done, item.without_output());  // token with an output
  chunk.output = part_of(request.output, first - item.without_output(), std::max(done + tokens - first, 0));
  const SequenceStates* states = item.states();
  if (states) {
    const Choices* choices = choices_of(request.output);
    const bool drafts = choices && !choices->drafts.empty();
    chunk.states = states->plan({.tokens = tokens,
                                 .first_draft = drafts ? item.without_output() + 1 - done : tokens,
                                 .keep_last = tokens == item.left && request.tokens.size() > 1 && !drafts,
                                 .marks = marks_of(item)});
  }
  if (auto* greedy = std::get_if<GreedyOutput>(&chunk.output))
    greedy->continues = continues(item, chunk.position + tokens, states ? &chunk.states.ahead : nullptr);
  return chunk;
}

// Tokens that the session has, from the last known state on.
Chunk Batch::chunk_again(Item& item) {
  Session& session = *item.session();
  Chunk chunk;
  chunk.position = int(session.cached());
  chunk.tokens = std::span(session.tokens_).subspan(session.cached(), std::size_t(item.rows));
  chunk.cache = &item.cache();
  chunk.states = item.states()->plan({.tokens = item.rows,
                                      .first_draft = item.rows,
                                      .keep_last = item.rows == item.left,
                                      .marks = marks_of(item)});
  return chunk;
}

std::span<const int> Batch::marks_of(const Item& item) {
  marks_.clear();
  for (const Item& other : items_)
    if (other.leader == &item) marks_.push_back(other.shared);
  return marks_;
}

// Throws NumericalError for a NaN result; calls never return NaN.
void Batch::check_results(const Chunk& chunk) const {
  const std::size_t first = chunk.tokens.size() - std::size_t(rows_of(chunk.output));
  const auto fail = [&](const std::string& what, std::size_t row) {
    throw NumericalError(what + " of the token at position " +
                         std::to_string(chunk.position + int(first + row)) + " is NaN");
  };
  const auto first_nan = [](std::span<const float> values) {
    return std::size_t(
        std::find_if(values.begin(), values.end(), [](float value) { return std::isnan(value); }) -
        values.begin());
  };
  // Tokens after a rejected draft are ignored.
  const auto check_choices = [&](const Choices& choices, const auto& fail_row) {
    for (std::size_t i = 0; i < choices.chosen.size(); ++i) {
      if (choices.chosen[i] < 0) fail_row(i);
      const std::size_t draft = std::size_t(choices.first) + i;
      if (draft < choices.drafts.size() && choices.chosen[i] != choices.drafts[draft]) break;
    }
  };
  std::visit(Overloaded{[](const NoOutput&) {},
                        [&](const GreedyOutput& greedy) {
                          check_choices(greedy.choices, [&](std::size_t row) { fail("every logit", row); });
                        },
                        [&](const SampledOutput& sampled) {
                          check_choices(sampled.choices, [&](std::size_t row) {
                            try {
                              std::rethrow_exception(sampled.error);
                            } catch (const NanLogitError& error) {
                              fail("logit " + std::to_string(error.token), row);
                            }
                          });
                        },
                        [&](const LogitsOutput& all) {
                          const std::span<const float> logits(all.logits,
                                                              std::size_t(engine_.config().vocab_size));
                          if (const std::size_t bad = first_nan(logits); bad < logits.size())
                            fail("logit " + std::to_string(bad), 0);
                        },
                        [&](const LogProbsOutput& scored) {
                          for (std::size_t i = 0; i < scored.targets.size(); ++i)
                            if (scored.targets[i] >= 0 && std::isnan(scored.log_probs[i]))
                              fail("the log probability after that", i);
                        },
                        [&](const HiddenOutput& hidden) {
                          const std::size_t dim = std::size_t(hidden.dim);
                          const std::span<const float> states(hidden.states, std::size_t(hidden.rows) * dim);
                          if (const std::size_t bad = first_nan(states); bad < states.size())
                            fail("the hidden state", bad / dim);
                        },
                        [&](const PooledOutput& pooled) {
                          if (pooled.nan_row >= 0) fail("the hidden state", std::size_t(pooled.nan_row));
                        }},
             chunk.output);
}

void Batch::finish(Item& item, const Chunk& chunk) const {
  check_results(chunk);
  Request& request = item.request;
  Session& session = *item.session();
  request.result.computed += int(chunk.tokens.size());
  if (item.behind() > 0) {
    item.states()->advance(chunk.states, int(chunk.tokens.size()));
    return plan(item);
  }
  const int kept = accepted_tokens(item, chunk);
  if (item.states()) item.states()->advance(chunk.states, kept);
  {
    const std::scoped_lock lock(session.state_mutex_);
    session.tokens_.insert(session.tokens_.end(), chunk.tokens.begin(), chunk.tokens.begin() + kept);
    if (std::size_t(kept) < chunk.tokens.size()) session.drop_uncounted_rows();
    if (item.states()) session.cache_bytes_ = session.cache_->bytes();
  }
  request.result.done += kept;
  plan(item);
  if (std::size_t(kept) == chunk.tokens.size() && item.left > 0) return;
  request.finished = true;
  request.state = {};
  item.left = 0;
  Choices* choices = choices_of(request.output);
  if (!choices) return;
  if (!choices->drafts.empty())
    choices->chosen = choices->chosen.first(std::size_t(request.result.accepted) + 1);
  request.result.token = choices->chosen.back();
  if (const auto* sampled = std::get_if<SampledOutput>(&request.output))
    for (const TokenId token : choices->chosen) sampled->sampler->accept(token);
}

// Number of tokens of the chunk before the first rejected draft.
int Batch::accepted_tokens(Item& item, const Chunk& chunk) {
  const Choices* choices = choices_of(chunk.output);
  if (!choices) return int(chunk.tokens.size());
  PromptResult& result = item.request.result;
  int& right = result.accepted;
  for (const TokenId token : choices->chosen) {
    if (std::size_t(right) == choices->drafts.size()) break;
    if (token != choices->drafts[std::size_t(right)]) return item.without_output() + 1 + right - result.done;
    ++right;
  }
  return int(chunk.tokens.size());
}

// Removes drafts that are not verified; returns false if there are none. A wrong draft may leave NaN in K and
// V, and a tile of attention carries 0 * NaN to the rows before it. Without the draft these rows may be
// finite.
bool Batch::drop_drafts(Item& item) {
  Request& request = item.request;
  Choices* choices = choices_of(request.output);
  const std::size_t right = std::size_t(request.result.accepted);
  if (!choices || choices->drafts.size() == right) return false;
  request.tokens = request.tokens.first(std::size_t(item.without_output()) + right + 1);
  choices->drafts = choices->drafts.first(right);
  choices->chosen = choices->chosen.first(right + 1);
  std::copy(choices->drafts.begin(), choices->drafts.end(), choices->chosen.begin());
  choices->chosen.back() = -1;
  Session& session = *item.session();
  const std::scoped_lock lock(session.state_mutex_);
  session.drop_uncounted_rows();
  return true;
}

void Batch::fail(Item& item, std::exception_ptr error) {
  Request& request = item.request;
  request.error = std::move(error);
  request.finished = true;
  item.left = 0;
  if (!request.session || request.own) return;
  Session& session = *request.session;
  if (item.states()) item.states()->replace(int(request.before), std::exchange(request.state, {}));
  const std::scoped_lock lock(session.state_mutex_);
  if (session.tokens_.size() > request.before) session.tokens_.resize(request.before);
  session.drop_uncounted_rows();
}

void Batch::count(const CallCounters& counters) const {
  for (const Item* item : members_) {
    Session& session = *item->session();
    const std::scoped_lock lock(session.state_mutex_);
    session.counters_ += counters;
  }
}

void Batch::release_own() const {
  for (const Item& item : items_) {
    if (!item.request.finished || !item.request.own) continue;
    item.request.own.reset();
    item.request.session = nullptr;
  }
}

// Makes chunks of the rows that the planner gave to requests.
void Batch::fill_chunks() {
  chunks_.clear();
  members_.clear();
  for (PlannedRequest* planned : chosen_) {
    Item& item = static_cast<Item&>(*planned);
    try {
      open(item);
      reserve(item);
      chunks_.push_back(item.behind() > 0 ? chunk_again(item) : next_chunk(item));
      members_.push_back(&item);
    } catch (...) {
      fail(item, std::current_exception());
    }
  }
}

void Batch::compute() {
  CallCounters counters;
  counters.passes = 1;
  try {
    engine_.forward(chunks_, counters);
  } catch (...) {
    for (Item* item : members_) fail(*item, std::current_exception());
    return;
  }
  count(counters);
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    Item& item = *members_[i];
    try {
      finish(item, chunks_[i]);
    } catch (const NumericalError&) {
      if (drop_drafts(item))
        plan(item);
      else
        fail(item, std::current_exception());
    } catch (...) {
      fail(item, std::current_exception());
    }
  }
}

// Returns whether any request got rows.
bool Batch::compute_pass() {
  plan_pass(lanes_, engine_.pass_rows(), chosen_);
  fill_chunks();
  if (!chunks_.empty()) compute();
  for (Item& item : items_) {
    if (!item.leader) continue;
    try {
      follow_leader(item);
    } catch (...) {
      fail(item, std::current_exception());
    }
  }
  release_own();
  return !chosen_.empty();
}

void Batch::run_pass() {
  const auto is_left = [](const PlannedRequest* request) { return request->left > 0; };
  const std::vector<PlannedRequest*>& last = lanes_.back().requests;
  while (compute_pass() && std::any_of(last.begin(), last.end(), is_left))
    for (std::size_t i = 0; i + 1 < lanes_.size(); ++i) lanes_[i].rows = 0;
}

void Batch::run(const Progress& progress) {
  to_the_end_ = true;
  int total = 0;
  for (const Item& item : items_)
    if (!item.request.error) total += int(item.request.tokens.size());
  while (compute_pass()) {
    int done = 0;
    for (const Item& item : items_) done += item.request.result.done;
    if (progress && !progress(done, total)) break;
  }
}

void run_batch(Engine& engine, std::span<Request* const> requests, const char* call,
               const Progress& progress) {
  constexpr int kAll = std::numeric_limits<int>::max();
  const Share all = {{requests.begin(), requests.end()}, kAll, kAll};
  Batch(engine, {&all, 1}, call).run(progress);
}

PromptResult run_alone(Session& session, Request request, const char* call, const Progress& progress) {
  request.session = &session;
  Request* const only = &request;
  run_batch(session.engine(), {&only, 1}, call, progress);
  if (request.error) std::rethrow_exception(request.error);
  return request.result;
}

void run_pass(Engine& engine, std::span<const Share> shares, const char* call) {
  if (!shares.empty()) Batch(engine, shares, call).run_pass();
}

}  // namespace metal_prefill
