// Choosing the next token from logits.
//
// The steps, in this order: logit bias, mask, penalties; top-k, typical, top-p, min-p, each on what the ones
// before it left and on probabilities before the temperature; a draw at the temperature, by ids in their
// order. metal_prefill.generation._sampling.sample does the same in NumPy. Scores are float64 throughout.
//
// Sums of probabilities carry rounding errors of some 1e-15 of the sum. Where a sum is that near to a
// threshold (top-p, typical, the drawn number), the choice is as repeatable as any, but not defined beyond
// that.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "token.h"

namespace metal_prefill {

// A logit that a choice would depend on is NaN.
struct NanLogitError : std::invalid_argument {
  explicit NanLogitError(TokenId nan)
      : std::invalid_argument("the logit of token " + std::to_string(nan) + " is NaN"), token(nan) {}
  const TokenId token;
};

// Checked by metal_prefill.generation.Options.
struct SamplingOptions {
  double temperature = 0;  // 0: the largest score, of equal ones the lowest id
  int top_k = 0;           // 0: all
  double typical_p = 1, top_p = 1, min_p = 0;
  double repeat_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  int window = 64;                       // latest tokens that penalties look at
  std::map<TokenId, double> logit_bias;  // added; -inf excludes a token
};

// Chooses token after token of one text. Random numbers are a function of the seed, the number of the answer
// and the position, so a text depends on these and on the logits alone. One call at a time.
class Sampler {
 public:
  struct Scored {
    TokenId token;
    double log_prob;  // by the logits as they are, in nats
  };

  // `tokens`: those before the first choice, oldest first. Their number is its position.
  Sampler(SamplingOptions options, std::uint64_t seed, std::uint32_t answer, std::span<const TokenId> tokens);

  // Excludes these tokens from choices at positions before `position`.
  void forbid(std::vector<TokenId> tokens, int position);
  // Tokens that may be chosen next, then once a token is accepted, and so on; the last mask counts from there
  // on. Bit id % 32 of word id / 32; no words, or no mask: all.
  using Mask = std::vector<std::uint32_t>;
  void allow(std::vector<Mask> masks);
  // The next choices are these tokens, whatever the logits are: reports say how probable they were.
  void follow(std::vector<TokenId> tokens) {
    followed_ = std::move(tokens);
    first_followed_ = position_;
  }
  // Choices say the log probability of the token, and of the `best` most probable ones; -1: neither.
  void report(int best) { report_ = best; }

  // What is chosen once the tokens `ahead` are accepted. Throws std::invalid_argument where there is nothing
  // to choose from, NanLogitError for a NaN. Nothing but the report changes: the choice counts once it is
  // accepted.
  TokenId choose(std::span<const float> logits, std::span<const TokenId> ahead = {});
  void accept(TokenId token) noexcept;

  int position() const { return position_; }
  struct Report {
    double log_prob;
    std::vector<Scored> best;  // in descending order
  };
  // Of the last choice without tokens ahead, with one, and so on; when asked for.
  const std::vector<Report>& reports() const { return reports_; }

 private:
  struct Candidate {
    double score;
    TokenId id;
    double weight = 0;  // exp(score - largest score)
    double key = 0;     // candidates with the least are kept
  };

  TokenId pick(std::span<const float> logits, std::span<const TokenId> ahead);
  void adjust(std::span<const float> logits);
  double score_of(TokenId id, float logit) const;
  void restrict_to_infinite();
  TokenId most_probable() const;
  void collect_best(std::size_t count);
  void collect_from(double least);
  void weigh();
  void keep_typical();
  void keep_top_p(double target);
  void keep_fewest(double target);
  TokenId draw_from_all();
  TokenId draw();
  double drawn() const;
  Report describe(std::span<const float> logits, TokenId chosen);

  const SamplingOptions options_;
  const std::uint64_t seed_;
  const std::uint32_t answer_;
  int position_;
  std::vector<TokenId> recent_;  // the last `window` ones at most, oldest first
  std::vector<TokenId> forbidden_;
  int first_allowed_ = 0;  // position from which the forbidden ones may be chosen
  std::vector<Mask> masks_;
  std::vector<TokenId> followed_;
  int first_followed_ = 0;  // position of the first of them

  int report_ = -1;
  std::vector<Report> reports_;

  // Of the choice under way. They keep their memory.
  int at_ = 0;                       // its position
  std::vector<TokenId> window_;      // the tokens before it that penalties look at
  std::vector<float> scores_;        // [vocab_size]; -inf for excluded tokens and those in adjusted_
  std::vector<Candidate> adjusted_;  // tokens whose score is not their logit, by id
  double largest_ = 0;               // score
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
};

}  // namespace metal_prefill
