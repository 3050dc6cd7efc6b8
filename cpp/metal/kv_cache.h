// The K and V that a session keeps between chunks, and the rope tables, which depend only on the position.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "../rope.h"
#include "buffers.h"

namespace metal_prefill::metal {

// K and V of every layer, [layer][position][kv_head][head_dim]. Grows by use, up to `max_positions`.
class KvCache {
 public:
  KvCache(const Config& config, KvType type, int max_positions);

  // Makes room for `positions`, keeping what is there. Throws DeviceError without a change.
  void reserve(const Device& device, int positions);

  LayerCache layer(int layer) const {
    const std::size_t row = std::size_t(layer) * capacity_;
    return {view_of(keys_.buffer, BufferName::kKeys, row * keys_.row_bytes),
            view_of(values_.buffer, BufferName::kValues, row * values_.row_bytes)};
  }
  std::size_t bytes() const { return n_layers_ * capacity_ * (keys_.row_bytes + values_.row_bytes); }

 private:
  struct Half {
    id<MTLBuffer> buffer;
    std::size_t row_bytes;  // of one position in one layer
  };
  const std::size_t n_layers_, max_capacity_;
  std::size_t capacity_ = 0;  // positions
  Half keys_, values_;
};

// cos and sin of every position and rotated pair, scaled by the magnitude of the model:
// [position][rope_dim / 2] pairs. Computed on the host in double precision, once for all sessions, up to the
// largest position that any of them has reserved. Layers with the same frequencies share a table.
class RopeTables {
 public:
  explicit RopeTables(const Model& model);

  // Throws DeviceError without a change.
  void reserve(const Device& device, int positions);
  // The table of each layer, valid for the reserved positions however the tables grow later.
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
