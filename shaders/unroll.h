// Loops with a constant number of iterations, without a branch.
#pragma once

#define FOR_UNROLL(...) _Pragma("unroll") for (__VA_ARGS__)
