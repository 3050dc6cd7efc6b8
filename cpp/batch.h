// Calls of several sessions, computed together.
//
// The tokens of all requests go through the layers in passes of at most Engine::pass_rows rows, the requests
// in their order. What a request gets does not depend on the others; one that fails ends with its error and
// leaves its session as it was.
#pragma once

#include <exception>
#include <span>
#include <vector>

#include "engine.h"

namespace metal_prefill {

// The task of one session, and its result.
struct Request {
  Session* session = nullptr;
  std::span<const TokenId> tokens;
  Prefix prefix = Prefix::kAppend;
  Output output = Output::kNone;
  int output_rows = 1;  // the last tokens, of which the output is wanted; kLogits: 1
  // kGreedy, kSampled: the tokens after the first of those rows are guesses at what is chosen. The first that
  // is wrong and those after it are not appended.
  bool are_drafts = false;
  float* logits = nullptr;           // kLogits: [vocab_size]
  std::span<const TokenId> targets;  // kLogProbs: [output_rows]; a negative one is not asked for
  float* log_probs = nullptr;        // kLogProbs: [output_rows]
  float* hidden = nullptr;           // kHidden, kResidual: [output_rows][dim]
  Sampler* sampler = nullptr;        // kSampled: of this request alone; takes one row, or drafts
  bool more = false;                 // kGreedy: the token that is chosen will be appended next
  Trace* trace = nullptr;
  Claim claim = 0;

  std::vector<TokenId> chosen;  // kGreedy, kSampled: [output_rows], less the rows after a wrong draft
  PromptResult result = {};
  std::exception_ptr error;  // null: none
};

// Each session may appear once, and all must be of `engine`; else std::invalid_argument, and nothing is
// computed. All other errors are those of single requests, but for SessionBusyError. `call` is a string
// literal: the name of the call in messages.
void run_batch(Engine& engine, std::span<Request> requests, const char* call, const Progress& progress = {});

}  // namespace metal_prefill
