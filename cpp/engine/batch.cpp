#include "batch.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "batch_request.h"

namespace metal_prefill {

// The requests of one call, which holds the locks of all of their sessions.
class Batch {
 public:
  Batch(Engine& engine, std::span<const Share> shares, const char* call);
  ~Batch();

  // Computes passes until all requests are finished.
  void run(const Progress& progress);
  void run_pass();

 private:
  void lock_sessions(const char* call);
  bool compute_pass();
  void fill_chunks();
  void compute();
  void finish();
  void follow_leaders();
  std::span<const int> marks_of(const BatchRequest& request);
  template <typename Call>
  static void attempt(BatchRequest& request, const Call& call);

  Engine& engine_;
  std::vector<BatchRequest> requests_;
  std::vector<Lane> lanes_;
  std::deque<SessionLock::Hold> locks_;
  bool to_the_end_ = false;  // whether memory is reserved for whole requests
  // State of the next pass. The vectors have capacity for all requests, so that no pass allocates.
  std::vector<PlannedRequest*> chosen_;
  std::vector<Chunk> chunks_;
  std::vector<BatchRequest*> members_;  // request of each chunk
  std::vector<int> marks_;              // positions of states to keep
};

Batch::Batch(Engine& engine, std::span<const Share> shares, const char* call) : engine_(engine) {
  std::size_t requests = 0, marks = 0;
  for (const Share& share : shares) {
    requests += share.requests.size();
    for (const Request* request : share.requests) marks = std::max(marks, request->marks.size());
  }
  requests_.reserve(requests);
  chosen_.reserve(requests);
  chunks_.reserve(requests);
  members_.reserve(requests);
  marks_.reserve(requests + marks + 1);  // also for the end of a known prefix
  for (const Share& share : shares) {
    Lane& lane = lanes_.emplace_back(Lane{{}, share.rows, share.turn});
    for (Request* request : share.requests) {
      if (request->finished) continue;
      if (&(request->session ? request->session->engine() : *request->scratch->engine) != &engine)
        throw std::invalid_argument("a batch takes sessions of one model only");
      lane.requests.push_back(&requests_.emplace_back(engine, *request));
    }
  }
  lock_sessions(call);
  for (BatchRequest& request : requests_) attempt(request, [&] { request.begin(); });
}

void Batch::lock_sessions(const char* call) {
  std::vector<Session*> sessions;
  std::vector<const Sampler*> samplers;
  for (const BatchRequest& item : requests_) {
    const Request& request = item.request();
    if (!request.own && request.session) sessions.push_back(request.session);
    if (const auto* sampled = std::get_if<SampledOutput>(&request.output))
      samplers.push_back(sampled->sampler);
  }
  // Locks in order of address, so that two batches never wait for each other.
  std::sort(sessions.begin(), sessions.end(), std::less<>());
  if (std::adjacent_find(sessions.begin(), sessions.end()) != sessions.end())
    throw std::invalid_argument("a session appears twice in a batch");
  std::sort(samplers.begin(), samplers.end(), std::less<>());
  if (std::adjacent_find(samplers.begin(), samplers.end()) != samplers.end())
    throw std::invalid_argument("a sampler appears twice in a batch");
  for (Session* session : sessions) locks_.emplace_back(session->lock_, call);
}

Batch::~Batch() {
  for (const BatchRequest& request : requests_) request.remember_pages();
}

// Calls `call`. An error ends this request only.
template <typename Call>
void Batch::attempt(BatchRequest& request, const Call& call) {
  try {
    call();
  } catch (...) {
    request.fail(std::current_exception());
  }
}

// Returns whether any request got rows.
bool Batch::compute_pass() {
  plan_pass(lanes_, engine_.pass_rows(), chosen_);
  fill_chunks();
  compute();
  finish();
  follow_leaders();
  return !chosen_.empty();
}

void Batch::fill_chunks() {
  chunks_.clear();
  members_.clear();
  for (PlannedRequest* planned : chosen_) {
    BatchRequest& request = static_cast<BatchRequest&>(*planned);
    attempt(request, [&] {
      chunks_.push_back(request.chunk(to_the_end_, marks_of(request)));
      members_.push_back(&request);
    });
  }
}

// Positions of the request's marks, and those at which other requests follow it.
std::span<const int> Batch::marks_of(const BatchRequest& request) {
  marks_.clear();
  for (const int tokens : request.request().marks) marks_.push_back(int(request.request().start) + tokens);
  for (const BatchRequest& other : requests_)
    if (other.leader == &request) marks_.push_back(other.shared);
  return marks_;
}

void Batch::compute() {
  if (chunks_.empty()) return;
  CallCounters counters;
  counters.passes = 1;
  try {
    engine_.forward(chunks_, counters);
  } catch (...) {
    for (BatchRequest* request : members_) request->fail(std::current_exception());
    chunks_.clear();
    return;
  }
  for (const BatchRequest* request : members_) request->count(counters);
}

void Batch::finish() {
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    BatchRequest& request = *members_[i];
    attempt(request, [&] {
      try {
        request.finish(chunks_[i]);
      } catch (const NumericalError&) {
        if (!request.drop_drafts()) throw;
      }
    });
  }
}

void Batch::follow_leaders() {
  for (BatchRequest& request : requests_)
    if (request.leader) attempt(request, [&] { request.follow_leader(); });
  for (BatchRequest& request : requests_) request.release_own();
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
  for (const BatchRequest& item : requests_)
    if (!item.request().error) total += int(item.request().tokens.size());
  while (compute_pass()) {
    int done = 0;
    for (const BatchRequest& item : requests_) done += item.request().result.done;
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
