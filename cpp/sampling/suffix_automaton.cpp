#include "suffix_automaton.h"

namespace metal_prefill {

void SuffixAutomaton::append(TokenId token) {
  // Extends the match before the automaton grows, so that a suffix of the text does not match itself. The
  // current match also ends here, later than where it was found.
  states_[std::size_t(match_)].end = int(tokens_.size());
  const auto at = [&](int state) -> State& { return states_[std::size_t(state)]; };
  auto found = at(match_).next.find(token);
  while (found == at(match_).next.end() && match_ != 0) {
    match_ = at(match_).link;
    matched_ = at(match_).length;
    found = at(match_).next.find(token);
  }
  if (found != at(match_).next.end()) {
    match_ = found->second;
    ++matched_;
  }
  grow(token);
  // Growing may have split the state: the match belongs to the part whose strings are short enough.
  while (match_ != 0 && at(at(match_).link).length >= matched_) match_ = at(match_).link;
}

// Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985.
void SuffixAutomaton::grow(TokenId token) {
  tokens_.push_back(token);
  const auto at = [&](int state) -> State& { return states_[std::size_t(state)]; };
  const int added = int(states_.size()), end = int(tokens_.size());
  states_.push_back({.length = at(last_).length + 1, .end = end});
  int state = last_;
  for (; state >= 0 && at(state).next.try_emplace(token, added).second; state = at(state).link) {
  }
  last_ = added;
  if (state < 0) {
    at(added).link = 0;
    return;
  }
  const int target = at(state).next[token];
  if (at(target).length == at(state).length + 1) {
    at(added).link = target;
    return;
  }
  const int split = int(states_.size());
  states_.push_back(State(at(target)));
  at(split).length = at(state).length + 1;
  at(target).link = at(added).link = split;
  for (; state >= 0; state = at(state).link) {
    const auto next = at(state).next.find(token);
    if (next->second != target) break;
    next->second = split;
  }
}

std::vector<TokenId> SuffixAutomaton::copy(int place, int count) const {
  const int n = int(tokens_.size());
  std::vector<TokenId> found;
  for (int i = 0; i < count; ++i) found.push_back(tokens_[std::size_t(place + i % (n - place))]);
  return found;
}

}  // namespace metal_prefill
