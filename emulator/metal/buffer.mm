#include "classes.h"
#include "untracked.h"

using namespace metal_emulator;

@implementation EmulatorBuffer {
  void (^_deallocator)(void* pointer, NSUInteger length);
}

- (instancetype)initWithState:(std::shared_ptr<BufferState>)state
                      options:(MTLResourceOptions)options
                  deallocator:(void (^)(void* pointer, NSUInteger length))deallocator {
  if ((self = [super init])) {
    _state = std::move(state);
    _state->untracked = options & MTLResourceHazardTrackingModeUntracked;
    _deallocator = [deallocator copy];
  }
  return self;
}
- (void)dealloc {
  if (_state->untracked) UntrackedUse::forget(*_state->allocation);
  State::get().release(_state);
  // The deallocator receives the caller's pointer, not the executor's view.
  if (_deallocator) _deallocator(_state->caller_memory, _state->info.length);
}

- (NSUInteger)length {
  return _state->info.length;
}
- (void*)contents {
  if (_state->info.storage_mode == StorageMode::kPrivate)
    throw ValidationError("contents: the buffer is MTLStorageModePrivate, which the host cannot reach");
  return _state->caller_memory ? _state->caller_memory : _state->allocation->host();
}
- (NSString*)label {
  const std::string label = State::get().label(*_state);
  return label.empty() ? nil : to_ns(label);
}
- (void)setLabel:(NSString*)label {
  State::get().set_label(*_state, to_string(label));
}
- (MTLStorageMode)storageMode {
  return static_cast<MTLStorageMode>(_state->info.storage_mode);
}
@end
