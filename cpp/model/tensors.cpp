#include "tensors.h"

#include <stdexcept>

#include "../../shaders/position_bias.h"

namespace metal_prefill {

Groups groups_of(Extent extent, const Config& c) {
  switch (extent) {
    case Extent::kOne:
      return {1, 1};
    case Extent::kVocabulary:
      return {1, c.vocab_size};
    case Extent::kContext:
      return {1, c.context_length};
    case Extent::kTokenTypes:
      return {1, c.token_types};
    case Extent::kDim:
      return {1, c.dim};
    case Extent::kEmbedding:
      return {1, c.embedding_width()};
    case Extent::kFfn:
      return {1, c.ffn_dim};
    case Extent::kExperts:
      return {1, c.n_experts};
    case Extent::kExpertFfn:
      return {1, c.expert_dim};
    case Extent::kExpertsFfn:
      return {c.n_experts, c.expert_dim};
    case Extent::kExpertsDim:
      return {c.n_experts, c.dim};
    case Extent::kSharedFfn:
      return {1, c.shared_dim};
    case Extent::kHeads:
      return {1, c.n_heads};
    case Extent::kBiasBuckets:
      return {1, BIAS_BUCKETS};
    case Extent::kRelativeRows:
      return {1, c.relative_rows};
    case Extent::kDistances:
      return {2, c.context_length};
    case Extent::kQueries:
      return {c.query_gate ? 2 * c.n_heads : c.n_heads, c.key_dim};
    case Extent::kKeys:
      return {c.n_kv_heads, c.key_dim};
    case Extent::kValues:
      return {c.n_kv_heads, c.value_dim};
    case Extent::kAttention:
      return {c.n_heads, c.value_dim};
    case Extent::kQueryNorm:
      return {c.qk_norm_place == QkNormPlace::kRows ? c.n_heads : 1, c.key_dim};
    case Extent::kKeyNorm:
      return {c.qk_norm_place == QkNormPlace::kRows ? c.n_kv_heads : 1, c.key_dim};
    case Extent::kRotatedPairs:
      return {1, c.rope_dim / 2};
    case Extent::kChannels:
      return {1, c.dim};
    case Extent::kGatedChannels:
      return {3, c.dim};
    case Extent::kTaps:
      return {1, c.conv_taps};
    case Extent::kScanProjected:
      return {1, c.recurrent_in_dim(LayerKind::kStateSpace)};
    case Extent::kScanChannels:
      return {1, c.scan_channels()};
    case Extent::kScanDim:
      return {1, c.scan_dim()};
    case Extent::kScanHeads:
      return {1, c.scan_heads};
    case Extent::kScanValue:
      return {1, c.scan_value_dim};
    case Extent::kScanGroups:
      return {1, c.scan_groups};
    case Extent::kScanGroup:
      return {1, c.scan_groups > 0 ? c.scan_dim() / c.scan_groups : 0};
    case Extent::kLayerInput:
      return {1, c.per_layer_dim};
    case Extent::kLayerInputs:
      return {c.n_layers, c.per_layer_dim};
  }
  throw std::logic_error("not an extent");
}

const Tensor& conv_filter(const LayerWeights& layer) {
  return layer.conv ? layer.conv : layer.scan_conv;
}

bool has_rows_of(LayersOf layers, const Config& config, int layer) {
  const LayerKind kind = config.kind(layer);
  const FeedForwardKind feed_forward = config.feed_forward(layer);
  switch (layers) {
    case LayersOf::kEvery:
      return true;
    case LayersOf::kAttention:
      return has_attention(kind);
    case LayersOf::kCache:
      return config.caches(layer);
    case LayersOf::kShortConv:
      return kind == LayerKind::kShortConv;
    case LayersOf::kRecurrence:
      return has_matrix_state(kind);
    case LayersOf::kStateSpace:
      return has_state_space(kind);
    case LayersOf::kGatedDelta:
      return kind == LayerKind::kGatedDelta;
    case LayersOf::kDense:
      return feed_forward == FeedForwardKind::kDense;
    case LayersOf::kExperts:
      return feed_forward == FeedForwardKind::kExperts;
    case LayersOf::kSharedExpert:
      return feed_forward == FeedForwardKind::kExperts && config.shared_dim > 0;
  }
  throw std::logic_error("not a kind of layer");
}

Tensor* find_tensor(Model& model, std::string_view role, int layer) {
  if (layer < 0) {
    for (const auto& [row, member] : kModelTensors)
      if (row.role == role) return &(model.*member);
  } else if (std::size_t(layer) < model.layers.size()) {
    for (const auto& [row, layers, member] : kLayerTensors)
      if (row.role == role) return &(model.layers[std::size_t(layer)].*member);
  }
  return nullptr;
}

}  // namespace metal_prefill
