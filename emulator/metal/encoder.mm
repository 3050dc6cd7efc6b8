// The common part of all encoders, and the blit encoder.
#include <initializer_list>

#include "classes.h"

using namespace metal_emulator;

@implementation EmulatorEncoder
- (instancetype)initWithCommandBuffer:(EmulatorCommandBuffer*)commandBuffer {
  if ((self = [super init])) _commandBuffer = commandBuffer;
  return self;
}
- (void)dealloc {
  if (!_ended) [_commandBuffer encoderEnded:NO];
}
- (void)endEncoding {
  require_open(_ended, "endEncoding");
  _ended = YES;
  [_commandBuffer encoderEnded:YES];
}
- (void)updateFence:(id<MTLFence>)fence {
  require_open(_ended, "updateFence");
  [_commandBuffer updateFence:fence];
}
- (void)waitForFence:(id<MTLFence>)fence {
  require_open(_ended, "waitForFence");
  [_commandBuffer waitForFence:fence];
}
@end

namespace {

// Throws ValidationError unless [offset, offset + size) is inside the buffer.
const std::shared_ptr<Allocation>& check_range(id<MTLBuffer> buffer, NSUInteger offset, NSUInteger size,
                                               const char* call, const char* what) {
  const auto& memory = checked_cast<EmulatorBuffer>(buffer, call)->_memory;
  const std::size_t length = memory->bytes;
  if (size == 0) throw ValidationError(std::string(call) + ": size is 0");
  if (offset > length || size > length - offset) {
    throw ValidationError(std::string(call) + ": " + what + " bytes " + std::to_string(offset) + " to " +
                          std::to_string(offset + size) + " of a buffer of " + std::to_string(length));
  }
  return memory;
}

// On macOS, offsets and sizes of copies and fills are multiples of 4 bytes.
void check_units(const char* call, std::initializer_list<NSUInteger> values) {
  constexpr NSUInteger kUnit = 4;
  for (const NSUInteger value : values)
    if (value % kUnit != 0)
      throw ValidationError(std::string(call) + ": " + std::to_string(value) + " is not a multiple of " +
                            std::to_string(kUnit) + " bytes");
}

}  // namespace

@implementation EmulatorBlitEncoder

- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  constexpr const char* kCall = "copyFromBuffer";
  require_open(_ended, kCall);
  const auto& from = check_range(source, sourceOffset, size, kCall, "source");
  const auto& to = check_range(destination, destinationOffset, size, kCall, "destination");
  check_units(kCall, {sourceOffset, destinationOffset, size});
  if (from == to && sourceOffset < destinationOffset + size && destinationOffset < sourceOffset + size) {
    throw ValidationError("copyFromBuffer: source and destination overlap");
  }
  Command command;
  command.kind = Command::Kind::kCopy;
  command.copy.from = {from, sourceOffset, {}};
  command.copy.to = {to, destinationOffset, {}};
  command.copy.bytes = size;
  [_commandBuffer retainUntilCompleted:source];
  [_commandBuffer retainUntilCompleted:destination];
  [_commandBuffer encode:std::move(command)];
}

- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  require_open(_ended, "fillBuffer");
  const auto& to = check_range(buffer, range.location, range.length, "fillBuffer", "range:");
  check_units("fillBuffer", {range.location, range.length});
  Command command;
  command.kind = Command::Kind::kFill;
  command.fill.to = {to, range.location, {}};
  command.fill.bytes = range.length;
  command.fill.value = value;
  [_commandBuffer retainUntilCompleted:buffer];
  [_commandBuffer encode:std::move(command)];
}
@end
