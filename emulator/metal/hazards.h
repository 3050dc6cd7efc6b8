// Finds commands that access the same bytes, one of them writing, without a barrier or fence between them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "executor.h"

namespace metal_emulator {

inline constexpr const char* kNoBarrier = "no memory barrier between them on this concurrent encoder";
inline constexpr const char* kNoFence = "no fence between their encoders (the buffer is untracked)";
inline constexpr const char* kNoWait =
    "no wait between the commits of their command buffers and no fence between their encoders (the buffer is "
    "untracked)";

struct Access {
  const Allocation* memory;
  ByteRange range;
  bool write;
  std::string by;  // kernel, dispatch number and binding, for the message
};

class HazardTracker {
 public:
  // Precision of a range. kBound: from the bound offset to the end of the buffer, of which a kernel may use a
  // part. Bindings of a buffer at different offsets are assumed to use different parts, and those at the same
  // offset to conflict. kTouched: the accessed bytes.
  enum class Known { kBound, kTouched };
  HazardTracker() = default;
  explicit HazardTracker(Known known) : known_(known) {}

  // Everything before the barrier finishes before anything after it starts.
  void barrier() { accesses_.clear(); }
  // Forgets the accesses to memory that no longer exists.
  void forget(const Allocation& memory) {
    std::erase_if(accesses_, [&](const Access& access) { return access.memory == &memory; });
  }
  // Describes the first of one command's accesses that conflicts with an earlier one. `missing` names the
  // barrier or fence that should separate them.
  std::optional<std::string> find_conflict(std::span<const Access> accesses, const char* missing) const;
  void add(std::vector<Access> accesses);
  // Accesses since the last barrier.
  const std::vector<Access>& accesses() const { return accesses_; }

 private:
  bool meet(const Access& a, const Access& b) const;

  Known known_ = Known::kBound;
  std::vector<Access> accesses_;
};

}  // namespace metal_emulator
