#include "inspection.h"

#include "batch.h"

namespace metal_prefill {

std::unique_ptr<SessionInspector> SessionInspector::of(Session& session) {
  const PassInspector* passes = session.engine().inspector();
  return std::unique_ptr<SessionInspector>(passes ? new SessionInspector(session, *passes) : nullptr);
}

std::vector<Dispatch> SessionInspector::plan(int tokens) const {
  if (tokens < 1)
    throw std::invalid_argument("a plan needs at least one token, got " + std::to_string(tokens));
  const int position = session_.position();
  session_.check_room(std::size_t(position), std::size_t(tokens));
  return passes_.plan(tokens, position);
}

PromptResult SessionInspector::trace(std::span<const TokenId> tokens, Trace& trace,
                                     const Progress& progress) {
  const Config& config = session_.engine().config();
  TokenId chosen = -1;
  std::vector<float> hidden(config.has_head ? 0 : std::size_t(config.dim));
  const Output output = config.has_head ? Output(GreedyOutput{.choices = {.chosen = {&chosen, 1}}})
                                        : Output(HiddenOutput{hidden.data(), 1, config.dim, true});
  return run_alone(session_, {.tokens = tokens, .output = output, .trace = &trace}, "trace", progress);
}

}  // namespace metal_prefill
