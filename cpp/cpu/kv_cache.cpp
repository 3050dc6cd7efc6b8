#include "kv_cache.h"

#include <algorithm>
#include <cstring>

namespace metal_prefill::cpu {

KvCache::KvCache(const Config& config, KvType type, int max_context)
    : type_(type),
      n_heads_(config.n_kv_heads),
      key_dim_(config.key_dim),
      value_dim_(config.value_dim),
      value_stride_(int(round_up(std::size_t(config.value_dim), kFloatPad))),
      max_capacity_(int(round_up(std::size_t(max_context), kKeySpan))),
      layers_(std::size_t(config.n_layers)) {}

std::size_t KvCache::key_head_bytes(int capacity) const {
  return std::size_t(capacity) * std::size_t(key_dim_) * element();
}

std::size_t KvCache::value_head_bytes(int capacity) const {
  return std::size_t(capacity) * std::size_t(value_stride_) * element();
}

void KvCache::reserve(int positions) {
  if (positions <= capacity_) return;
  // Half as much again: growing token by token copies each position a constant number of times.
  const int wanted = std::max(positions, capacity_ + capacity_ / 2);
  const int capacity = std::min(max_capacity_, int(round_up(std::size_t(wanted), kKeySpan)));
  std::vector<Layer> grown(layers_.size());
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    grown[l].keys = Buffer(std::size_t(n_heads_) * key_head_bytes(capacity), "the KV cache");
    grown[l].values = Buffer(std::size_t(n_heads_) * value_head_bytes(capacity), "the KV cache");
    if (capacity_ == 0) continue;
    for (int head = 0; head < n_heads_; ++head) {
      const std::size_t h = std::size_t(head);
      std::memcpy(grown[l].keys.data() + h * key_head_bytes(capacity),
                  layers_[l].keys.data() + h * key_head_bytes(capacity_), key_head_bytes(capacity_));
      std::memcpy(grown[l].values.data() + h * value_head_bytes(capacity),
                  layers_[l].values.data() + h * value_head_bytes(capacity_), value_head_bytes(capacity_));
    }
  }
  layers_ = std::move(grown);
  capacity_ = capacity;
}

std::size_t KvCache::bytes() const {
  return layers_.size() * std::size_t(n_heads_) * (key_head_bytes(capacity_) + value_head_bytes(capacity_));
}

std::byte* KvCache::keys(int layer, int head) const {
  return layers_[std::size_t(layer)].keys.data() + std::size_t(head) * key_head_bytes(capacity_);
}

std::byte* KvCache::values(int layer, int head) const {
  return layers_[std::size_t(layer)].values.data() + std::size_t(head) * value_head_bytes(capacity_);
}

std::byte* KvCache::key_block(int layer, int head, int position) const {
  return keys(layer, head) +
         std::size_t(position / kKeyBlock * kKeyBlock) * std::size_t(key_dim_) * element();
}

std::byte* KvCache::value_row(int layer, int head, int position) const {
  return values(layer, head) + std::size_t(position) * std::size_t(value_stride_) * element();
}

std::byte* KvCache::element_at(int layer, bool values, int head, int position, int d) const {
  if (values) return value_row(layer, head, position) + std::size_t(d) * element();
  return key_block(layer, head, position) + std::size_t(d * kKeyBlock + position % kKeyBlock) * element();
}

void KvCache::read(int layer, bool values, int positions, std::byte* out) const {
  for (int position = 0; position < positions; ++position)
    for (int head = 0; head < n_heads_; ++head)
      for (int d = 0; d < (values ? value_dim_ : key_dim_); ++d, out += element())
        std::memcpy(out, element_at(layer, values, head, position, d), element());
}

void KvCache::write(int layer, bool values, int positions, const std::byte* in) {
  for (int position = 0; position < positions; ++position)
    for (int head = 0; head < n_heads_; ++head)
      for (int d = 0; d < (values ? value_dim_ : key_dim_); ++d, in += element())
        std::memcpy(element_at(layer, values, head, position, d), in, element());
}

}  // namespace metal_prefill::cpu
