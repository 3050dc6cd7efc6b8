// A pool's slots of one size on the GPU: pages of K and V, or states.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>

#include "../../cache/pages.h"
#include "device.h"
#include "residency.h"

namespace metal_prefill::metal {

// All slots are in one buffer, so that a kernel finds a slot by its number. When more are needed, a larger
// buffer replaces the old one, with its contents.
class Slots : public PageStore {
 public:
  // With `poison`, slots are filled with NaN whenever they are taken, which reveals kernels that read
  // unwritten rows. `device` and `residency` must outlive the slots.
  Slots(const Device& device, Residency& residency, std::string label, std::string what,
        std::size_t slot_bytes, bool poison)
      : device_(device),
        label_(std::move(label)),
        what_(std::move(what)),
        residency_(residency),
        slot_bytes_(slot_bytes),
        poison_(poison) {}

  std::size_t page_bytes() const override { return slot_bytes_; }
  std::size_t most_bytes() const override { return device_.mtl().maxBufferLength; }
  void grow(std::size_t slots) override;
  void copy(PageId from, PageId to, int positions) override;
  void taken(PageId slot) override;

  // The buffer belongs to the holder: it does not move, and no other thread accesses it. Command buffers that
  // an earlier holder left on the GPU may access it, so that the passes of one engine follow each other.
  class Hold {
   public:
    explicit Hold(Slots& slots) : slots_(slots), lock_(slots.mutex_) {}
    // Whether there are such command buffers. Encoders of passes wait for them by the fence.
    bool is_in_use() const { return slots_.left_; }
    // Waits for them.
    void settle() { slots_.settle(); }
    // `last` was sent to the GPU after all others, and may use the slots after the hold.
    void sent(id<MTLCommandBuffer> last) { slots_.left_ = last; }
    // The GPU has finished it, and all command buffers that were sent before.
    void finished(id<MTLCommandBuffer> sent) {
      if (slots_.left_ == sent) slots_.left_ = nil;
    }
    // A place in the first slot.
    View view(BufferName name, std::size_t offset) const { return view_of(slots_.buffer_, name, offset); }

   private:
    Slots& slots_;
    const std::scoped_lock<std::mutex> lock_;
  };

 protected:
  // Copies pieces of the slots, one after the other, to or from the memory of the host. `pieces` returns
  // them; it is called while the buffer does not move.
  template <typename Pieces>
  void read(const Pieces& pieces, void* out) {
    const AutoreleasePool pool;
    const std::scoped_lock lock(mutex_);
    settle();
    device_.download(pieces(), out);
  }
  template <typename Pieces>
  void write(const Pieces& pieces, const void* in) {
    const AutoreleasePool pool;
    const std::scoped_lock lock(mutex_);
    settle();
    device_.upload(pieces(), in);
  }
  // A place in a slot; for `pieces`.
  View view_in(PageId slot, BufferName name, std::size_t offset) const {
    return view_of(buffer_, name, slot * slot_bytes_ + offset);
  }

 private:
  // Waits for command buffers in flight: blits do not wait for the fence.
  void settle();

  const Device& device_;
  std::mutex mutex_;  // guards the buffer and its contents
  id<MTLBuffer> buffer_;
  const std::string label_;  // of the buffer
  const std::string what_;   // in messages
  Residency& residency_;
  const std::size_t slot_bytes_;
  const bool poison_;
  id<MTLCommandBuffer> left_;  // on the GPU by a holder: the last one; null: none
};

}  // namespace metal_prefill::metal
