// Arrays that pass between Python and the engines, and the progress callback between chunks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "../engine/engine.h"
#include "gil.h"

namespace metal_prefill::python {

namespace nb = nanobind;

using TokenArray = nb::ndarray<const TokenId, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::span<const TokenId> view(const TokenArray& tokens) {
  return {tokens.data(), tokens.shape(0)};
}

inline std::span<const float> view(const FloatArray& values) {
  return {values.data(), values.shape(0)};
}

// A NumPy array that is created and released with the GIL, and filled without it.
template <typename T>
class Result {
 public:
  using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
  explicit Result(std::size_t n) : data_(new T[n]), n_(n) {}  // uninitialized
  T* data() { return data_.get(); }
  Array release() {
    T* p = data_.release();
    nb::capsule owner(p, [](void* q) noexcept { delete[] static_cast<T*>(q); });
    return Array(p, {n_}, owner);
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t n_;
};
using FloatResult = Result<float>;

// Runs signal handlers (so that Ctrl-C works) and the caller's callback between chunks. An exception in
// either stops the prompt; it is raised once the session is consistent.
class ProgressGuard {
 public:
  explicit ProgressGuard(nb::object callback) : callback_(std::move(callback)) {}

  Progress function() {
    return [this](int done, int total) {
      return with_gil([&] {
        if (PyErr_CheckSignals() != 0) {
          error_ = std::make_unique<nb::python_error>();
          return false;
        }
        if (callback_.is_none()) return true;
        try {
          callback_(done, total);
          return true;
        } catch (nb::python_error& error) {
          error_ = std::make_unique<nb::python_error>(std::move(error));
          return false;
        }
      });
    };
  }

  void raise_pending() {
    if (error_) throw nb::python_error(std::move(*error_));
  }

 private:
  nb::object callback_;
  std::unique_ptr<nb::python_error> error_;
};

}  // namespace metal_prefill::python
