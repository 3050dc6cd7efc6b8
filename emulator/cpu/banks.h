// Counts the cycles that accesses to threadgroup memory take when several lanes access the same bank.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "abi.h"

namespace metal_emulator::cpu {

// Memory has 32 banks of four bytes; a bank serves one word in a cycle, to any number of lanes. Lanes run one
// after another, so the accesses of an instruction are combined when the threadgroup has ended: its n-th
// executions by all lanes of a simdgroup belong together.
class BankCounter {
 public:
  static constexpr unsigned kBanks = 32;
  static constexpr std::size_t kWordBytes = 4;

  void access(const abi::Fiber& fiber, const void* instruction, std::uintptr_t address, std::size_t bytes);
  void end_threadgroup();
  void reset() { cycles_ = least_ = 0; }

  std::uint64_t cycles() const { return cycles_; }
  // Cycles for the same words if they were spread evenly over the banks.
  std::uint64_t least() const { return least_; }

 private:
  using Words = std::vector<std::uintptr_t>;
  struct Instruction {
    std::array<std::uint32_t, abi::kLanes> executed{};  // by each lane
    std::vector<Words> times;                           // by how often it was executed before
  };

  std::array<std::unordered_map<const void*, Instruction>, abi::kMaxThreads / abi::kLanes> simdgroups_;
  std::uint64_t cycles_ = 0, least_ = 0;
};

}  // namespace metal_emulator::cpu
