// The GPU and its memory.
#pragma once

#include <memory>
#include <string>

#include "../executor.h"
#include "driver.h"

namespace metal_emulator::cuda {

class Device {
 public:
  // The first GPU. Throws std::runtime_error without one.
  Device();
  const std::string& name() const { return name_; }
  // Compute capability, 90 for Hopper.
  int capability() const { return capability_; }
  // To be called on each thread before it calls the driver.
  void enter() const;

 private:
  Context context_ = nullptr;
  std::string name_;
  int capability_ = 0;
};

// All allocations have a device_address.
//
// Device memory full of 0xff, or uninitialized if `filled` is false. Null: out of memory.
std::shared_ptr<Allocation> allocate_private(const Device& device, std::size_t bytes, bool filled);
// Guarded host memory that the GPU reads and writes over the bus. Null: out of memory.
std::shared_ptr<Allocation> allocate_shared(const Device& device, std::size_t bytes);
// The caller's memory: a copy on the device if the pages are read-only, so that neither side can change them,
// else the memory itself. Null: the driver cannot reach it.
std::shared_ptr<Allocation> wrap(const Device& device, void* memory, std::size_t bytes);

}  // namespace metal_emulator::cuda
