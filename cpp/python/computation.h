// What a call of Engine.forward_batch computes: requests, with the objects that they refer to and the memory
// of their results.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../engine/batch.h"

namespace metal_prefill::python {

class Computation {
 public:
  virtual ~Computation() = default;

  // Appends its requests; throws std::invalid_argument the second time.
  void begin(std::vector<Request*>& requests) {
    if (begun_->test_and_set())
      throw std::invalid_argument("a request is computed once: make another for further tokens");
    add_requests(requests);
  }
  // With the GIL, once the requests are computed.
  virtual nanobind::object take_result() = 0;
  virtual std::size_t n_tokens() const = 0;

 protected:
  Computation() = default;
  Computation(Computation&&) = default;
  virtual void add_requests(std::vector<Request*>& requests) = 0;

 private:
  std::unique_ptr<std::atomic_flag> begun_ = std::make_unique<std::atomic_flag>();  // threads may share it
};

}  // namespace metal_prefill::python
