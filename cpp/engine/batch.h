// Calls of several sessions, computed together.
//
// The tokens of all requests go through the layers in passes of at most Engine::pass_rows rows, the requests
// in their order. The result of a request does not depend on the others; a request that fails ends with its
// error and leaves its session unchanged.
#pragma once

#include <exception>
#include <span>

#include "engine.h"

namespace metal_prefill {

// The task of one session, and its result.
struct Request {
  Session* session = nullptr;
  std::span<const TokenId> tokens;
  Prefix prefix = Prefix::kAppend;
  Output output;        // of the last tokens. Afterwards `chosen` lacks the rows after a wrong draft
  Expansion expansion;  // of a whole text, whose tokens see later ones
  Trace* trace = nullptr;
  Claim claim = 0;

  PromptResult result = {};
  std::exception_ptr error;  // null: none
};

// Each session may appear once, and all must be of `engine`; otherwise throws std::invalid_argument and
// computes nothing. All other errors except SessionBusyError end one request only. `call` is a string
// literal: the name of the call in messages.
void run_batch(Engine& engine, std::span<Request* const> requests, const char* call,
               const Progress& progress = {});

}  // namespace metal_prefill
