// Buffers with MTLHazardTrackingModeUntracked. Metal orders neither the encoders of a command buffer nor the
// command buffers of a queue that use them. Fences do, and so do waits on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hazards.h"

namespace metal_emulator {

// One encoder's uses of untracked buffers.
struct EncoderUse {
  std::uint64_t number = 0;  // unique
  HazardTracker tracker;
  std::vector<const void*> waits, updates;  // fences
  std::set<std::uint64_t> after;            // numbers of encoders that finish before this one starts
};

// One command buffer's uses of untracked buffers.
class UntrackedUse {
 public:
  explicit UntrackedUse(const void* queue) : queue_(queue) {}

  // Called for the open encoder. Conflicts are with earlier encoders of the same command buffer.
  void wait_for(const void* fence);
  void update(const void* fence);
  std::optional<std::string> find_conflict(std::span<const Access> accesses) const;
  void add(std::vector<Access> accesses);
  void end_encoder();

  // Commits the command buffer. Throws ValidationError if another one, which the host has not seen completed,
  // uses the same buffers and no fence orders the two.
  static void commit(const std::shared_ptr<UntrackedUse>& use);
  // Records that the host has seen the command buffer completed, and with it earlier ones of the same queue.
  static void observe(UntrackedUse& use);
  // Called when the memory, or the fence, is freed, as its address may be reused.
  static void forget(const Allocation& memory);
  static void forget_fence(const void* fence);

 private:
  const void* const queue_;
  EncoderUse open_;
  std::vector<EncoderUse> ended_;
};

}  // namespace metal_emulator
