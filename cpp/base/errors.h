// Errors of the engine. The bindings map each to a class of metal_prefill.errors.
#pragma once

#include <stdexcept>

namespace metal_prefill {

// The prompt does not fit: position + tokens exceeds the limit of the session. Nothing was changed.
struct ContextOverflowError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// All pages of K and V that sessions may hold together are in use. Nothing was changed.
struct KvMemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The device is missing, refused an allocation or failed a command.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A result is NaN.
struct NumericalError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The model needs something that this engine does not support.
struct UnsupportedModelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace metal_prefill
