#include "batch.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "../cache/prefix_tree.h"

namespace metal_prefill {

// The requests of one call, which holds the locks of all of their sessions.
class Batch {
 public:
  Batch(Engine& engine, std::span<Request* const> requests, const char* call);

  void run(const Progress& progress);

 private:
  struct Item {
    Request& request;
    std::size_t start = 0;   // position of tokens[0]
    std::size_t before = 0;  // tokens of the session if the request fails
    bool active = false;
    Item* leader = nullptr;  // computes their common prefix first
    std::size_t shared = 0;  // tokens of that
    StatePoint state;        // tokens of the session if the request fails
    std::vector<int> marks;  // positions at which others follow it

    Session& session() const { return *request.session; }
    const std::string& prefix_namespace() const { return request.session->prefix_namespace_; }
    int left() const { return int(request.tokens.size()) - request.result.done; }
    // Number of tokens before the first row with an output.
    int without_output() const { return int(request.tokens.size()) - rows_of(request.output); }
    bool reuses() const { return request.prefix == Prefix::kReuse; }
    SequenceStates* states() const { return session().cache_->states(); }
    // Tokens of the session whose state is unknown: they are computed again before those of the request.
    int behind() const { return int(session().tokens_.size() - session().cached()); }
  };

  void check_output(const Output& output) const;
  void begin(Item& item) const;
  void follow_leaders();
  bool is_waiting(Item& item) const;
  void make_room(Item& item, int kept, int end) const;
  bool continues(Item& item, int end, StateRef* state) const;
  Chunk next_chunk(Item& item, int tokens) const;
  Chunk chunk_again(Item& item, int tokens) const;
  void check_results(const Chunk& chunk) const;
  void finish(Item& item, const Chunk& chunk) const;
  static int accepted_tokens(Item& item, const Chunk& chunk);
  static bool drop_drafts(Item& item);
  static void fail(Item& item, std::exception_ptr error);
  void count(std::span<Item* const> items, const CallCounters& counters) const;

