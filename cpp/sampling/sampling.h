// Choosing the next token from logits. The steps, in this order: logit bias, mask, penalties; top-k, typical,
// top-p, min-p, each on the tokens kept so far and on probabilities before the temperature; a draw at the
// temperature, in order of ids. tests/support/sampling_reference.py does the same in NumPy. Scores are
// float64 throughout.
//
// Sums of probabilities have rounding errors of some 1e-15 of the sum. If a sum is that close to a threshold
// (top-p, typical, the drawn number), the choice is reproducible but otherwise undefined.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../base/token.h"

namespace metal_prefill {

// A logit on which a choice would depend is NaN.
struct NanLogitError : std::invalid_argument {
  explicit NanLogitError(TokenId nan)
      : std::invalid_argument("the logit of token " + std::to_string(nan) + " is NaN"), token(nan) {}
  const TokenId token;
};

// Options of a sampler, checked by metal_prefill.generation.Options.
struct SamplingOptions {
  double temperature = 0;  // 0: the largest score, of the lowest id among equal ones
  int top_k = 0;           // 0: all
  double typical_p = 1, top_p = 1, min_p = 0;
  double repeat_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  int window = 64;                       // latest tokens that penalties cover
  std::map<TokenId, double> logit_bias;  // added; -inf excludes a token
};

// Chooses the tokens of one text, in order. Random numbers are a function of the seed, the index of
// the answer and the position, so a text depends only on these and on the logits. One call at a time.
class Sampler {
 public:
  struct Scored {
    TokenId token;
    double log_prob;  // from the unmodified logits, in nats
  };

  // `tokens` are those before the first choice, oldest first. Their number is its position.
  Sampler(SamplingOptions options, std::uint64_t seed, std::uint32_t answer, std::span<const TokenId> tokens);

  // Excludes these tokens from choices at positions before `position`.
  void forbid(std::vector<TokenId> tokens, int position);
  // Tokens that may be chosen next, then after one more accepted token, and so on; the last mask applies to
  // all later ones. Bit id % 32 of word id / 32; no words, or no mask: all.
  using Mask = std::vector<std::uint32_t>;
  void allow(std::vector<Mask> masks);
  // The next choices are these tokens, regardless of the logits; reports contain their probabilities.
  void follow(std::vector<TokenId> tokens) {
    followed_ = std::move(tokens);
    first_followed_ = position_;
  }
  // Choices report the log probability of the token, and of the `best` most probable ones; -1: neither.
  void report(int best) { report_ = best; }

  // Returns the choice after the tokens `ahead`. Throws std::invalid_argument if there is no token to choose,
  // NanLogitError for a NaN. Only the report changes: a choice counts once it is accepted.
  TokenId choose(std::span<const float> logits, std::span<const TokenId> ahead = {});
  void accept(TokenId token) noexcept;

  int position() const { return position_; }
  struct Report {
    double log_prob;
    std::vector<Scored> best;  // in descending order
  };
  // Reports of the last choice without tokens ahead, with one, and so on, if enabled.
  const std::vector<Report>& reports() const { return reports_; }

 private:
  struct Candidate {
    double score;
    TokenId id;
    double weight = 0;  // exp(score - largest score)
    double key = 0;     // candidates with the smallest keys are kept
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
  int first_allowed_ = 0;  // position from which the forbidden tokens may be chosen
  std::vector<Mask> masks_;
  std::vector<TokenId> followed_;
  int first_followed_ = 0;  // position of the first of them

  int report_ = -1;
  std::vector<Report> reports_;

  // State of the current choice. The vectors keep their memory.
  int at_ = 0;                       // its position
  std::vector<TokenId> window_;      // the previous tokens that penalties cover
  std::vector<float> scores_;        // [vocab_size]; -inf for excluded tokens and those in adjusted_
  std::vector<Candidate> adjusted_;  // tokens whose score is not their logit, by id
  double largest_ = 0;               // score
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
};

}  // namespace metal_prefill
