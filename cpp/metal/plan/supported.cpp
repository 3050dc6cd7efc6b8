#include "supported.h"

#include <algorithm>
#include <string>

#include "kernel_key.h"
#include "ops.h"
#include "padding.h"

namespace metal_prefill::metal {

void check_supported(const Model& model, const EngineOptions& options) {
  const Config& c = model.config;
  const auto find = [&](const auto& holds) {
    return std::find_if(model.layers.begin(), model.layers.end(), holds);
  };
  const auto any = [&](const auto& holds) { return find(holds) != model.layers.end(); };
  const auto mixed =
      find([](const LayerWeights& w) { return w.gate_experts && w.gate_experts.type != w.up_experts.type; });
  const auto types = [&] {
    return mixed == model.layers.end() ? std::string()
                                       : std::string(type_info(mixed->gate_experts.type).name) + " and " +
                                             std::string(type_info(mixed->up_experts.type).name);
  };
  int odd_head = 0;
  for (int layer = 0; layer < c.n_layers; ++layer)
    if (const int dim = c.of_layer(layer).key_dim; dim % kItem != 0) odd_head = dim;
  const bool norms_heads = c.value_norm || any([](const LayerWeights& w) { return w.q_norm || w.k_norm; });
  const int head = std::max(c.key_dim, c.value_dim);

  const std::string multiple = "; it takes multiples of " + std::to_string(kItem);
  const auto most = [](int n) { return "; it takes at most " + std::to_string(n); };
  const struct {
    bool applies;
    std::string what;
  } refusals[] = {
      {options.kv_type == KvType::kQ8_0, "a KV cache in q8_0; it takes f16 and f32"},
      {head > kMostHeadDim,
       "attention heads of " + std::to_string(head) + " dimensions" + most(kMostHeadDim)},
      {odd_head > 0 && (norms_heads || !c.layer_head_dim.empty()),
       "normalized or differing heads of " + std::to_string(odd_head) + " dimensions" + multiple},
      {c.embedding_dim % kItem != 0,
       "projected embeddings of " + std::to_string(c.embedding_dim) + " values" + multiple},
      {model.embedding_norm && (c.causal || c.norm_kind != NormKind::kLayer),
       "norms of embeddings in decoders, or other than LayerNorm"},
      {c.max_alibi_bias > 0 && c.causal, "ALiBi in decoders"},
      {c.causal && any([](const LayerWeights& w) { return bool(w.sinks); }), "attention sinks in decoders"},
      {any([&](const LayerWeights& w) {
         return w.layer_scale &&
                (c.parallel || !(w.per_layer_gate ? w.per_layer_post_norm : w.post_ffn_norm));
       }),
       "scales of layers whose last block has no norm of its output"},
      {c.scan_key_dim > ops::kMostScanRows,
       "states of " + std::to_string(c.scan_key_dim) + " rows" + most(ops::kMostScanRows)},
      {c.scan_dim() % kItem != 0, "a recurrence of " + std::to_string(c.scan_dim()) + " values" + multiple},
      {c.n_experts > MOST_EXPERTS, std::to_string(c.n_experts) + " experts" + most(MOST_EXPERTS)},
      {mixed != model.layers.end(),
       "gates and ups of experts of the types " + types() + "; it takes one type"},
      {c.norm_kind == NormKind::kLayer && any([](const LayerWeights& w) { return w.router && w.ffn_norm; }),
       "experts after a LayerNorm; it takes RMSNorm, or none"},
  };
  for (const auto& [applies, what] : refusals)
    if (applies)
      throw UnsupportedModelError("the Metal engine does not support " + what + ": use device='cpu'");
}

}  // namespace metal_prefill::metal
