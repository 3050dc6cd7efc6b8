// The rows of a sequence in a pass.
#pragma once

#include "args.h"

// Row of the pass with token `token` of the chunk of `row`.
static inline uint row_of(constant StateRow& row, uint token) {
  return token < row.split ? row.first + token : row.rest + (token - row.split);
}
