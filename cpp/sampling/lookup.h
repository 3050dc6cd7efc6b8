// Drafts of the tokens that follow a text, found in the text itself, at two places that may continue.
//
// The first follows the previous occurrence of the longest suffix of the text. If a text repeats a part with
// changes, such as the rows of a table, nothing matches right after a change. The second is therefore the
// place of an earlier long match: it is assumed to continue, with one token replaced by another, as long as
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
  // `forced` tokens were not chosen, so an earlier occurrence says nothing about their continuation.
  void append(std::span<const TokenId> tokens, bool forced);

  // How many of the last tokens occurred before, as one string, without forced ones at the end; at least 1 if
  // anything did.
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
  int since_change_ = 0;     // tokens that agreed there
  std::uint8_t latest_ = 0;  // a bit of each of the latest tokens: it was the same; the last is lowest
};

}  // namespace metal_prefill
