#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "../base/philox.h"
#include "softmax.h"

namespace metal_prefill {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kExcluded = -std::numeric_limits<float>::infinity();
constexpr std::size_t kBlock = 64;      // logits compared with the threshold at once
constexpr std::size_t kFirstBest = 64;  // candidates that usually reach top_p

bool any_above(const float* values, float threshold) {
  int lanes[kBlock / 4] = {};
  for (std::size_t i = 0; i < kBlock; i += std::size(lanes))
    for (std::size_t j = 0; j < std::size(lanes); ++j) lanes[j] |= values[i + j] > threshold;
  return std::any_of(lanes, std::end(lanes), [](int lane) { return lane != 0; });
}

constexpr auto is_better = [](const auto& a, const auto& b) {
  return a.score != b.score ? a.score > b.score : a.id < b.id;
};

// Keeps the `count` best of `found`, in any order.
template <typename Candidate>
void shrink(std::vector<Candidate>& found, std::size_t count) {
  if (found.size() <= count) return;
  std::nth_element(found.begin(), found.begin() + std::ptrdiff_t(count) - 1, found.end(), is_better);
  found.resize(count);
}

// Finds the `count` largest values above -inf, in any order; ties go to the lowest index. Reads each value
// once, and rarely compares it with more than the smallest of the best so far.
template <typename Candidate>
void find_best(std::span<const float> values, std::size_t count, std::vector<Candidate>& found) {
  found.clear();
  if (count == 0) return;
  const std::size_t capacity = std::max(4 * count, kBlock);
  float threshold = kExcluded;
  const auto look_at = [&](std::size_t i) {
    if (!(values[i] > threshold)) return;
    found.push_back({values[i], TokenId(i)});
    if (found.size() < capacity) return;
    shrink(found, count);
    threshold = float(found.back().score);  // later values that equal it have higher indices
  };
  const std::size_t whole = values.size() - values.size() % kBlock;
  for (std::size_t i = 0; i < whole; i += kBlock)
    if (any_above(values.data() + i, threshold))
      for (std::size_t j = i; j < i + kBlock; ++j) look_at(j);
  for (std::size_t i = whole; i < values.size(); ++i) look_at(i);
  shrink(found, count);
}

}  // namespace

Sampler::Sampler(SamplingOptions options, std::uint64_t seed, std::uint32_t answer,
                 std::span<const TokenId> tokens)
    : options_(std::move(options)), seed_(seed), answer_(answer), position_(int(tokens.size())) {
  const std::span<const TokenId> latest = tokens.last(std::min(tokens.size(), std::size_t(options_.window)));
  recent_.reserve(std::size_t(options_.window));  // accept() must not fail
  recent_.assign(latest.begin(), latest.end());
}

void Sampler::forbid(std::vector<TokenId> tokens, int position) {
  forbidden_ = std::move(tokens);
  first_allowed_ = position;
}

void Sampler::allow(std::vector<Mask> masks) {
  masks_ = std::move(masks);
}

void Sampler::accept(TokenId token) noexcept {
  if (masks_.size() > 1) masks_.erase(masks_.begin());
  if (recent_.size() == std::size_t(options_.window)) recent_.erase(recent_.begin());
  recent_.push_back(token);
  ++position_;
}

TokenId Sampler::choose(std::span<const float> logits, std::span<const TokenId> ahead) {
  if (logits.empty()) throw std::invalid_argument("logits must be one-dimensional and not empty");
  if (const int i = first_nan(logits); i >= 0) throw NanLogitError(i);
  at_ = position_ + int(ahead.size());
  TokenId chosen;
  if (const std::size_t i = std::size_t(at_ - first_followed_); i < followed_.size()) {
    chosen = followed_[i];
    if (chosen < 0 || std::size_t(chosen) >= logits.size())
      throw std::invalid_argument("token id " + std::to_string(chosen) + " is outside the vocabulary of " +
                                  std::to_string(logits.size()));
  } else {
    chosen = pick(logits, ahead);
  }
  if (report_ >= 0) {
    reports_.resize(ahead.size());
    reports_.push_back(describe(logits, chosen));
  }
  return chosen;
}

