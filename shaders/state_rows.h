// The rows of a sequence in a pass.
#pragma once

#include "args.h"

// Row of the pass with a token of the same chunk.
static inline uint row_of(constant StateRow& row, uint token) {
  return token < row.split ? row.first + token : row.rest + (token - row.split);
}
