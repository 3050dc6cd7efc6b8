// Aligned memory that throws DeviceError if the system has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../base/rounding.h"

namespace metal_prefill::cpu {

// Zeroed bytes, aligned to 64 (a cache line, the widest vector). Large buffers use huge pages if the system
// offers them: weights are streamed, and 4 KiB pages would cost a TLB miss every few blocks.
class Buffer {
 public:
  Buffer() = default;
  // Throws DeviceError naming `what` and the size.
  Buffer(std::size_t bytes, const char* what);

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return memory_.get_deleter().bytes; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }

 private:
  struct Release {
    std::size_t bytes;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte[], Release> memory_;
};

}  // namespace metal_prefill::cpu
