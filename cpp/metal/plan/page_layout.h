// Layout of K and V in a page.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../../cache/pages.h"
#include "../../engine/engine.h"

namespace metal_prefill::metal {

// [layers with their own keys][keys | values], with keys as [kPagePositions][n_kv_heads][key_dim] and values
// the same with value_dim, all elements of kv_type. The dimensions are those of each layer of a model that
// fits the kernels.
struct PageLayout {
  PageLayout(const Config& config, KvType type) : element(type == KvType::kF16 ? 2 : 4) {
    const std::vector<int> place_of = attention_places(config);
    const LayerConfigs configs(config);
    std::vector<Place> places;
    std::size_t end = 0;
    for (int layer = 0; layer < config.n_layers; ++layer) {
      const std::size_t place = std::size_t(std::max(place_of[std::size_t(layer)], 0));
      if (place == places.size() && config.caches(layer)) {
        const Config& own = configs[layer];
        const auto row = [&](int dim) { return std::size_t(own.n_kv_heads) * std::size_t(dim) * element; };
        places.push_back(
            {end, end + kPagePositions * row(own.key_dim), row(own.key_dim), row(own.value_dim)});
        end = places.back().values + kPagePositions * places.back().value_row;
      }
      layers.push_back(place < places.size() ? places[place] : Place{});
    }
    bytes = std::max(end, PageStore::kLeastPage);
  }

  // For a layer without attention, the place of another layer or an empty one.
  struct Place {
    std::size_t keys = 0, values = 0;        // byte offsets in a page
    std::size_t key_row = 0, value_row = 0;  // bytes of one position
  };
  const Place& operator[](int layer) const { return layers[std::size_t(layer)]; }

  std::size_t element;        // bytes
  std::vector<Place> layers;  // a layer that reads another layer's keys and values has the same place
  std::size_t bytes = 0;      // of a page
};

}  // namespace metal_prefill::metal
