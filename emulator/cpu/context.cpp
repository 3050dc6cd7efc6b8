#include "context.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.hidden metal_emulator_switch
.globl metal_emulator_switch
.type metal_emulator_switch, @function
metal_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmpq *%rcx
.size metal_emulator_switch, . - metal_emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.hidden metal_emulator_switch
.globl metal_emulator_switch
.type metal_emulator_switch, @function
metal_emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  br x30
.size metal_emulator_switch, . - metal_emulator_switch
)");
#endif

namespace metal_emulator::cpu {
namespace {

constexpr std::size_t kStacksOffset = abi::kRegionBytes / 2;

}  // namespace

std::byte* map_memory(void* address, std::size_t bytes) {
  void* memory = mmap(address, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address ? MAP_FIXED : 0), -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

Region::Region() {
  // Twice the size contains an aligned region wherever the mapping begins.
  std::byte* mapping = map_memory(nullptr, 2 * abi::kRegionBytes);
  const auto begin = reinterpret_cast<std::uintptr_t>(mapping);
  const std::uintptr_t aligned = (begin + abi::kRegionBytes - 1) / abi::kRegionBytes * abi::kRegionBytes;
  base_ = mapping + (aligned - begin);
  if (aligned > begin) munmap(mapping, aligned - begin);
  munmap(base_ + abi::kRegionBytes, abi::kRegionBytes - (aligned - begin));
}

Region::~Region() {
  munmap(base_, abi::kRegionBytes);
}

std::byte* Region::stack(unsigned index) const {
  return base_ + kStacksOffset + index * abi::kStackBytes + kGuardBytes;
}

void* Region::prepare(unsigned index, void (*entry)()) {
  for (; guarded_ <= index; guarded_++) mprotect(stack(guarded_) - kGuardBytes, kGuardBytes, PROT_NONE);
  // Staggered: stacks are at multiples of a power of two, so that equal depths would share one cache set.
  const std::size_t stagger = index * 320 % 8192;
  auto* top = reinterpret_cast<void**>(stack(index) + kUsableBytes - 64 - stagger);
#if defined(__x86_64__)
  *--top = nullptr;  // return address of `entry`, which never returns
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--top = nullptr;
#else
  for (int i = 0; i < 20; i++) *--top = nullptr;
  top[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  return top;
}

void Region::forget() {
  // ThreadSanitizer treats a new mapping as new memory.
  map_memory(base_ + kStacksOffset, abi::kRegionBytes - kStacksOffset);
  guarded_ = 0;
}

}  // namespace metal_emulator::cpu
