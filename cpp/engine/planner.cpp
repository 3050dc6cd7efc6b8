#include "planner.h"

#include <algorithm>

namespace metal_prefill {

namespace {

// Minimum tokens worth sharing: fewer take less time than copying a page and waiting for a pass.
constexpr int kWorthSharing = 16;

// Number of tokens that a request can take from another one.
int shared_prefix(const PlannedRequest& request, const PlannedRequest& from) {
  const int common = common_prefix(request.tokens, from.tokens);
  const int shared = std::min(common, request.shareable);
  const bool copies = request.scored && from.scored && from.shareable <= request.shareable;
  // After the last common token, the log probabilities are of different tokens.
  return copies ? std::max(shared, common - 1) : shared;
}

// Returns true, and sets the leader, if a chosen request computes a prefix that this one needs.
bool waits(PlannedRequest& request, std::span<PlannedRequest* const> chosen) {
  request.leader = nullptr;
  request.shared = 0;
  const int worth = request.done + kWorthSharing;
  const std::size_t last = std::size_t(worth) - 1;
  if (!request.shares || last >= request.tokens.size()) return false;
  for (PlannedRequest* other : chosen) {
    if (!other->shares || other->scope != request.scope ||
        other->prefix_namespace != request.prefix_namespace || other->done + other->rows < worth ||
        last >= other->tokens.size() || other->tokens[last] != request.tokens[last])
      continue;
    const int shared = shared_prefix(request, *other);
    if (shared < worth || shared <= request.shared) continue;
    request.leader = other;
    request.shared = shared;
  }
  return request.leader;
}

}  // namespace

void plan_pass(std::span<const Lane> lanes, int room, std::vector<PlannedRequest*>& chosen) {
  chosen.clear();
  for (const Lane& lane : lanes) {
    int most = std::min(lane.rows, room);
    room -= most;
    const std::size_t first = chosen.size();
    for (PlannedRequest* request : lane.requests) {
      request->rows = 0;
      if (request->left == 0 || waits(*request, chosen)) continue;
      const int rows = std::min(request->whole ? request->left : std::min(request->left, lane.turn), most);
      if (rows == 0 || (request->whole && rows < request->left)) continue;
      request->rows = rows;
      most -= rows;
      chosen.push_back(request);
    }
    for (PlannedRequest* request : std::span(chosen).subspan(first)) {
      const int more = std::min(request->left - request->rows, most);
      request->rows += more;
      most -= more;
    }
    room += most;
  }
}

}  // namespace metal_prefill
