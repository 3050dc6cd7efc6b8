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

// Owner of requests without a session: each gets a temporary one. Only requests of the same Scratch share
// prefixes with each other.
struct Scratch {
  std::shared_ptr<Engine> engine;
};

// The task of one session, and its result.
struct Request {
  Session* session = nullptr;
  const Scratch* scratch = nullptr;  // if there is no session
  std::span<const TokenId> tokens;
  Prefix prefix = Prefix::kAppend;
  std::vector<int> marks = {};  // keeps states after these numbers of its tokens
  Output output;                // of the last tokens; afterwards `chosen` ends at a wrong draft
  Expansion expansion;          // of a whole text, if tokens attend to later ones
  int segment = -1;             // number of its first tokens with type 0; -1: see first_segment
  Trace* trace = nullptr;
  Claim claim = 0;

  PromptResult result = {};
  bool finished = false;
  std::exception_ptr error = nullptr;  // null: none

  // Used by run_batch and run_pass until the request is finished.
  std::unique_ptr<Session> own = nullptr;
  std::size_t start = 0;   // position of tokens[0]
  std::size_t before = 0;  // tokens of the session if the request fails
  StatePoint state = {};   // state after those tokens
};

// Computes all requests to completion. Each session may appear once, and all must be of `engine`; otherwise
// throws std::invalid_argument and computes nothing. All other errors except SessionBusyError end one request
// only. `call` names the call in messages.
void run_batch(Engine& engine, std::span<Request* const> requests, const char* call,
               const Progress& progress = {});

// Computes one request and throws its error.
PromptResult run_alone(Session& session, Request request, const char* call, const Progress& progress);

// Requests that divide a number of rows of a pass among them; see Lane.
struct Share {
  std::vector<Request*> requests;
  int rows;
  int turn;
};

// Computes one pass, then further ones of the last share alone until its requests are finished. Other
// unfinished requests continue in the next call.
void run_pass(Engine& engine, std::span<const Share> shares, const char* call);

}  // namespace metal_prefill
