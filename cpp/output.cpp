#include "output.h"

namespace metal_prefill {

namespace {

Choices part_of(const Choices& choices, std::size_t first, std::size_t count) {
  return {choices.chosen.subspan(first, count), choices.drafts, choices.first + int(first)};
}

template <typename AnyOutput>
auto* find_choices(AnyOutput& output) {
  using Found = std::conditional_t<std::is_const_v<AnyOutput>, const Choices, Choices>;
  return std::visit(
      Overloaded{[](OneOf<GreedyOutput, SampledOutput> auto& chosen) -> Found* { return &chosen.choices; },
                 [](OneOf<NoOutput, LogitsOutput, LogProbsOutput, HiddenOutput> auto&) -> Found* {
                   return nullptr;
                 }},
      output);
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

int rows_of(const Output& output) {
  return std::visit(Overloaded{[](const NoOutput&) { return 0; },
                               [](const OneOf<GreedyOutput, SampledOutput> auto& chosen) {
                                 return int(chosen.choices.chosen.size());
                               },
                               [](const LogitsOutput&) { return 1; },
                               [](const LogProbsOutput& scored) { return int(scored.targets.size()); },
                               [](const HiddenOutput& hidden) { return hidden.rows; }},
                    output);
}

Output part_of(const Output& output, int first, int count) {
  if (count == 0) return NoOutput{};
  const std::size_t begin = std::size_t(first), n = std::size_t(count);
  return std::visit(
      Overloaded{[](const OneOf<NoOutput, LogitsOutput> auto& whole) -> Output { return whole; },
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

Choices* choices_of(Output& output) {
  return find_choices(output);
}

const Choices* choices_of(const Output& output) {
  return find_choices(output);
}

}  // namespace metal_prefill
