// Slots of equal size of a pool on the GPU: pages of K and V, or states.
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

// Synchronizes the use of an engine's slots, both pages and states. Only the holder of the mutex accesses and
// replaces their buffers on the host. Command buffers of an earlier holder may still access them on the GPU,
// so passes of one engine run in order.
struct SlotUse {
  std::mutex mutex;
  // The last of these command buffers; null if there is none. Encoders of passes wait for it by the fence.
  id<MTLCommandBuffer> left;

  // Waits for `left`: blits do not wait for the fence.
  void settle();
};

// All slots are in one buffer, so that a kernel finds a slot by its number. When more are needed, the
// contents move to a larger buffer.
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

  // A range of bytes of a slot.
  struct Range {
    PageId slot;
    std::size_t offset, bytes;
  };
  // Copies ranges in order to or from contiguous memory of the host.
  void read(std::span<const Range> ranges, void* out);
  void write(std::span<const Range> ranges, const void* in);

  // A location in the first slot, for the holder of the mutex.
  View view(BufferName name, std::size_t offset) const { return view_of(buffer_, name, offset); }

 private:
  std::vector<Device::Piece> pieces(std::span<const Range> ranges) const;

  const Device& device_;
  Residency& residency_;
  SlotUse& use_;
  id<MTLBuffer> buffer_;
  const std::string label_;  // label of the buffer
  const std::string what_;   // name in messages
  const std::size_t slot_bytes_;
  const bool poison_;
};

}  // namespace metal_prefill::metal
