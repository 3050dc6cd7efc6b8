// The GPU and its memory.
#pragma once

#include <memory>
#include <string>

#include "../executor.h"
#include "driver.h"

namespace metal_emulator::cuda {

class Device {
 public:
  // Opens the first GPU. Throws std::runtime_error if there is none.
  Device();
  const std::string& name() const { return name_; }
  // Compute capability, 90 for Hopper.
  int capability() const { return capability_; }
  // Call on each thread before it calls the driver.
  void enter() const;

 private:
  Context context_ = nullptr;
  std::string name_;
  int capability_ = 0;
};

// All allocations have a device_address.
//
// Allocates device memory, filled with 0xff unless `filled` is false. Null if out of memory.
std::shared_ptr<Allocation> allocate_private(const Device& device, std::size_t bytes, bool filled);
// Allocates guarded host memory that the GPU accesses over the bus. Null if out of memory.
std::shared_ptr<Allocation> allocate_shared(const Device& device, std::size_t bytes);
// Wraps the caller's memory. Read-only pages are copied to the device, as neither side can change them. Null
// if the driver cannot access the memory.
std::shared_ptr<Allocation> wrap(const Device& device, void* memory, std::size_t bytes);

}  // namespace metal_emulator::cuda
