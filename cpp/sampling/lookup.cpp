#include "lookup.h"

#include <algorithm>
#include <bit>

namespace metal_prefill {
namespace {

constexpr int kLong = 5;    // minimum length of a match whose place is kept
constexpr int kEnough = 4;  // minimum number of the latest 8 tokens that agree there

}  // namespace

void Lookup::append(std::span<const TokenId> tokens, bool forced) {
  for (const TokenId token : tokens) {
    if (place_ >= 0) follow(token, forced);
    automaton_.append(token);
    forced_ = forced ? forced_ + 1 : 0;
    const int matched = automaton_.matched() - forced_;
    if (matched >= kLong && (place_ < 0 || matched > since_change_)) {
      place_ = automaton_.place();
      since_change_ = matched;
      latest_ = std::uint8_t((1 << std::min(matched, 8)) - 1);
    }
  }
}

void Lookup::follow(TokenId token, bool forced) {
  const bool same = automaton_.token(place_) == token;
  latest_ = std::uint8_t(latest_ << 1 | int(same));
  since_change_ = same ? since_change_ + int(!forced) : 0;
  place_ = std::popcount(latest_) >= kEnough ? place_ + 1 : -1;
}

int Lookup::matched() const {
  return automaton_.matched() == 0 ? 0 : std::max(automaton_.matched() - forced_, 1);
}

std::optional<int> Lookup::since_change() const {
  if (place_ < 0 || (since_change_ > 0 && since_change_ >= automaton_.matched())) return std::nullopt;
  return since_change_;
}

std::vector<TokenId> Lookup::after_match(int count) const {
  return automaton_.matched() == 0 ? std::vector<TokenId>() : automaton_.copy(automaton_.place(), count);
}

std::vector<TokenId> Lookup::after_change(int count) const {
  return place_ < 0 ? std::vector<TokenId>() : automaton_.copy(place_, count);
}

}  // namespace metal_prefill
