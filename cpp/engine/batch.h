// Calls of several sessions, computed together.
//
// The tokens of all requests go through the layers in passes of at most Engine::pass_rows rows, which
// planner.h fills. The result of a request does not depend on the others; a request that fails ends with its
// error and leaves its session unchanged.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "engine.h"

namespace metal_prefill {

// For requests without a session: each gets one that ends with it. Prefixes are shared among the requests of
// one Scratch, and with no others.
struct Scratch {
  std::shared_ptr<Engine> engine;
};

// The task of one session, and its result.
struct Request {
  Session* session = nullptr;
  const Scratch* scratch = nullptr;  // if there is no session
  std::span<const TokenId> tokens;
  Prefix prefix = Prefix::kAppend;
  std::vector<int> marks = {};  // numbers of its tokens after which states are kept
  Output output;                // of the last tokens. Afterwards `chosen` lacks the rows after a wrong draft
  Expansion expansion;          // of a whole text, whose tokens see later ones
  Trace* trace = nullptr;
  Claim claim = 0;

  PromptResult result = {};
  bool finished = false;
  std::exception_ptr error = nullptr;  // null: none

  // For run_batch and run_pass, until it is finished.
  std::unique_ptr<Session> own = nullptr;
  std::size_t start = 0;   // position of tokens[0]
  std::size_t before = 0;  // tokens of the session if the request fails
  StatePoint state = {};   // of those
};

// Computes all requests to their ends. Each session may appear once, and all must be of `engine`; otherwise
// throws std::invalid_argument and computes nothing. All other errors except SessionBusyError end one request
// only. `call` is its name in messages.
void run_batch(Engine& engine, std::span<Request* const> requests, const char* call,
               const Progress& progress = {});

// The same for one request, whose error it throws.
PromptResult run_alone(Session& session, Request request, const char* call, const Progress& progress);

// Requests that divide a number of rows of a pass among them; see Lane.
struct Share {
  std::vector<Request*> requests;
  int rows;
  int turn;
};

// Computes one pass, and further ones of the last share alone until its requests are finished. Another
// request that is not finished continues in the next call.
void run_pass(Engine& engine, std::span<const Share> shares, const char* call);

}  // namespace metal_prefill
