#include "slots.h"

namespace metal_prefill::metal {

void Slots::settle() {
  [left_ waitUntilCompleted];  // a failure is reported by the pass that sent it
  left_ = nil;
}

void Slots::grow(std::size_t slots) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  id<MTLBuffer> grown = device_.allocate(label_, slots * slot_bytes_, Access::kGpu);
  if (buffer_) {
    id<MTLCommandBuffer> commands = device_.command_buffer("the growth of " + what_, References::kRetained);
    id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
    [blit copyFromBuffer:buffer_ sourceOffset:0 toBuffer:grown destinationOffset:0 size:buffer_.length];
    [blit endEncoding];
    device_.run(commands);
  }
  residency_.remove(buffer_);
  residency_.add(grown);
  buffer_ = grown;
}

void Slots::copy(PageId from, PageId to, int) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  // The whole slot: rows after the kept ones are meaningless in either.
  id<MTLCommandBuffer> commands =
      device_.command_buffer("a copy of a slot of " + what_, References::kRetained);
  id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
  [blit copyFromBuffer:buffer_
           sourceOffset:from * slot_bytes_
               toBuffer:buffer_
      destinationOffset:to * slot_bytes_
                   size:slot_bytes_];
  [blit endEncoding];
  device_.run(commands);
}

void Slots::taken(PageId slot) {
  if (!poison_) return;
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  settle();
  id<MTLCommandBuffer> commands =
      device_.command_buffer("the poison of a slot of " + what_, References::kRetained);
  id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
  [blit fillBuffer:buffer_ range:NSMakeRange(slot * slot_bytes_, slot_bytes_) value:0xff];
  [blit endEncoding];
  device_.run(commands);
}

}  // namespace metal_prefill::metal
