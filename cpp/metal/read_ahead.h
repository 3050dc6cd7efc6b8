// Reading a mapped file before it is needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <thread>

namespace metal_prefill::metal {

// Brings the pages of a mapping into memory from the first to the last, on a thread. Residency would ask for
// them in an order of its own, which takes longer where they come from a disk.
class ReadAhead {
 public:
  explicit ReadAhead(std::span<const std::byte> mapping);
  ~ReadAhead();  // leaves the rest
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  void wait();  // until all of it is in memory

 private:
  void read(std::span<const std::byte> mapping) const;

  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace metal_prefill::metal
