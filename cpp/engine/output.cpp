#include "output.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "../base/errors.h"

namespace metal_prefill {

namespace {

Choices part_of(const Choices& choices, std::size_t first, std::size_t count) {
  return {choices.chosen.subspan(first, count), choices.drafts, choices.first + int(first)};
}

// Sums kColumns columns in double precision and in order of rows. The sums fit in registers.
template <int kColumns>
std::array<double, kColumns> column_sums(const float* x, std::size_t stride, int rows) {
  std::array<double, kColumns> sums = {};
  for (int row = 0; row < rows; ++row, x += stride)
    for (std::size_t d = 0; d < kColumns; ++d) sums[d] += double(x[d]);
  return sums;
}

}  // namespace

void SampledOutput::choose(int row, std::span<const float> logits) noexcept {
  const std::size_t r = std::size_t(row), ahead = std::size_t(choices.first) + r;
  if (error || (row > 0 && choices.chosen[r - 1] != choices.drafts[ahead - 1])) return;
  try {
    choices.chosen[r] = sampler->choose(logits, choices.drafts.first(ahead));
  } catch (...) {
    error = std::current_exception();
  }
}

void PooledOutput::pool(const float* states, std::size_t stride) noexcept {
  bool any_nan = false;
  const auto take = [&]<int kColumns>(int first, std::integral_constant<int, kColumns>) {
    const std::array sums = column_sums<kColumns>(states + first, stride, rows);
    for (int d = 0; d < kColumns; ++d) {
      any_nan |= std::isnan(sums[std::size_t(d)]);
      vector[first + d] = kind == Kind::kMean ? float(sums[std::size_t(d)] / rows) : states[first + d];
    }
  };
  constexpr int kBlock = 16;
  int first = 0;
  for (; first + kBlock <= dim; first += kBlock) take(first, std::integral_constant<int, kBlock>());
  for (; first < dim; ++first) take(first, std::integral_constant<int, 1>());
  for (int row = 0; any_nan && row < rows && nan_row < 0; ++row) {  // sums of infinities are NaN, too
    const float* x = states + std::size_t(row) * stride;
    if (std::any_of(x, x + dim, [](float value) { return std::isnan(value); })) nan_row = row;
  }
}

int rows_of(const Output& output) {
  return std::visit(
      Overloaded{[](const NoOutput&) { return 0; },
                 [](const OneOf<GreedyOutput, SampledOutput> auto& chosen) {
                   return int(chosen.choices.chosen.size());
                 },
                 [](const LogitsOutput&) { return 1; },
                 [](const LogProbsOutput& scored) { return int(scored.targets.size()); },
                 [](const OneOf<HiddenOutput, PooledOutput> auto& states) { return states.rows; }},
      output);
}

Output part_of(const Output& output, int first, int count) {
  if (count == 0) return NoOutput{};
  const std::size_t begin = std::size_t(first), n = std::size_t(count);
  return std::visit(
      Overloaded{
          [](const OneOf<NoOutput, LogitsOutput, PooledOutput> auto& whole) -> Output { return whole; },
          [&](const GreedyOutput& greedy) -> Output {
            return GreedyOutput{part_of(greedy.choices, begin, n), greedy.continues};
          },
          [&](const SampledOutput& sampled) -> Output {
            return SampledOutput{part_of(sampled.choices, begin, n), sampled.sampler, {}};
          },
          [&](const LogProbsOutput& scored) -> Output {
            return LogProbsOutput{scored.targets.subspan(begin, n), scored.log_probs + begin};
          },
          [&](const HiddenOutput& hidden) -> Output {
            float* states = hidden.states + begin * std::size_t(hidden.dim);
            return HiddenOutput{states, count, hidden.dim, hidden.normed};
          }},
      output);
}

const Choices* choices_of(const Output& output) {
  return std::visit(
      Overloaded{[](const OneOf<GreedyOutput, SampledOutput> auto& chosen) { return &chosen.choices; },
                 [](const OneOf<NoOutput, LogitsOutput, LogProbsOutput, HiddenOutput, PooledOutput> auto&)
                     -> const Choices* { return nullptr; }},
      output);
}

Choices* choices_of(Output& output) {
  return const_cast<Choices*>(choices_of(std::as_const(output)));
}

void check_results(const Output& output, int position, std::size_t vocab_size) {
  const auto fail = [&](const std::string& what, std::size_t row) {
    throw NumericalError(what + " of the token at position " + std::to_string(position + int(row)) +
                         " is NaN");
  };
  const auto first_nan = [](std::span<const float> values) {
    return std::size_t(
        std::find_if(values.begin(), values.end(), [](float value) { return std::isnan(value); }) -
        values.begin());
  };
  // Tokens after a rejected draft are ignored.
  const auto check_choices = [&](const Choices& choices, const auto& fail_row) {
    for (std::size_t i = 0; i < choices.chosen.size(); ++i) {
      if (choices.chosen[i] < 0) fail_row(i);
      const std::size_t draft = std::size_t(choices.first) + i;
      if (draft < choices.drafts.size() && choices.chosen[i] != choices.drafts[draft]) break;
    }
  };
  std::visit(Overloaded{[](const NoOutput&) {},
                        [&](const GreedyOutput& greedy) {
                          check_choices(greedy.choices, [&](std::size_t row) { fail("every logit", row); });
                        },
                        [&](const SampledOutput& sampled) {
                          check_choices(sampled.choices, [&](std::size_t row) {
                            try {
                              std::rethrow_exception(sampled.error);
                            } catch (const NanLogitError& error) {
                              fail("logit " + std::to_string(error.token), row);
                            }
                          });
                        },
                        [&](const LogitsOutput& all) {
                          const std::span<const float> logits(all.logits, vocab_size);
                          if (const std::size_t bad = first_nan(logits); bad < logits.size())
                            fail("logit " + std::to_string(bad), 0);
                        },
                        [&](const LogProbsOutput& scored) {
                          for (std::size_t i = 0; i < scored.targets.size(); ++i)
                            if (scored.targets[i] >= 0 && std::isnan(scored.log_probs[i]))
                              fail("the log probability after that", i);
                        },
                        [&](const HiddenOutput& hidden) {
                          const std::size_t dim = std::size_t(hidden.dim);
                          const std::span<const float> states(hidden.states, std::size_t(hidden.rows) * dim);
                          if (const std::size_t bad = first_nan(states); bad < states.size())
                            fail("the hidden state", bad / dim);
                        },
                        [&](const PooledOutput& pooled) {
                          if (pooled.nan_row >= 0) fail("the hidden state", std::size_t(pooled.nan_row));
                        }},
             output);
}

}  // namespace metal_prefill
