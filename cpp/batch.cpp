#include "batch.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace metal_prefill {

// The requests of one call, while it is the turn of this thread on all of their sessions.
class Batch {
 public:
  Batch(Engine& engine, std::span<Request> requests, const char* call);

  void run(const Progress& progress);

 private:
  struct Item {
    Request& request;
    std::size_t start = 0;   // position of tokens[0]
    std::size_t before = 0;  // tokens that the session is left with if the request fails
    bool active = false;

    Session& session() const { return *request.session; }
    int left() const { return int(request.tokens.size()) - request.result.done; }
  };

  void begin(Item& item) const;
  Chunk next_chunk(Item& item, int tokens) const;
  void finish(Item& item, const Chunk& chunk) const;
  static void fail(Item& item, std::exception_ptr error);
  void count(std::span<Item* const> items, const CallCounters& counters) const;

  Engine& engine_;
  std::vector<Item> items_;
  std::deque<Turn::Hold> turns_;
};

Batch::Batch(Engine& engine, std::span<Request> requests, const char* call) : engine_(engine) {
  std::vector<Session*> sessions;
  for (Request& request : requests) {
    if (&request.session->engine() != &engine)
      throw std::invalid_argument("a batch takes sessions of one model only");
    items_.push_back({request});
    sessions.push_back(request.session);
  }
  // In the order of their addresses, so that two batches never wait for each other.
  std::sort(sessions.begin(), sessions.end(), std::less<>());
  if (std::adjacent_find(sessions.begin(), sessions.end()) != sessions.end())
    throw std::invalid_argument("a session appears twice in a batch");
  for (Session* session : sessions) turns_.emplace_back(session->turn_, call);
  for (Item& item : items_) item.before = item.session().tokens_.size();
}

// Checks the request before anything changes, and makes room for its tokens.
void Batch::begin(Item& item) const {
  Session& session = item.session();
  const std::span<const TokenId> tokens = item.request.tokens;
  const bool reuse = item.request.prefix == Prefix::kReuse;
  const Claim claim = item.request.claim;
  if (claim != 0 && !reuse && claim != session.claim_)
    throw SessionBusyError(
        "another call changed the session while text was generated with it: it stands at " +
        std::to_string(session.tokens_.size()) + "; give each generator a session of its own");
  CallCounters counters;
  {
    const std::scoped_lock lock(session.state_mutex_);
    session.counters_ = {};
  }
  if (tokens.empty()) throw std::invalid_argument("the prompt is empty: at least one token is needed");
  for (std::size_t i = 0; i < tokens.size(); ++i) engine_.check_token(tokens[i], i);
  std::vector<TokenId>& held = session.tokens_;  // only this thread changes them
  item.start = reuse ? 0 : held.size();
  session.check_room(item.start, tokens.size());
  std::size_t reused = 0;
  if (reuse) {
    // The last token is always computed: what follows it is what the caller asks for.
    const auto end = tokens.begin() + std::ptrdiff_t(std::min(held.size(), tokens.size() - 1));
    reused = std::size_t(std::mismatch(tokens.begin(), end, held.begin()).first - tokens.begin());
  }
  item.before = item.start + reused;
  const std::size_t end = item.start + tokens.size();
  session.cache_->reserve(int(item.before), int(end), counters);

  const std::scoped_lock lock(session.state_mutex_);
  held.reserve(end);  // what follows a computed chunk must not fail
  held.resize(item.before);
  if (reuse) session.reused_ = reused;
  session.cache_bytes_ = session.cache_->bytes();
  session.counters_ = counters;
  session.claim_ = claim;
  item.request.result.done = int(reused);
  item.active = true;
}

Chunk Batch::next_chunk(Item& item, int tokens) const {
  const Request& request = item.request;
  const std::size_t done = std::size_t(request.result.done);
  const int position = int(item.start + done);
  CallCounters uncounted;
  // A progress callback may have forked the session, which then shares the page that comes next.
  item.session().cache_->reserve(position, position + tokens, uncounted);
  Chunk chunk;
  chunk.tokens = request.tokens.subspan(done, std::size_t(tokens));
  chunk.position = position;
  chunk.cache = item.session().cache_.get();
  chunk.trace = request.trace;
  if (request.output == Output::kLogProbs) {
    chunk.output = Output::kLogProbs;
    chunk.targets = request.targets.subspan(done, std::size_t(tokens));
    chunk.log_probs = request.log_probs + done;
  } else if (tokens == item.left()) {
    chunk.output = request.output;
    chunk.logits = request.logits;
  }
  return chunk;
}

void Batch::finish(Item& item, const Chunk& chunk) const {
  if (chunk.output == Output::kGreedy && chunk.token < 0)
    throw NumericalError("every logit of the token at position " +
                         std::to_string(chunk.position + int(chunk.tokens.size()) - 1) + " is NaN");
  Session& session = item.session();
  {
    const std::scoped_lock lock(session.state_mutex_);
    session.tokens_.insert(session.tokens_.end(), chunk.tokens.begin(), chunk.tokens.end());
  }
  item.request.result.done += int(chunk.tokens.size());
  if (chunk.output == Output::kGreedy) item.request.result.token = chunk.token;
  item.active = item.left() > 0;
}

void Batch::fail(Item& item, std::exception_ptr error) {
  Session& session = item.session();
  item.request.error = std::move(error);
  item.active = false;
  const std::scoped_lock lock(session.state_mutex_);
  if (session.tokens_.size() > item.before) session.tokens_.resize(item.before);
  session.cache_->truncate(int(session.tokens_.size()));
  session.cache_bytes_ = session.cache_->bytes();
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
  std::vector<Chunk> chunks;
  std::vector<Item*> members;  // whose chunks they are
  while (true) {
    chunks.clear();
    members.clear();
    int room = engine_.pass_rows();
    for (Item& item : items_) {
      if (!item.active || room == 0) continue;
      const int tokens = std::min(item.left(), room);
      try {
        chunks.push_back(next_chunk(item, tokens));
      } catch (...) {
        fail(item, std::current_exception());
        continue;
      }
      members.push_back(&item);
      room -= tokens;
    }
    if (chunks.empty()) return;
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
      } catch (...) {
        fail(*members[i], std::current_exception());
      }
    }
    int done = 0;
    for (const Item& item : items_) done += item.request.result.done;
    if (progress && !progress(done, total)) return;
  }
}

void run_batch(Engine& engine, std::span<Request> requests, const char* call, const Progress& progress) {
  Batch(engine, requests, call).run(progress);
}

}  // namespace metal_prefill
