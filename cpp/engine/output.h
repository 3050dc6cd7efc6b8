// The kinds of output of a call.
//
// A request (batch.h) has one Output for its last rows, a chunk (engine.h) the part of it that belongs to the
// chunk's rows. An alternative holds its parameters and views of the caller's memory, which receives the
// results. To add a kind of output, add an alternative here and a factory in python/engine.cpp; code visits
// all alternatives, so the compiler names the other places.
#pragma once

#include <concepts>
#include <cstddef>
#include <exception>
#include <span>
#include <type_traits>
#include <variant>

#include "../base/token.h"
#include "../sampling/sampling.h"

namespace metal_prefill {

// No output: only K and V are computed.
struct NoOutput {};

// Chosen tokens, one after each row.
struct Choices {
  std::span<TokenId> chosen;        // [rows]; a row without a choice keeps -1
  std::span<const TokenId> drafts;  // of the request: the tokens after its first row with an output, which
                                    // are appended until one differs from the chosen token
  int first = 0;                    // row of the request to which chosen[0] belongs
};

// The ids of the largest logits.
struct GreedyOutput {
  Choices choices;
  // The chosen token will be appended next. In a chunk: the chosen tokens of all chunks follow in one pass,
  // at the next positions, for which the caches have room.
  bool continues = false;
};

// The ids that a sampler chooses by the logits; several rows need drafts.
struct SampledOutput {
  Choices choices;
  Sampler* sampler = nullptr;  // never null; used by one request only
  std::exception_ptr error;    // in a chunk, the reason for a missing token

  // Lets the sampler choose after a row, from its logits [vocab_size]. Rows must come in order. Ignores rows
  // after a draft that was not chosen.
  void choose(int row, std::span<const float> logits) noexcept;
};

// All logits of the last row.
struct LogitsOutput {
  float* logits = nullptr;  // [vocab_size]
};

// The log probabilities of given tokens.
struct LogProbsOutput {
  std::span<const TokenId> targets;  // [rows]; negative: not computed
  float* log_probs = nullptr;        // [rows]
};

// The residual stream after the last layer.
struct HiddenOutput {
  float* states = nullptr;  // [rows][dim]
  int rows = 0;
  int dim = 0;
  bool normed = true;  // after the output norm; otherwise before it
};

// One vector per text, pooled from its hidden states after the output norm, if tokens attend to later ones.
struct PooledOutput {
  enum class Kind { kMean, kFirst };
  Kind kind = Kind::kMean;
  float* vector = nullptr;  // [dim]
  int rows = 0;             // of the text
  int dim = 0;
  int nan_row = -1;  // in a chunk, the first row whose state is NaN; -1: there is none

  // Pools `rows` states, whose rows are `stride` values apart.
  void pool(const float* states, std::size_t stride) noexcept;
};

using Output = std::variant<NoOutput, GreedyOutput, SampledOutput, LogitsOutput, LogProbsOutput, HiddenOutput,
                            PooledOutput>;

// A visitor made of lambdas.
template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;  // clang before 17 deduces none for aggregates

// Matches only these alternatives in a visitor, so that each visitor must handle an added one.
template <typename T, typename... Alternatives>
concept OneOf = (std::same_as<std::remove_cv_t<T>, Alternatives> || ...);

// Number of rows with an output.
int rows_of(const Output& output);
// The output of rows [first, first + count); NoOutput if `count` is 0.
Output part_of(const Output& output, int first, int count);
// The choices of an output that chooses tokens; null for others.
Choices* choices_of(Output& output);
const Choices* choices_of(const Output& output);
// Throws NumericalError for a NaN result; calls never return NaN. `position` is that of the first row.
void check_results(const Output& output, int position, std::size_t vocab_size);

}  // namespace metal_prefill
