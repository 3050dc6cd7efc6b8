// Keys and values of one session, in the layouts that the attention kernels read.
#pragma once

#include <cstddef>

#include "../engine.h"
#include "buffer.h"
#include "kernels.h"

namespace metal_prefill::cpu {

// Per layer and key-value head: keys [position / 16][key_dim][16], then values [position][value_stride]. One
// buffer holds them all, so that it can lie on huge pages. Grows by use.
class KvCache {
 public:
  KvCache(const Config& config, KvType type, int max_context);

  // Room for `positions` in all; contents are kept. Throws DeviceError without a change.
  void reserve(int positions);
  std::size_t bytes() const;

  bool half() const { return type_ == KvType::kF16; }
  int value_stride() const { return value_stride_; }
  std::byte* keys(int layer, int head) const;
  std::byte* values(int layer, int head) const;
  // Where one position's key starts: its lane within the transposed block is position % 16.
  std::byte* key_block(int layer, int head, int position) const;
  std::byte* value_row(int layer, int head, int position) const;

  // Canonical layout [position][head][dim], elements as stored.
  void read(int layer, bool values, int positions, std::byte* out) const;
  void write(int layer, bool values, int positions, const std::byte* in);

 private:
  std::size_t element() const { return half() ? 2 : 4; }
  std::size_t key_head_bytes(int capacity) const;
  std::size_t value_head_bytes(int capacity) const;
  // Calls copy(rows, columns, canonical, own) for each piece of the cache that both layouts hold as a matrix
  // of positions and dimensions.
  template <typename Copy>
  void each_piece(int layer, bool values, int positions, std::byte* canonical, Copy copy) const;

  const KvType type_;
  const int n_layers_, n_heads_, key_dim_, value_dim_, value_stride_, max_capacity_;
  int capacity_ = 0;  // positions, a multiple of kKeySpan
  Buffer data_;
};

}  // namespace metal_prefill::cpu
