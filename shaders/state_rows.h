// The rows of a sequence in a pass.
#pragma once

#include "args.h"

// The pass's row of token `token` in the chunk of `row`.
static inline uint row_of(constant StateRow& row, uint token) {
  return token < row.split ? row.first + token : row.rest + (token - row.split);
}
