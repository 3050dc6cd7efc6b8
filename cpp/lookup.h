// Guesses at the tokens that follow a text, looked up in the text itself: two places of it that may continue.
//
// The first is where the longest end of the text occurred before. Where a text repeats another with changes,
// such as the rows of a table, nothing matches just after a change. So the place that a long match led to is
// the second: it is taken to continue, with a token in place of another, while enough of the latest tokens
// were the same there.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "suffix_automaton.h"
#include "token.h"

namespace metal_prefill {

class Lookup {
 public:
  // `forced` tokens nobody chose: that they occurred before says nothing about what follows.
  void append(std::span<const TokenId> tokens, bool forced);

  // How many of the last tokens occurred before, as one string, without forced ones at the end; 1 at least
  // where anything did.
  int matched() const;
  // How many tokens were the same since the last change, where a place is kept that has another continuation
  // than the match.
  std::optional<int> since_change() const;

  // The tokens that followed the match, or the kept place; where the text ends, they are taken to repeat.
  // None where there is no match, or no place is kept.
  std::vector<TokenId> after_match(int count) const;
  std::vector<TokenId> after_change(int count) const;

 private:
  void follow(TokenId token, bool forced);

  SuffixAutomaton automaton_;
  int forced_ = 0;           // tokens at the end
  int place_ = -1;           // number of the token that is taken to follow; -1: no place is kept
  int since_change_ = 0;     // tokens that were the same there
  std::uint8_t latest_ = 0;  // a bit of each of the latest tokens: it was the same; the last is lowest
};

}  // namespace metal_prefill
