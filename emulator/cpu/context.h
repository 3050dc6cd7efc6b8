// Stacks of fibers, and switching between them.
#pragma once

#include <cstddef>

#include "abi.h"

#if METAL_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if METAL_EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

// Saves the callee-saved registers on the stack and the stack pointer in *from, and continues at `to`.
extern "C" void metal_emulator_switch(void** from, void* to) asm("metal_emulator_switch");

namespace metal_emulator::cpu {

// Maps zeroed memory, replacing the mapping at `address` if it is not null. Throws std::bad_alloc.
std::byte* map_memory(void* address, std::size_t bytes);

// Memory for a Worker and kMaxThreads stacks, aligned to its size. Inaccessible pages separate the stacks.
class Region {
 public:
  Region();  // throws std::bad_alloc
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  void* base() const { return base_; }
  std::byte* stack(unsigned index) const;  // lowest accessible byte
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr std::size_t kUsableBytes = abi::kStackBytes - kGuardBytes;
  // Returns a stack pointer from which metal_emulator_switch enters `entry`.
  void* prepare(unsigned index, void (*entry)());
  // Makes the sanitizer forget all accesses to the stacks.
  void forget();

 private:
  std::byte* base_;
  unsigned guarded_ = 0;  // number of stacks with a guard page so far
};

}  // namespace metal_emulator::cpu
