#include "kv_cache.h"

#include <algorithm>
#include <cstring>

#include "../rounding.h"

namespace metal_prefill::metal {

namespace {

// attention_prefill reads keys in blocks of 8; the last block may extend beyond the last position.
constexpr std::size_t kBlock = 8;
constexpr std::size_t kFirstCapacity = 64;

}  // namespace

KvCache::KvCache(const Config& c, KvType type, int max_positions)
    : n_layers_(std::size_t(c.n_layers)), max_capacity_(round_up(std::size_t(max_positions), kBlock)) {
  const std::size_t element = type == KvType::kF16 ? 2 : 4;
  keys_ = {nil, std::size_t(c.n_kv_heads) * std::size_t(c.key_dim) * element};
  values_ = {nil, std::size_t(c.n_kv_heads) * std::size_t(c.value_dim) * element};
}

void KvCache::reserve(const Device& device, int positions) {
  if (std::size_t(positions) <= capacity_) return;
  const std::size_t wanted = std::max({std::size_t(positions), 2 * capacity_, kFirstCapacity});
  const std::size_t capacity = std::min(round_up(wanted, kBlock), max_capacity_);
  const auto allocate = [&](BufferName name, const Half& half) {
    return device.allocate(traits_of(name).label, n_layers_ * capacity * half.row_bytes, Access::kGpu);
  };
  id<MTLBuffer> keys = allocate(BufferName::kKeys, keys_);
  id<MTLBuffer> values = allocate(BufferName::kValues, values_);
  if (capacity_ > 0) {
    id<MTLCommandBuffer> commands = device.command_buffer("the growth of the KV cache");
    id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
    const auto copy = [&](const Half& from, id<MTLBuffer> to) {
      for (std::size_t layer = 0; layer < n_layers_; ++layer)
        [blit copyFromBuffer:from.buffer
                 sourceOffset:layer * capacity_ * from.row_bytes
                     toBuffer:to
            destinationOffset:layer * capacity * from.row_bytes
                         size:capacity_ * from.row_bytes];
    };
    copy(keys_, keys);
    copy(values_, values);
    [blit endEncoding];
    device.run(commands);
  }
  keys_.buffer = keys;
  values_.buffer = values;
  capacity_ = capacity;
}

RopeTables::RopeTables(const Model& model) : ropes_(model) {}

void RopeTables::reserve(const Device& device, int positions) {
  const std::scoped_lock lock(mutex_);
  if (std::size_t(positions) <= capacity_) return;
  const std::size_t capacity = std::max({std::size_t(positions), 2 * capacity_, kFirstCapacity});
  std::vector<id<MTLBuffer>> grown;
  std::size_t grown_bytes = 0;
  for (const Rope& rope : ropes_.ropes) {
    std::vector<float> values;
    for (std::size_t position = 0; position < capacity; ++position) {
      for (std::size_t pair = 0; pair < rope.frequencies.size(); ++pair) {
        const Rotation turn = rope.at(position, pair);
        values.push_back(turn.cos);
        values.push_back(turn.sin);
      }
    }
    if (values.empty()) values.resize(2);  // rope_dim may be 0, a buffer's length may not
    const std::size_t bytes = values.size() * sizeof(float);
    id<MTLBuffer> buffer = device.allocate(traits_of(BufferName::kRopeTable).label, bytes, Access::kGpu);
    device.upload(view_of(buffer, BufferName::kRopeTable), values.data(), bytes);
    grown.push_back(buffer);
    grown_bytes += bytes;
  }
  auto by_layer = std::make_shared<std::vector<id<MTLBuffer>>>();
  for (const std::size_t rope : ropes_.of_layer) by_layer->push_back(grown[rope]);
  by_layer_ = std::move(by_layer);
  capacity_ = capacity;
  bytes_.store(grown_bytes, std::memory_order_relaxed);
}

RopeTables::ByLayer RopeTables::by_layer() const {
  const std::scoped_lock lock(mutex_);
  return by_layer_;
}

}  // namespace metal_prefill::metal
