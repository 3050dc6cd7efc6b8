// Single steps of the engine and the limits of the machine, each timed on a separate team:
// tools/measure/bench_kernels.py compares them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/threads.h"

namespace metal_prefill::cpu {

class Workload {
 public:
  // `body` does the i-th repetition on each thread of the team.
  Workload(int threads, std::function<void(Worker&, int i)> body, double multiply_adds, double bytes)
      : multiply_adds(multiply_adds), bytes(bytes), team_(threads), body_(std::move(body)) {}

  const double multiply_adds, bytes;  // of a repetition: products, and bytes of weights that it reads

  // Seconds that `repetitions` take.
  double run(int repetitions);

 private:
  Team team_;
  std::function<void(Worker&, int i)> body_;
  int next_ = 0;
};

// Names of the limits of a set: register-only products of "int8", "float32" and, if supported, "bfloat16",
// and reads of "memory".
std::vector<std::string> peaks(const std::string& set);
std::unique_ptr<Workload> peak_workload(const std::string& set, const std::string& what, int threads);
// One matrix by `tokens` activations, with enough weights that they come from memory, as in a model.
// `compute` is "int8" or "bf16".
std::unique_ptr<Workload> product_workload(const std::string& set, std::uint32_t type, int rows, int cols,
                                           int tokens, int threads, const std::string& compute);
// Causal attention of a whole prompt in one layer, f16 cache.
std::unique_ptr<Workload> attention_workload(const std::string& set, int tokens, int heads, int kv_heads,
                                             int head_dim, int threads);

}  // namespace metal_prefill::cpu
