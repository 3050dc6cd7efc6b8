#include "banks.h"

#include <algorithm>

namespace metal_emulator::cpu {

void BankCounter::access(const abi::Fiber& fiber, const void* instruction, std::uintptr_t address,
                         std::size_t bytes) {
  Instruction& of = simdgroups_[fiber.thread / abi::kLanes][instruction];
  const std::size_t time = of.executed[fiber.lane]++;
  if (of.times.size() <= time) of.times.resize(time + 1);
  for (std::uintptr_t word = address / kWordBytes; word <= (address + bytes - 1) / kWordBytes; word++)
    of.times[time].push_back(word);
}

void BankCounter::end_threadgroup() {
  for (auto& simdgroup : simdgroups_) {
    for (auto& [address, instruction] : simdgroup) {
      for (Words& words : instruction.times) {
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        std::array<unsigned, kBanks> in_bank{};
        for (const std::uintptr_t word : words) in_bank[word % kBanks]++;
        cycles_ += *std::max_element(in_bank.begin(), in_bank.end());
        least_ += (words.size() + kBanks - 1) / kBanks;
      }
    }
    simdgroup.clear();
  }
}

}  // namespace metal_emulator::cpu
