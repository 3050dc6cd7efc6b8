#include "slots.h"

#include "waits.h"

namespace metal_prefill::metal {

namespace {

// Runs the commands encoded by `record`, and waits for them. `what` names them in errors.
template <class Record>
void blit(const Device& device, const std::string& what, const Record& record) {
  id<MTLCommandBuffer> commands = device.command_buffer(what, References::kRetained);
  id<MTLBlitCommandEncoder> encoder = [commands blitCommandEncoder];
  record(encoder);
  [encoder endEncoding];
  device.run(commands);
}

}  // namespace

void SlotUse::settle() {
  wait_for(left, Interrupts::kIgnored);  // a failure is reported by the pass that sent it
  left = nil;
}

std::vector<Device::Piece> Slots::pieces(std::span<const Range> ranges) const {
  std::vector<Device::Piece> pieces;
  for (const Range& range : ranges)
    pieces.push_back({buffer_, range.slot * slot_bytes_ + range.offset, range.bytes});
  return pieces;
}

void Slots::read(std::span<const Range> ranges, void* out) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(use_.mutex);
  use_.settle();
  device_.download(pieces(ranges), out);
}

void Slots::write(std::span<const Range> ranges, const void* in) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(use_.mutex);
  use_.settle();
  device_.upload(pieces(ranges), in);
}

void Slots::grow(std::size_t slots) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(use_.mutex);
  use_.settle();
  id<MTLBuffer> grown = device_.allocate(label_, slots * slot_bytes_, Access::kGpu);
  if (buffer_)
    blit(device_, "the growth of " + what_, [&](id<MTLBlitCommandEncoder> encoder) {
      [encoder copyFromBuffer:buffer_ sourceOffset:0 toBuffer:grown destinationOffset:0 size:buffer_.length];
    });
  residency_.remove(buffer_);
  residency_.add(grown);
  buffer_ = grown;
}

void Slots::copy(PageId from, PageId to, int) {
  const AutoreleasePool pool;
  const std::scoped_lock lock(use_.mutex);
  use_.settle();
  // Copies the whole slot: rows after the kept ones are meaningless in both.
  blit(device_, "a copy of a slot of " + what_, [&](id<MTLBlitCommandEncoder> encoder) {
    [encoder copyFromBuffer:buffer_
               sourceOffset:from * slot_bytes_
                   toBuffer:buffer_
          destinationOffset:to * slot_bytes_
                       size:slot_bytes_];
  });
}

void Slots::taken(PageId slot) {
  if (!poison_) return;
  const AutoreleasePool pool;
  const std::scoped_lock lock(use_.mutex);
  use_.settle();
  blit(device_, "the poison of a slot of " + what_, [&](id<MTLBlitCommandEncoder> encoder) {
    [encoder fillBuffer:buffer_ range:NSMakeRange(slot * slot_bytes_, slot_bytes_) value:0xff];
  });
}

}  // namespace metal_prefill::metal