  Engine& engine_;
  std::vector<Item> items_;
  std::vector<Item*> order_;  // order of computation: items with a common prefix follow each other
  std::deque<SessionLock::Hold> locks_;
};

Batch::Batch(Engine& engine, std::span<Request* const> requests, const char* call) : engine_(engine) {
  std::vector<Session*> sessions;
  std::vector<const Sampler*> samplers;
  for (Request* request : requests) {
    if (&request->session->engine() != &engine)
      throw std::invalid_argument("a batch takes sessions of one model only");
    items_.push_back({*request});
    sessions.push_back(request->session);
    if (const auto* sampled = std::get_if<SampledOutput>(&request->output))
      samplers.push_back(sampled->sampler);
    check_output(request->output);
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
    item.before = item.session().tokens_.size();
    if (item.states()) item.state = item.states()->current();
  }
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

// Checks the request before anything changes, and finds its longest known prefix.
void Batch::begin(Item& item) const {
  Session& session = item.session();
  const std::span<const TokenId> tokens = item.request.tokens;
  const Claim claim = item.request.claim;
  if (claim != 0 && !item.reuses()) session.check_claim(claim);
  {
    const std::scoped_lock lock(session.state_mutex_);
    session.counters_ = {};
    session.recomputed_ = 0;
  }
  if (tokens.empty()) throw std::invalid_argument("the prompt is empty: at least one token is needed");
  if (item.without_output() < 0)
    throw std::invalid_argument("an output of " + std::to_string(rows_of(item.request.output)) +
                                " rows is wanted of " + std::to_string(tokens.size()) + " tokens");
  if (item.reuses() && rows_of(item.request.output) > 1)
    throw std::invalid_argument("an output of several rows needs each to be computed: none can be reused");
  for (std::size_t i = 0; i < tokens.size(); ++i) engine_.check_token(tokens[i], i);
  item.start = item.reuses() ? 0 : session.tokens_.size();
  if (!engine_.config().causal && (item.start > 0 || item.reuses()))
    throw std::invalid_argument(
        "the tokens of this model see those after them: a text goes in whole, into an empty session");
  if (const Expansion& expansion = item.request.expansion; expansion.tokens != 0) {
    if (engine_.config().causal)
      throw std::invalid_argument("only texts whose tokens see later ones are expanded");
    if (expansion.tokens < 0 || std::size_t(expansion.tokens) >= tokens.size())
      throw std::invalid_argument("an expansion of " + std::to_string(expansion.tokens) + " tokens leaves " +
                                  std::to_string(std::int64_t(tokens.size()) - expansion.tokens) +
                                  " of the text: at least one is needed");
  }
  session.check_room(item.start, tokens.size());
  std::size_t again = std::size_t(item.behind());  // known tokens to recompute
  if (item.reuses()) {
    const std::size_t known = session.keep_known(tokens);
    item.before = session.cached();
    session.keep_first(tokens.first(item.before));  // later tokens are computed with the rest
    if (item.states()) item.state = item.states()->current();
    item.request.result.done = int(item.before);
    again = known - item.before;
  }
  if (const Choices* choices = choices_of(item.request.output))
    std::fill(choices->chosen.begin(), choices->chosen.end(), TokenId(-1));
  const std::scoped_lock lock(session.state_mutex_);
  session.tokens_.reserve(item.start + tokens.size());  // from here on nothing may fail
  session.claim_ = claim;
  session.recomputed_ = again;
  item.active = true;
}

// Computes a prefix once if several requests of a namespace share it: each follows an earlier one.
void Batch::follow_leaders() {
  // Computing fewer tokens takes less time than copying a page and waiting for a pass.
  constexpr std::size_t kWorthSharing = 16;
  for (Item& item : items_)
    if (item.active) order_.push_back(&item);
  if (order_.size() < 2) return;
  std::stable_sort(order_.begin(), order_.end(), [](const Item* a, const Item* b) {
    if (!a->reuses() || !b->reuses()) return a->reuses() < b->reuses();
    if (a->prefix_namespace() != b->prefix_namespace()) return a->prefix_namespace() < b->prefix_namespace();
    return std::lexicographical_compare(a->request.tokens.begin(), a->request.tokens.end(),
                                        b->request.tokens.begin(), b->request.tokens.end());
  });
  for (std::size_t i = 1; i < order_.size(); ++i) {
    Item &before = *order_[i - 1], &item = *order_[i];
    if (!before.reuses() || !item.reuses() || before.prefix_namespace() != item.prefix_namespace()) continue;
    const std::span<const TokenId> a = before.request.tokens, b = item.request.tokens;
    const auto end = a.begin() + std::ptrdiff_t(std::min(a.size(), b.size() - 1));
    const std::size_t shared = std::size_t(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
    if (shared < item.before + kWorthSharing) continue;
    item.leader = &before;
    item.shared = shared;
    before.marks.push_back(int(shared));
  }
}

// Whether the leader has yet to reach the end of the shared prefix. After that the item starts from its
// pages.
bool Batch::is_waiting(Item& item) const {
  if (!item.leader) return false;
  Item& leader = *item.leader;
  if (leader.request.error) {
    item.leader = nullptr;
    return false;
  }
  if (std::size_t(leader.request.result.done) < item.shared) return true;
  item.leader = nullptr;
  if (item.states()) {
    item.shared = std::size_t(leader.states()->nearest(int(item.shared)));
    if (item.shared <= item.before) return false;
    item.states()->share(*leader.states(), int(item.shared));
    item.state = item.states()->current();
  }
  item.session().cache_->share(*leader.session().cache_, int(item.shared));
  item.session().keep_first(item.request.tokens.first(item.shared));
  item.before = item.shared;
  item.request.result.done = int(item.shared);
  return false;
}

void Batch::make_room(Item& item, int kept, int end) const {
  Session& session = item.session();
  CallCounters counters;
  session.cache_->reserve(kept, end, counters);
  const std::scoped_lock lock(session.state_mutex_);
  session.cache_bytes_ = session.cache_->bytes();
  session.counters_ += counters;
}

// Whether the engine may start on the token at position `end` early. Reserves room for it; a lack of memory
// is not an error here, as the token has not been requested yet.
bool Batch::continues(Item& item, int end, StateRef* state) const {
  const Request& request = item.request;
  const auto* greedy = std::get_if<GreedyOutput>(&request.output);
  if (!greedy || !greedy->continues || !engine_.runs_ahead() || rows_of(request.output) != 1 ||
      request.trace || end >= item.session().max_context())
    return false;
  try {
    make_room(item, end, end + 1);
    if (state) *state = item.states()->pool().take();
  } catch (const KvMemoryError&) {
    return false;
  } catch (const DeviceError&) {
    return false;
  }
  return true;
}

Chunk Batch::next_chunk(Item& item, int tokens) const {
  const Request& request = item.request;
  const std::size_t done = std::size_t(request.result.done);
  const int position = int(item.start + done);
  // Again before each pass: a progress callback may have forked the session, which then shares its next page.
  make_room(item, position, position + tokens);
  Chunk chunk;
  chunk.tokens = request.tokens.subspan(done, std::size_t(tokens));
  chunk.position = position;
  chunk.cache = item.session().cache_.get();
  chunk.expansion = request.expansion;
  chunk.trace = request.trace;
  const int first = std::max(int(done), item.without_output());  // token with an output
  chunk.output =
      part_of(request.output, first - item.without_output(), std::max(int(done) + tokens - first, 0));
  const SequenceStates* states = item.states();
  if (states) {
    const Choices* choices = choices_of(request.output);
    const bool drafts = choices && !choices->drafts.empty();
    chunk.states = states->plan({.tokens = tokens,
                                 .first_draft = drafts ? item.without_output() + 1 - int(done) : tokens,
                                 .keep_last = tokens == item.left() && request.tokens.size() > 1 && !drafts,
                                 .marks = item.marks});
  }
  if (auto* greedy = std::get_if<GreedyOutput>(&chunk.output))
    greedy->continues = continues(item, position + tokens, states ? &chunk.states.ahead : nullptr);
  return chunk;
}

// Tokens that the session has, from the last known state on.
Chunk Batch::chunk_again(Item& item, int tokens) const {
  Session& session = item.session();
  const int position = int(session.cached());
  make_room(item, position, position + tokens);
  Chunk chunk;
  chunk.tokens = std::span(session.tokens_).subspan(std::size_t(position), std::size_t(tokens));
  chunk.position = position;
  chunk.cache = session.cache_.get();
  chunk.states = item.states()->plan(
      {.tokens = tokens, .first_draft = tokens, .keep_last = tokens == item.behind(), .marks = item.marks});
  return chunk;
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
  Session& session = item.session();
  if (item.behind() > 0) return item.states()->advance(chunk.states, int(chunk.tokens.size()));
  const int kept = accepted_tokens(item, chunk);
  if (item.states()) item.states()->advance(chunk.states, kept);
  {
    const std::scoped_lock lock(session.state_mutex_);
    session.tokens_.insert(session.tokens_.end(), chunk.tokens.begin(), chunk.tokens.begin() + kept);
    if (std::size_t(kept) < chunk.tokens.size()) session.drop_uncounted_rows();
    if (item.states()) session.cache_bytes_ = session.cache_->bytes();
  }
  request.result.done += kept;
  item.active = std::size_t(kept) == chunk.tokens.size() && item.left() > 0;
  Choices* choices = choices_of(request.output);
  if (item.active || !choices) return;
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
  Session& session = item.session();
  const std::scoped_lock lock(session.state_mutex_);
  session.drop_uncounted_rows();
  return true;
}

void Batch::fail(Item& item, std::exception_ptr error) {
  Session& session = item.session();
  item.request.error = std::move(error);
  item.active = false;
  if (item.states()) item.states()->replace(int(item.before), item.state);
  const std::scoped_lock lock(session.state_mutex_);
  if (session.tokens_.size() > item.before) session.tokens_.resize(item.before);
  session.drop_uncounted_rows();
}

void Batch::count(std::span<Item* const> items, const CallCounters& counters) const {
  for (Item* item : items) {
    Session& session = item->session();
    const std::scoped_lock lock(session.state_mutex_);
    session.counters_ += counters;
  }
}

void Batch::run(const Progress& progress) {
  int total = 0;
  for (Item& item : items_) {
    try {
      begin(item);
      total += int(item.request.tokens.size());
    } catch (...) {
      fail(item, std::current_exception());
    }
  }
  follow_leaders();
  for (Item* item : order_) {
    if (item->leader) continue;
    const auto make_room_for_all = [&] {
      make_room(*item, int(item->session().cached()), int(item->start + item->request.tokens.size()));
    };
    try {
      try {
        make_room_for_all();
      } catch (const KvMemoryError&) {
        if (!drop_drafts(*item)) throw;
        make_room_for_all();  // a text that fits without drafts must not fail for them
      }
    } catch (...) {
      fail(*item, std::current_exception());
    }
  }
  std::vector<Chunk> chunks;
  std::vector<Item*> members;     // sessions of the chunks
  chunks.reserve(order_.size());  // a later failure ends one request only
  members.reserve(order_.size());
  while (true) {
    chunks.clear();
    members.clear();
    int room = engine_.pass_rows();
    for (Item* next : order_) {
      Item& item = *next;
      if (!item.active || room == 0) continue;
      try {
        if (is_waiting(item)) continue;
        const int behind = item.behind();
        const int tokens = std::min(behind > 0 ? behind : item.left(), room);
        if (tokens < item.left() && !engine_.config().causal) continue;
        chunks.push_back(behind > 0 ? chunk_again(item, tokens) : next_chunk(item, tokens));
        members.push_back(&item);
        room -= tokens;
      } catch (...) {
        fail(item, std::current_exception());
      }
    }
    if (chunks.empty()) break;
    CallCounters counters;
    counters.passes = 1;
    try {
      engine_.forward(chunks, counters);
    } catch (...) {
      for (Item* item : members) fail(*item, std::current_exception());
      continue;
    }
    count(members, counters);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      try {
        finish(*members[i], chunks[i]);
      } catch (const NumericalError&) {
        if (!drop_drafts(*members[i])) fail(*members[i], std::current_exception());
      } catch (...) {
        fail(*members[i], std::current_exception());
      }
    }
    int done = 0;
    for (const Item& item : items_) done += item.request.result.done;
    if (progress && !progress(done, total)) break;
  }
  for (Item& item : items_) item.session().remember_pages();
}

void run_batch(Engine& engine, std::span<Request* const> requests, const char* call,
               const Progress& progress) {
  Batch(engine, requests, call).run(progress);
}

}  // namespace metal_prefill
