// Drafts of the tokens that follow a text, copied from one of two earlier places in the text.
//
// The first is after the previous occurrence of the longest suffix of the text. If a text repeats a part with
// changes, such as the rows of a table, there is no match right after a change. The second place therefore
// keeps an earlier long match, which is assumed to continue with one token replaced by another as long as
// enough of the latest tokens agree.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../base/token.h"
#include "suffix_automaton.h"

namespace metal_prefill {

class Lookup {
 public:
  // `forced` tokens were not chosen, so earlier occurrences do not predict their continuation.
  void append(std::span<const TokenId> tokens, bool forced);

  // Length of the longest suffix that occurred before, without forced tokens at its end; at least 1 if there
  // is one.
  int matched() const;
  // Number of equal tokens since the last change, if a place is kept whose continuation differs from that of
  // the match.
  std::optional<int> since_change() const;

  // The tokens after the match, or after the kept place; at the end of the text, they are assumed to repeat.
  // Empty without a match or a kept place.
  std::vector<TokenId> after_match(int count) const;
  std::vector<TokenId> after_change(int count) const;

 private:
  void follow(TokenId token, bool forced);

  SuffixAutomaton automaton_;
  int forced_ = 0;           // tokens at the end
  int place_ = -1;           // number of the token assumed to follow; -1: no place is kept
  int since_change_ = 0;     // tokens that have agreed since the last change
  std::uint8_t latest_ = 0;  // bit n: whether the token n before the last agreed
};

}  // namespace metal_prefill
