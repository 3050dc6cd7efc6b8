// Finds the previous occurrence of the longest suffix of a text.
//
// A suffix automaton has a state for each set of strings that end at the same positions of the text. It grows
// by a token in constant amortized time, and keeps the longest suffix of the text that occurred before.
#pragma once

#include <map>
#include <vector>

#include "../base/token.h"

namespace metal_prefill {

class SuffixAutomaton {
 public:
  void append(TokenId token);
  TokenId token(int number) const { return tokens_[std::size_t(number)]; }

  // Length of the longest suffix that occurred before.
  int matched() const { return matched_; }
  // Index of the token after that occurrence.
  int place() const { return states_[std::size_t(match_)].end; }
  // At most `count` tokens, from an index on. After the end of the text, its tokens are repeated.
  std::vector<TokenId> copy(int place, int count) const;

 private:
  struct State {
    std::map<TokenId, int> next;
    int link = -1;   // state of the longest suffix that has more occurrences
    int length = 0;  // of the longest string of the state
    int end = 0;     // end of one of its occurrences
  };

  void grow(TokenId token);

  std::vector<TokenId> tokens_;
  std::vector<State> states_ = std::vector<State>(1);
  int last_ = 0;     // state of the whole text
  int match_ = 0;    // state of the longest suffix that occurred before
  int matched_ = 0;  // its length
};

}  // namespace metal_prefill
