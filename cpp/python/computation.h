// Requests of Engine.forward_batch and forward_pass, with the objects that they refer to and the memory of
// their results.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "../engine/batch.h"

namespace metal_prefill::python {

class Computation {
 public:
  virtual ~Computation() = default;

  // Adds its requests to those of a call; throws std::invalid_argument if it is finished or in another call.
  void begin(std::vector<Request*>& all) {
    if (begun_->test_and_set() || finished())
      throw std::invalid_argument("a request is computed once: make another for further tokens");
    for (Request& request : requests()) all.push_back(&request);
  }
  // Lets another call continue it.
  void pause() { begun_->clear(); }

  bool finished() {
    const std::span<Request> all = requests();
    return std::all_of(all.begin(), all.end(), [](const Request& request) { return request.finished; });
  }
  int computed() {
    int rows = 0;
    for (const Request& request : requests()) rows += request.result.computed;
    return rows;
  }
  int left() {
    int rows = 0;
    for (const Request& request : requests())
      if (!request.finished) rows += int(request.tokens.size()) - request.result.done;
    return rows;
  }
  // Returns the result of a finished computation. Requires the GIL.
  virtual nanobind::object take_result() = 0;

 protected:
  Computation() = default;
  Computation(Computation&&) = default;
  virtual std::span<Request> requests() = 0;

 private:
  std::unique_ptr<std::atomic_flag> begun_ = std::make_unique<std::atomic_flag>();  // threads may share it
};

}  // namespace metal_prefill::python
