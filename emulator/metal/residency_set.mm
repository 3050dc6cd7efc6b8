// Residency sets. All memory of the emulated device is always present: a set only counts its bytes and
// records when it was last needed.
#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "classes.h"

using namespace metal_emulator;

@implementation MTLResidencySetDescriptor
@end

@implementation EmulatorResidencySet {
  std::mutex _mutex;
  std::vector<EmulatorBuffer*> _allocations, _committed;
  std::size_t _resident;  // bytes of this set in the device's count
  BOOL _requested;
  std::uint64_t _commandBuffersBefore;                // when it was first requested
  std::chrono::steady_clock::time_point _lastNeeded;  // last request, or use by a command buffer
}

- (void)dealloc {
  _requested = NO;
  [self account];
}
// Requires that the mutex is locked.
- (void)account {
  std::size_t bytes = 0;
  const bool kept = limits().keeps_unused && counters().command_buffers == _commandBuffersBefore;
  if (!_requested && kept) return;
  for (EmulatorBuffer* buffer : _committed) bytes += _requested ? buffer->_memory->bytes : 0;
  locked([&](State& state) { state.resident_bytes_ += bytes - _resident; });
  _resident = bytes;
}
- (void)requestResidency {
  [self use];
  std::lock_guard lock(_mutex);
  if (!_requested) _commandBuffersBefore = counters().command_buffers;
  _requested = YES;
  _lastNeeded = std::chrono::steady_clock::now();
  [self account];
}
- (void)use {
  const std::chrono::milliseconds lapse(limits().residency_lapse_ms);
  std::lock_guard lock(_mutex);
  if (!_requested) return;
  const auto now = std::chrono::steady_clock::now();
  const bool lapsed = lapse.count() > 0 && now - std::exchange(_lastNeeded, now) > lapse;
  if (!locked([](State& state) { return std::exchange(state.loses_residency_, false); }) && !lapsed) return;
  State::get().count(&Counters::residency_faults);
  State::get().count(&Counters::residency_fault_bytes, _resident);
}
- (void)endResidency {
  std::lock_guard lock(_mutex);
  if (!_requested) throw ValidationError("endResidency: it was not requested");
  _requested = NO;
  [self account];
}
- (void)addAllocation:(id<MTLAllocation>)allocation {
  auto* buffer = checked_cast<EmulatorBuffer>(allocation, "addAllocation");
  std::lock_guard lock(_mutex);
  if (std::find(_allocations.begin(), _allocations.end(), buffer) == _allocations.end())
    _allocations.push_back(buffer);
}
- (void)removeAllocation:(id<MTLAllocation>)allocation {
  auto* buffer = checked_cast<EmulatorBuffer>(allocation, "removeAllocation");
  std::lock_guard lock(_mutex);
  std::erase(_allocations, buffer);
}
- (BOOL)containsAllocation:(id<MTLAllocation>)allocation {
  auto* buffer = checked_cast<EmulatorBuffer>(allocation, "containsAllocation");
  std::lock_guard lock(_mutex);
  return std::find(_allocations.begin(), _allocations.end(), buffer) != _allocations.end();
}
- (void)commit {
  std::lock_guard lock(_mutex);
  _committed = _allocations;
  [self account];
}
@end
