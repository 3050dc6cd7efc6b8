// Buffers with MTLHazardTrackingModeUntracked: Metal orders neither the encoders of a command buffer nor the
// command buffers of a queue that use them. Without fences and events, only waiting on the host does.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hazards.h"

namespace metal_emulator {

// How one command buffer uses untracked buffers.
class UntrackedUse {
 public:
  explicit UntrackedUse(const void* queue) : queue_(queue) {}

  // With earlier encoders of the same command buffer.
  std::optional<std::string> find_conflict(std::span<const Access> accesses) const;
  void add(std::vector<Access> accesses);  // of an encoder that has ended

  // The command buffer is committed. Throws ValidationError when another, whose completion the host has not
  // seen, uses the same buffers.
  static void commit(const std::shared_ptr<UntrackedUse>& use);
  // The host has seen that the command buffer completed, and with it those before it in the same queue.
  static void observe(UntrackedUse& use);
  // The memory is freed; its address may be used again.
  static void forget(const Allocation& memory);

 private:
  const void* const queue_;
  HazardTracker earlier_{HazardTracker::Known::kBound};
  std::vector<Access> accesses_;
};

}  // namespace metal_emulator