TokenId Sampler::pick(std::span<const float> logits, std::span<const TokenId> ahead) {
  const std::size_t newest = std::min(ahead.size(), std::size_t(options_.window));
  const std::size_t oldest = std::min(recent_.size(), std::size_t(options_.window) - newest);
  window_.assign(recent_.end() - std::ptrdiff_t(oldest), recent_.end());
  window_.insert(window_.end(), ahead.end() - std::ptrdiff_t(newest), ahead.end());
  adjust(logits);
  const SamplingOptions& o = options_;
  const std::size_t n = logits.size();
  if (o.temperature == 0) return most_probable();
  const bool all = o.top_k == 0 || std::size_t(o.top_k) >= n;
  if (all && o.typical_p == 1 && o.top_p == 1 && o.min_p == 0) return draw_from_all();
  if (!all) {
    collect_best(std::size_t(o.top_k));
  } else if (o.typical_p < 1) {
    collect_from(-std::numeric_limits<double>::max());
  } else if (o.top_p < 1) {
    // The most probable tokens usually suffice; the total needs no order.
    double total = sum_exp(scores_, largest_);
    for (const Candidate& c : adjusted_) total += std::exp(c.score - largest_);
    double collected = 0;
    for (std::size_t count = kFirstBest;; count *= 8) {
      collect_best(std::min(count, n));
      weigh();
      collected = 0;
      for (const Candidate& c : candidates_) collected += c.weight;
      if (collected >= o.top_p * total || count >= n) break;
    }
    keep_top_p(o.top_p * total);
  } else {
    collect_from(largest_ + std::log(o.min_p));
  }
  if (o.typical_p < 1) keep_typical();
  if (o.top_p < 1 && (!all || o.typical_p < 1)) {
    weigh();
    double total = 0;
    for (const Candidate& c : candidates_) total += c.weight;
    keep_top_p(o.top_p * total);
  }
  return draw();
}

// Fills scores_, adjusted_ and largest_.
void Sampler::adjust(std::span<const float> logits) {
  const SamplingOptions& o = options_;
  scores_.assign(logits.begin(), logits.end());
  static const Mask kAll;
  const Mask& mask =
      masks_.empty() ? kAll : masks_[std::min(std::size_t(at_ - position_), masks_.size() - 1)];
  for (std::size_t word = 0; !mask.empty() && word * 32 < scores_.size(); ++word) {
    const std::uint32_t allowed = word < mask.size() ? mask[word] : 0;
    if (allowed == ~0u) continue;
    for (std::size_t i = word * 32; i < std::min(word * 32 + 32, scores_.size()); ++i)
      if ((allowed >> i % 32 & 1) == 0) scores_[i] = kExcluded;
  }
  const auto at = [&](TokenId id, const char* what) -> float& {
    if (id < 0 || std::size_t(id) >= scores_.size())
      throw std::invalid_argument(std::string(what) + " " + std::to_string(id) +
                                  " is outside the vocabulary of " + std::to_string(scores_.size()));
    return scores_[std::size_t(id)];
  };
  if (at_ < first_allowed_)
    for (const TokenId id : forbidden_) at(id, "token id") = kExcluded;

  adjusted_.clear();
  for (const auto& [id, bias] : o.logit_bias) {
    static_cast<void>(bias);
    adjusted_.push_back({at(id, "the id of a logit bias"), id});
  }
  if (o.repeat_penalty != 1 || o.frequency_penalty != 0 || o.presence_penalty != 0)
    for (const TokenId id : window_) adjusted_.push_back({at(id, "a recent token id"), id});
  std::sort(adjusted_.begin(), adjusted_.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  adjusted_.erase(std::unique(adjusted_.begin(), adjusted_.end(),
                              [](const auto& a, const auto& b) { return a.id == b.id; }),
                  adjusted_.end());
  for (Candidate& c : adjusted_) {
    float& score = scores_[std::size_t(c.id)];
    if (score != kExcluded) c.score = score_of(c.id, score);
    score = kExcluded;
  }
  std::erase_if(adjusted_, [](const Candidate& c) { return c.score == -kInfinity; });

  largest_ = largest_of(scores_);
  for (const Candidate& c : adjusted_) largest_ = std::max(largest_, c.score);
  if (largest_ == -kInfinity) throw std::invalid_argument("every logit is -inf: there is no token to choose");
  if (largest_ == kInfinity) restrict_to_infinite();
}

double Sampler::score_of(TokenId id, float logit) const {
  const SamplingOptions& o = options_;
  double score = logit;
  if (const auto bias = o.logit_bias.find(id); bias != o.logit_bias.end()) {
    if (bias->second == -kInfinity) return -kInfinity;
    score += bias->second;
  }
  const auto count = std::count(window_.begin(), window_.end(), id);
  if (count == 0) return score;
  score = score > 0 ? score / o.repeat_penalty : score * o.repeat_penalty;
  return score - double(count) * o.frequency_penalty - o.presence_penalty;
}

// Restricts the choice to tokens with infinite scores, if there are any.
void Sampler::restrict_to_infinite() {
  for (float& score : scores_) score = score == -kExcluded ? 0.0f : kExcluded;
  std::erase_if(adjusted_, [](const Candidate& c) { return c.score != kInfinity; });
  for (Candidate& c : adjusted_) c.score = 0;
  largest_ = 0;
}

TokenId Sampler::most_probable() const {
  TokenId best = -1;
  for (const Candidate& c : adjusted_)
    if (c.score == largest_ && best < 0) best = c.id;
  const auto end = best < 0 ? scores_.end() : scores_.begin() + best;
  const auto found = std::find(scores_.begin(), end, float(largest_));
  // The largest score may be an adjusted one, which need not be a float.
  return found != end && double(*found) == largest_ ? TokenId(found - scores_.begin()) : best;
}

void Sampler::collect_best(std::size_t count) {
  find_best(scores_, count, candidates_);
  candidates_.insert(candidates_.end(), adjusted_.begin(), adjusted_.end());
  shrink(candidates_, count);
}

void Sampler::collect_from(double least) {
  candidates_.clear();
  for (std::size_t i = 0; i < scores_.size(); ++i)
    if (double(scores_[i]) >= least) candidates_.push_back({scores_[i], TokenId(i)});
  for (const Candidate& c : adjusted_)
    if (c.score >= least) candidates_.push_back(c);
}

void Sampler::weigh() {
  for (Candidate& c : candidates_) c.weight = std::exp(c.score - largest_);
}

// Meister et al., "Locally typical sampling", 2022: tokens whose surprisal is nearest to the expected one.
void Sampler::keep_typical() {
  weigh();
  double total = 0, below = 0;
  for (const Candidate& c : candidates_) {
    total += c.weight;
    below += c.weight * (largest_ - c.score);
  }
  // Surprisal of a token: largest - score + log(total). Its expectation has the same last term.
  const double expected = below / total;
  for (Candidate& c : candidates_) c.key = std::abs(largest_ - c.score - expected);
  keep_fewest(options_.typical_p * total);
}

void Sampler::keep_top_p(double target) {
  for (Candidate& c : candidates_) c.key = largest_ - c.score;
  keep_fewest(target);
}

// Keeps the fewest candidates with the smallest keys, ties by lowest id, whose weights sum to `target`.
// Bisects until the last kept candidate is found, so that few of them are sorted.
void Sampler::keep_fewest(double target) {
  const auto is_before = [](const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key < b.key : a.id < b.id;
  };
  auto first = candidates_.begin(), last = candidates_.end();
  double before = 0;
  while (last - first > 1) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, is_before);
    const double half =
        std::accumulate(first, middle, 0.0, [](double sum, const Candidate& c) { return sum + c.weight; });
    if (before + half >= target) {
      last = middle;
    } else {
      before += half;
      first = middle;
    }
  }
  candidates_.erase(last, candidates_.end());
}

