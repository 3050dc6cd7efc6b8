// Memory that stays resident on the GPU between passes.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace metal_prefill::metal {

// macOS may evict memory from the GPU while no command buffer uses it, and the next pass then waits for it.
// From version 15 on residency sets prevent that. Other programs can cause macOS to evict a whole set, so
// there are several. All objects of a process together keep at most 65% of the machine's memory, and no more
// than the device holds. Version 26 forgets a request after about a second, so a thread repeats it while the
// memory is in use, and for `kept_seconds` after that. Does nothing before version 15, if the SDK of the
// build lacked residency sets, or if the GPU is not native.
class Residency {
 public:
  Residency(const Device& device, double kept_seconds, bool is_wanted);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  void add(id<MTLBuffer> buffer);
  void remove(id<MTLBuffer> buffer);  // does nothing if it was not added
  // Call before a pass uses the memory.
  void used();
  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Set {
    id set;  // id<MTLResidencySet>
    std::size_t bytes = 0;
  };
  Set* set_with_room(std::size_t bytes);
  void commit(const Set& changed);
  void request();
  void keep();  // runs on the thread

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  bool is_wanted_;
  std::vector<Set> sets_;
  std::mutex set_mutex_;
  std::atomic<std::size_t> bytes_{0};

  const Clock::duration kept_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Clock::time_point last_use_;
  bool ends_ = false;
  std::thread thread_;  // started at the first use
};

}  // namespace metal_prefill::metal
