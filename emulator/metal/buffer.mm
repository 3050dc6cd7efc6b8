#include "classes.h"
#include "untracked.h"

using namespace metal_emulator;

@implementation EmulatorBuffer {
  void (^_deallocator)(void* pointer, NSUInteger length);
}

- (instancetype)initWithMemory:(std::shared_ptr<Allocation>)memory
                       options:(MTLResourceOptions)options
                   deallocator:(void (^)(void* pointer, NSUInteger length))deallocator {
  if ((self = [super init])) {
    _memory = std::move(memory);
    _memory->untracked = options & MTLResourceHazardTrackingModeUntracked;
    _deallocator = [deallocator copy];
  }
  return self;
}
- (void)dealloc {
  if (_memory->untracked) UntrackedUse::forget(*_memory);
  _memory->released = true;
  locked([&](State& state) { std::erase(state.buffers_, _memory); });
  // The deallocator receives the caller's pointer, not the executor's view.
  if (_deallocator) _deallocator(_memory->caller_memory, _memory->bytes);
}

- (NSUInteger)length {
  return _memory->bytes;
}
- (void*)contents {
  if (_memory->storage_mode == StorageMode::kPrivate)
    throw ValidationError("contents: the buffer is MTLStorageModePrivate, which the host cannot reach");
  return _memory->caller_memory ? _memory->caller_memory : _memory->host();
}
- (NSString*)label {
  const std::string label = locked([&](State&) { return _memory->label; });
  return label.empty() ? nil : to_ns(label);
}
- (void)setLabel:(NSString*)label {
  locked([&](State&) { _memory->label = to_string(label); });
}
- (MTLStorageMode)storageMode {
  return static_cast<MTLStorageMode>(_memory->storage_mode);
}
@end
