// Layout of K and V in a page.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../../cache/pages.h"
#include "../../engine/engine.h"

namespace metal_prefill::metal {

// [place of layers with attention][keys | values], with keys as [kPagePositions][n_kv_heads][key_dim] and
// values the same with value_dim, all elements of kv_type. The dimensions are those of a model that fits the
// kernels.
struct PageLayout {
  PageLayout(const Config& config, KvType type)
      : element(type == KvType::kF16 ? 2 : 4),
        key_row(std::size_t(config.n_kv_heads) * std::size_t(config.key_dim) * element),
        value_row(std::size_t(config.n_kv_heads) * std::size_t(config.value_dim) * element),
        places(attention_places(config)),
        bytes(std::max(
            std::size_t(places.empty() ? 0 : places.back() + 1) * kPagePositions * (key_row + value_row),
            PageStore::kLeastPage)) {}

  std::size_t keys(int layer) const {
    return std::size_t(places[std::size_t(layer)]) * std::size_t(kPagePositions) * (key_row + value_row);
  }
  std::size_t values(int layer) const { return keys(layer) + std::size_t(kPagePositions) * key_row; }

  std::size_t element;             // bytes
  std::size_t key_row, value_row;  // bytes of one position
  std::vector<int> places;         // of each layer: see attention_places
  std::size_t bytes;               // of a page
};

}  // namespace metal_prefill::metal
