// Tables of rotary embedding, which depend on the position alone.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "../../model/rope.h"
#include "buffers.h"

namespace metal_prefill::metal {

// cos and sin of every position and rotated pair, scaled by the magnitude of the model:
// [position][rope_dim / 2] pairs. Computed on the host in double precision, once for all sessions, up to the
// largest position that any of them has reserved. Layers with the same frequencies share a table.
class RopeTables {
 public:
  explicit RopeTables(const Model& model);

  // Extends the tables to `positions`. Throws DeviceError without a change.
  void reserve(const Device& device, int positions);
  // The table of each layer. Stays valid for the reserved positions when the tables grow later.
  using ByLayer = std::shared_ptr<const std::vector<id<MTLBuffer>>>;
  ByLayer by_layer() const;
  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  const Ropes ropes_;
  mutable std::mutex mutex_;
  ByLayer by_layer_;
  std::size_t capacity_ = 0;
  std::atomic<std::size_t> bytes_{0};  // stats() reads it while another thread uploads
};

}  // namespace metal_prefill::metal
