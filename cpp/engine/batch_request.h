// One request of a batch: its checks, its part of each pass, and its results.
#pragma once

#include <exception>
#include <span>
#include <utility>

#include "batch.h"
#include "planner.h"

namespace metal_prefill {

class BatchRequest final : public PlannedRequest {
 public:
  // Throws std::invalid_argument if the engine has no such output. Requires a locked session from the first
  // call below on.
  BatchRequest(Engine& engine, Request& request);

  const Request& request() const { return request_; }

  // Checks the request before anything changes. Then finds its longest known prefix, or resumes it after an
  // earlier pass.
  void begin();
  // Returns the chunk of the rows that the planner assigned. Reserves memory for them, or for the whole
  // request, before each pass: a progress callback may have forked the session, which then shares its next
  // page. `marks` are positions at which other requests follow.
  Chunk chunk(bool to_the_end, std::span<const int> marks);
  // Takes the results of the chunk. Throws NumericalError if one is NaN.
  void finish(const Chunk& chunk);
  // Removes drafts that are not verified; returns false if there are none. A wrong draft may leave NaN in K
  // and V, and a tile of attention carries 0 * NaN to the rows before it. Without the draft these rows may be
  // finite.
  bool drop_drafts();
  // Shares the prefix that the leader has computed, and copies the log probabilities of its tokens.
  void follow_leader();
  // Ends the request with an error and restores the session's state before it.
  void fail(std::exception_ptr error);
  // Releases a session that the batch made for the request.
  void release_own();
  void count(const CallCounters& counters) const;
  void remember_pages() const;

 private:
  Cache& cache() const { return *request_.session->cache_; }
  // Null in a model without recurrent layers.
  SequenceStates* states() const { return request_.session ? cache().states() : nullptr; }
  // Number of tokens before the first row with an output.
  int without_output() const { return int(request_.tokens.size()) - rows_of(request_.output); }
  bool reuses() const { return request_.prefix == Prefix::kReuse; }
  // Number of tokens after the session's last known state. They are recomputed before those of the request.
  int to_recompute() const;

  void check() const;
  void find_known();
  void check_unchanged() const;
  void plan();
  void make_own_session();
  void make_room(int end);
  void reserve(bool to_the_end);
  bool continues(int end, StateRef* state);
  Chunk next_chunk(std::span<const int> marks);
  Chunk chunk_again(std::span<const int> marks) const;
  int accepted_tokens(const Chunk& chunk);

  Engine& engine_;
  Request& request_;
};

}  // namespace metal_prefill
