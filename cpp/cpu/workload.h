// The limits of the machine, each timed on a separate team; benchmarks compare the engine with them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "threads.h"

namespace metal_prefill::cpu {

inline constexpr std::size_t kColdBytes = std::size_t(128) << 20;  // more than any cache before memory holds

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

// Names of the limits that a set has: products in registers of "int8", "float32" and perhaps "bfloat16", and
// "memory" that is read.
std::vector<std::string> peaks(const std::string& set);
std::unique_ptr<Workload> peak_workload(const std::string& set, const std::string& what, int threads);

}  // namespace metal_prefill::cpu
