// Reading a mapped file before it is needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace metal_prefill {

// Loads parts of a mapping into memory in order, on a thread. Residency would request the pages in a
// different order, which takes longer from a disk.
class ReadAhead {
 public:
  // Each part begins at a page.
  explicit ReadAhead(std::vector<std::span<const std::byte>> parts);
  ~ReadAhead();  // stops early
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  void wait();  // until all parts are in memory

 private:
  void read(std::span<const std::byte> part) const;

  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace metal_prefill
