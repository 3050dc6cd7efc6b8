// A pool's slots of one size on the GPU: pages of K and V, or states.
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "../../cache/pages.h"
#include "device.h"
#include "residency.h"

namespace metal_prefill::metal {

// The use of an engine's slots, of pages and of states together. Their buffers belong to the holder of the
// mutex: they do not move, and no other thread accesses them. Command buffers that an earlier holder left on
// the GPU may access them, so that the passes of one engine follow each other.
struct SlotUse {
  std::mutex mutex;
  // The last of these command buffers; null: there is none. Encoders of passes wait for them by the fence.
  id<MTLCommandBuffer> left;

  // Waits for them: blits do not wait for the fence.
  void settle();
};

// All slots are in one buffer, so that a kernel finds a slot by its number. When more are needed, a larger
// buffer replaces the old one, with its contents.
class Slots final : public PageStore {
 public:
  // With `poison`, slots are filled with NaN whenever they are taken, which reveals kernels that read
  // unwritten rows. `device`, `residency` and `use` must outlive the slots.
  Slots(const Device& device, Residency& residency, SlotUse& use, std::string label, std::string what,
        std::size_t slot_bytes, bool poison)
      : device_(device),
        residency_(residency),
        use_(use),
        label_(std::move(label)),
        what_(std::move(what)),
        slot_bytes_(slot_bytes),
        poison_(poison) {}

  std::size_t page_bytes() const override { return slot_bytes_; }
  std::size_t most_bytes() const override { return device_.mtl().maxBufferLength; }
  void grow(std::size_t slots) override;
  void copy(PageId from, PageId to, int positions) override;
  void taken(PageId slot) override;

  // Bytes of a slot.
  struct Range {
    PageId slot;
    std::size_t offset, bytes;
  };
  // Copies ranges, one after the other, to or from the memory of the host.
  void read(std::span<const Range> ranges, void* out);
  void write(std::span<const Range> ranges, const void* in);

  // A place in the first slot, for the holder of the mutex.
  View view(BufferName name, std::size_t offset) const { return view_of(buffer_, name, offset); }

 private:
  std::vector<Device::Piece> pieces(std::span<const Range> ranges) const;

  const Device& device_;
  Residency& residency_;
  SlotUse& use_;
  id<MTLBuffer> buffer_;
  const std::string label_;  // of the buffer
  const std::string what_;   // in messages
  const std::size_t slot_bytes_;
  const bool poison_;
};

}  // namespace metal_prefill::metal
