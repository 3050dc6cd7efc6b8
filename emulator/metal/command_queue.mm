#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "classes.h"
#include "untracked.h"

using namespace metal_emulator;

namespace {
constexpr std::size_t kMaxResidencySets = 32;  // per queue, by Apple's documentation
constexpr NSUInteger kMaxCommandBuffers = 64;  // uncompleted ones per queue
}  // namespace

@implementation EmulatorFence
- (void)dealloc {
  UntrackedUse::forget_fence((__bridge const void*)self);
}
@end

@implementation EmulatorCommandQueue {
  std::mutex _mutex;
  std::condition_variable _finished;
  NSUInteger _unfinished;  // command buffers created, but neither finished nor dropped
  NSUInteger _running;     // those that are submitted
  std::vector<EmulatorResidencySet*> _residencySets;
  std::mutex _unseenMutex;
  std::deque<const void*> _unseen;  // committed; the host has not seen them completed
}

- (id<MTLCommandBuffer>)makeCommandBuffer:(BOOL)retained {
  if (const auto violations = take_violations(); !violations.empty()) {
    throw ValidationError("earlier: " + violations.front());
  }
  std::unique_lock lock(_mutex);
  // Metal blocks here until a command buffer finishes.
  _finished.wait(lock, [&] { return _unfinished < kMaxCommandBuffers || _running == 0; });
  if (_unfinished >= kMaxCommandBuffers) {
    throw ValidationError("commandBuffer: would block forever: the queue's " +
                          std::to_string(kMaxCommandBuffers) +
                          " command buffers are all in use and none is committed");
  }
  _unfinished++;
  return [[EmulatorCommandBuffer alloc] initWithQueue:self retainedReferences:retained];
}
- (id<MTLCommandBuffer>)commandBuffer {
  return [self makeCommandBuffer:YES];
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return [self makeCommandBuffer:NO];
}

- (void)addResidencySet:(id<MTLResidencySet>)residencySet {
  auto* set = checked_cast<EmulatorResidencySet>(residencySet, "addResidencySet");
  std::lock_guard lock(_mutex);
  if (std::find(_residencySets.begin(), _residencySets.end(), set) != _residencySets.end()) return;
  if (_residencySets.size() == kMaxResidencySets)
    throw ValidationError("addResidencySet: a queue has at most " + std::to_string(kMaxResidencySets));
  _residencySets.push_back(set);
}
- (void)removeResidencySet:(id<MTLResidencySet>)residencySet {
  auto* set = checked_cast<EmulatorResidencySet>(residencySet, "removeResidencySet");
  std::lock_guard lock(_mutex);
  std::erase(_residencySets, set);
}

- (std::size_t)committed:(EmulatorCommandBuffer*)commandBuffer {
  std::lock_guard lock(_unseenMutex);
  _unseen.push_back((__bridge const void*)commandBuffer);
  return _unseen.size() - 1;
}
- (BOOL)observe:(EmulatorCommandBuffer*)commandBuffer {
  std::lock_guard lock(_unseenMutex);
  const auto found = std::find(_unseen.begin(), _unseen.end(), (__bridge const void*)commandBuffer);
  if (found == _unseen.end()) return NO;
  _unseen.erase(_unseen.begin(), found + 1);
  return YES;
}

- (void)submit:(EmulatorCommandBuffer*)commandBuffer {
  std::lock_guard lock(_mutex);
  _running++;
  for (EmulatorResidencySet* set : _residencySets) [set use];
  [commandBuffer submit];
}

- (void)commandBufferFinished {
  std::lock_guard lock(_mutex);
  _unfinished--;
  _running--;
  _finished.notify_all();
}

- (void)commandBufferDropped {
  std::lock_guard lock(_mutex);
  _unfinished--;
  _finished.notify_all();
}
@end
