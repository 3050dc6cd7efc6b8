#include "hazards.h"

#include <algorithm>
#include <iterator>

namespace metal_emulator {

bool HazardTracker::meet(const Access& a, const Access& b) const {
  if (a.memory != b.memory || !(a.write || b.write)) return false;
  if (known_ == Known::kBound) return a.range.begin == b.range.begin;
  return a.range.begin < b.range.end && b.range.begin < a.range.end;
}

std::optional<std::string> HazardTracker::find_conflict(std::span<const Access> accesses,
                                                        const char* missing) const {
  for (const Access& later : accesses) {
    for (const Access& earlier : accesses_) {
      if (!meet(earlier, later)) continue;
      const auto begin = std::max(earlier.range.begin, later.range.begin);
      const auto end = std::min(earlier.range.end, later.range.end);
      return later.by + (later.write ? " writes" : " reads") + " bytes " + std::to_string(begin) + " to " +
             std::to_string(end) + " of a buffer that " + earlier.by +
             (earlier.write ? " writes" : " reads") + ", with " + missing;
    }
  }
  return std::nullopt;
}

void HazardTracker::add(std::vector<Access> accesses) {
  std::move(accesses.begin(), accesses.end(), std::back_inserter(accesses_));
}

}  // namespace metal_emulator
