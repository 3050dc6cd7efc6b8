// Memory that stays with the GPU between passes.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <atomic>
#include <cstddef>

namespace metal_prefill::metal {

// macOS may take memory from the GPU while no command buffer uses it, and the next pass then waits for it.
// From version 15 on it can be told not to, by a residency set, as long as the memory fits the device. Before
// that, and where the SDK of the build knew no such sets, this does nothing. Safe to call from one thread at
// a time.
class Residency {
 public:
  Residency(id<MTLDevice> device, id<MTLCommandQueue> queue);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  void add(id<MTLBuffer> buffer);
  void remove(id<MTLBuffer> buffer);  // nothing happens where it was not added
  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  void commit();

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  id set_;  // id<MTLResidencySet>; null: there is none
  std::atomic<std::size_t> bytes_{0};
};

}  // namespace metal_prefill::metal