// The random number of the current choice, in [0, 1).
double Sampler::drawn() const {
  const PhiloxKey key = {std::uint32_t(seed_), std::uint32_t(seed_ >> 32)};
  return uniform(philox({std::uint32_t(at_), answer_, 0, 0}, key));
}

namespace {

// Index of the first weight whose interval of the cumulative weights contains `target`.
template <typename WeightOf>
std::size_t find_drawn(std::size_t count, double target, WeightOf&& weight_of) {
  double cumulative = 0;
  std::size_t last = 0;  // the last nonzero weight, selected if rounding puts the target beyond the sum
  for (std::size_t i = 0; i < count; ++i) {
    const double weight = weight_of(i);
    cumulative += weight;
    if (cumulative > target) return i;
    if (weight > 0) last = i;
  }
  return last;
}

// Factor of the logits for a temperature; finite, so that its product with 0 is 0.
double factor_of(double temperature) {
  return std::min(1 / temperature, std::numeric_limits<double>::max());
}

}  // namespace

TokenId Sampler::draw_from_all() {
  weights_.resize(scores_.size());
  const double factor = factor_of(options_.temperature);
  exp_weights(scores_, largest_, factor, weights_.data());
  for (const Candidate& c : adjusted_) weights_[std::size_t(c.id)] = std::exp((c.score - largest_) * factor);
  const double target = drawn() * sum(weights_);
  return TokenId(find_drawn(weights_.size(), target, [&](std::size_t i) { return weights_[i]; }));
}

TokenId Sampler::draw() {
  double largest = -kInfinity;
  for (const Candidate& c : candidates_) largest = std::max(largest, c.score);
  if (options_.min_p > 0) {
    const double least = largest + std::log(options_.min_p);
    std::erase_if(candidates_, [&](const Candidate& c) { return c.score < least; });
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  const double factor = factor_of(options_.temperature);
  double total = 0;
  for (Candidate& c : candidates_) total += c.weight = std::exp((c.score - largest) * factor);
  return candidates_[find_drawn(candidates_.size(), drawn() * total,
                                [&](std::size_t i) { return candidates_[i].weight; })]
      .id;
}

// Uses the unmodified logits: bias, penalties and filters affect the choice, not the model's output.
Sampler::Report Sampler::describe(std::span<const float> logits, TokenId chosen) {
  const double largest = largest_of(logits);
  const auto log_sum = [&] { return std::log(sum_exp(logits, largest)); };
  const auto infinite = std::count(logits.begin(), logits.end(), float(kInfinity));
  const double log_total = largest == kInfinity ? std::log(double(infinite)) : log_sum();
  const auto log_prob = [&](double logit) { return (logit == largest ? 0 : logit - largest) - log_total; };
  Report report = {log_prob(logits[std::size_t(chosen)]), {}};
  find_best(logits, std::size_t(report_), candidates_);
  std::sort(candidates_.begin(), candidates_.end(), is_better);
  for (const Candidate& c : candidates_) report.best.push_back({c.id, log_prob(c.score)});
  return report;
}

}  // namespace metal_prefill
