// Sizes of the gated delta rule, shared by the host and the shaders.
#pragma once

#define GATED_DELTA_COLUMNS 4  // columns of a matrix per simdgroup: 4 * GATED_DELTA_ROWS registers of a lane
#define GATED_DELTA_ROWS 8     // maximum rows of a column per lane
#define GATED_DELTA_SIMDGROUPS 4  // simdgroups per threadgroup
#define GATED_DELTA_EPS 1e-6f     // added to the squared length of a query or key
