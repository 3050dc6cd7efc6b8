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

#include "device.h"

namespace metal_prefill::metal {

// macOS may take memory from the GPU while no command buffer uses it, and the next pass then waits for it.
// From version 15 on it can be told not to, by a residency set, as long as the memory fits the device.
// Version 26 forgets that after about a second, so a thread repeats the request while the memory is in use,
// and for `kept_seconds` after that. Before version 15, where the SDK of the build knew no such sets, and
// where the GPU is not native, this does nothing.
class Residency {
 public:
  Residency(const Device& device, double kept_seconds);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  void add(id<MTLBuffer> buffer);
  void remove(id<MTLBuffer> buffer);  // nothing happens where it was not added
  // A pass is about to use the memory.
  void used();
  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  void commit();
  void request();
  void keep();  // task of the thread

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  id set_;  // id<MTLResidencySet>; null: none
  std::mutex set_mutex_;
  std::atomic<std::size_t> bytes_{0};

  const Clock::duration kept_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Clock::time_point last_use_;
  bool ends_ = false;
  std::thread thread_;  // from the first use on
};

}  // namespace metal_prefill::metal
