// metal_stdlib and related headers for clang. Included in an anonymous namespace before a rewritten source, so that
// `using namespace metal` has the same meaning as in Metal, and sources share no functions.
// clang-format off: each header depends on the previous ones
#include "config.h"
#include "types.h"
#include "traits.h"
#if MSL_PTX
#include "ptx_math.h"
#endif
#include "math.h"
#include "common.h"
#if MSL_CHECK
#include "check_simdgroup.h"
#elif MSL_CPU
#include "cpu_simdgroup.h"
#include "cpu_simdgroup_matrix.h"
#elif MSL_PTX
#include "ptx_simdgroup.h"
#include "ptx_simdgroup_matrix.h"
#endif
#include "simdgroup_matrix.h"
#if __METAL_VERSION__ >= 400
#if MSL_CPU
#include "cpu_tensor.h"
#elif MSL_PTX
#include "ptx_tensor.h"
#endif
#include "tensor.h"
#endif
#include "kernel.h"
#if MSL_CPU
#include "cpu_kernel.h"
#elif MSL_PTX
#include "ptx_kernel.h"
#endif
