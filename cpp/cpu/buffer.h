// Aligned memory that throws the engine's own error if the system has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "../base/rounding.h"

namespace metal_prefill::cpu {

// Zeroed bytes, aligned to 64 (a cache line, the widest vector). Large buffers use huge pages if the system
// offers them: weights are streamed, and 4 KiB pages would cost a TLB miss every few blocks.
class Buffer {
 public:
  Buffer() = default;
  // Throws DeviceError naming `what` and the size.
  Buffer(std::size_t bytes, const char* what);
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace metal_prefill::cpu
