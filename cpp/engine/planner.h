// Assigns the rows of a pass to requests, and lets a request wait for a prefix that another one computes.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "../base/token.h"

namespace metal_prefill {

// A request as the planner sees it, and its part of the next pass.
struct PlannedRequest {
  std::span<const TokenId> tokens;
  int done = 0;        // computed tokens
  int left = 0;        // rows until it is finished
  bool whole = false;  // whether all must be in one pass

  // Requests of the same scope and namespace can share prefixes.
  const void* scope = nullptr;
  std::string_view prefix_namespace;
  bool shares = false;
  bool scored = false;  // whether it returns log probabilities, which can be copied with a prefix
  int shareable = 0;    // tokens before the first row with an output

  int rows = 0;
  PlannedRequest* leader = nullptr;  // request that computes the prefix this one waits for
  int shared = 0;                    // length of that prefix
};

// Requests that divide a number of rows among them.
struct Lane {
  std::vector<PlannedRequest*> requests;
  int rows;  // maximum of a pass
  int turn;  // maximum of one request while others of the lane wait
};

// Plans a pass of at most `room` rows, which the lanes fill in order, and lists the requests that get rows.
// Allocates nothing if `chosen` has the capacity for all requests.
void plan_pass(std::span<const Lane> lanes, int room, std::vector<PlannedRequest*>& chosen);

}  // namespace metal_prefill
