// Single steps of the engine, each timed on a separate team: `make bench-kernels` measures them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cpu/workload.h"

namespace metal_prefill::cpu {

// One matrix by `tokens` activations, with enough weights that they come from memory, as in a model.
// `compute`: "int8" or "bf16".
std::unique_ptr<Workload> product_workload(const std::string& set, std::uint32_t type, int rows, int cols,
                                           int tokens, int threads, const std::string& compute);
// Causal attention of a whole prompt in one layer, f16 cache.
std::unique_ptr<Workload> attention_workload(const std::string& set, int tokens, int heads, int kv_heads,
                                             int head_dim, int threads);

}  // namespace metal_prefill::cpu
