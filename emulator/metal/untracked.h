// Buffers with MTLHazardTrackingModeUntracked: Metal orders neither the encoders of a command buffer nor the
// command buffers of a queue that use them. Fences do, and waiting on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hazards.h"

namespace metal_emulator {

// How one encoder uses untracked buffers.
struct EncoderUse {
  std::uint64_t number = 0;  // unique
  HazardTracker tracker{HazardTracker::Known::kBound};
  std::vector<const void*> waits, updates;  // fences
  std::set<std::uint64_t> after;            // numbers of encoders that are finished before this one begins
};

// How one command buffer uses untracked buffers.
class UntrackedUse {
 public:
  explicit UntrackedUse(const void* queue) : queue_(queue) {}

  // By the encoder that is open. Conflicts are with earlier ones of the same command buffer.
  void wait_for(const void* fence);
  void update(const void* fence);
  std::optional<std::string> find_conflict(std::span<const Access> accesses) const;
  void add(std::vector<Access> accesses);
  void end_encoder();

  // The command buffer is committed. Throws ValidationError when another, whose completion the host has not
  // seen, uses the same buffers, and no fence orders the two.
  static void commit(const std::shared_ptr<UntrackedUse>& use);
  // The host has seen that the command buffer completed, and with it those before it in the same queue.
  static void observe(UntrackedUse& use);
  // The memory, or the fence, is freed; its address may be used again.
  static void forget(const Allocation& memory);
  static void forget_fence(const void* fence);

 private:
  const void* const queue_;
  EncoderUse open_;
  std::vector<EncoderUse> ended_;
};

}  // namespace metal_emulator
