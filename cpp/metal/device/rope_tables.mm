#include "rope_tables.h"

#include <algorithm>

namespace metal_prefill::metal {

namespace {

constexpr std::size_t kFirstCapacity = 64;  // positions

}  // namespace

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
    if (values.empty()) values.resize(2);  // rope_dim may be 0, but a buffer may not be empty
    const std::size_t bytes = values.size() * sizeof(float);
    id<MTLBuffer> buffer = device.allocate(traits_of(BufferName::kRopeTable).label, bytes, Access::kGpu);
    device.upload({{{buffer, 0, bytes}}}, values.data());
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
