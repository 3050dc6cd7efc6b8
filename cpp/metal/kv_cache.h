// What a session keeps between chunks, and the rotations that depend on the position alone.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "buffers.h"

namespace metal_prefill::metal {

// K and V of every layer, [layer][position][kv_head][head_dim]. Grows by use, up to `max_positions`.
class KvCache {
 public:
  KvCache(const Device& device, const Config& config, KvType type, int max_positions);

  // Makes room for `positions`, keeping what is there. Throws DeviceError without a change.
  void reserve(int positions, CallCounters& counters);

  View keys(int layer) const { return {keys_.buffer, std::size_t(layer) * capacity_ * keys_.row_bytes}; }
  View values(int layer) const {
    return {values_.buffer, std::size_t(layer) * capacity_ * values_.row_bytes};
  }
  std::size_t bytes() const { return n_layers_ * capacity_ * (keys_.row_bytes + values_.row_bytes); }

 private:
  struct Half {
    id<MTLBuffer> buffer;
    std::size_t row_bytes;  // of one position in one layer
  };
  const Device& device_;
  const std::size_t n_layers_, max_capacity_;
  std::size_t capacity_ = 0;  // positions
  Half keys_, values_;
};

// cos and sin of every position and rotated pair, scaled by the magnitude that the model asks for:
// [position][rope_dim / 2] pairs. Computed on the host in double precision, once for all sessions, as far as
// they have come. Layers with the same frequencies share a table.
class RopeTables {
 public:
  RopeTables(const Device& device, const Model& model);

  // Throws DeviceError without a change.
  void reserve(int positions, CallCounters& counters);
  // The table of each layer, valid for the reserved positions however it grows later.
  std::vector<id<MTLBuffer>> by_layer() const;
  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Table {
    std::vector<float> frequencies;  // [rope_dim / 2] radians per position
    float magnitude;
    id<MTLBuffer> buffer;
  };
  const Device& device_;
  mutable std::mutex mutex_;
  std::vector<Table> tables_;
  std::vector<std::size_t> table_of_;  // by layer
  std::size_t capacity_ = 0;
  std::atomic<std::size_t> bytes_{0};  // stats() reads it while another thread uploads
};

}  // namespace metal_prefill::metal
