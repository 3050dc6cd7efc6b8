// How a model's weights and a chunk's buffers are laid out for the forward pass, and which kernels it can
// need.
#include <algorithm>
#include <cmath>

#include "../rounding.h"
#include "../tensors.h"
#include "forward_pass.h"

namespace metal_prefill::metal {

namespace {

bool all_projections_are_q4_0(const Model& model) {
  return std::all_of(model.layers.begin(), model.layers.end(), [](const LayerWeights& w) {
    return std::all_of(std::begin(kLayerTensors), std::end(kLayerTensors), [&](const LayerTensor& tensor) {
      return tensor.row.kind != TensorKind::kMatrix || (w.*tensor.member).type == TensorType::kQ4_0;
    });
  });
}

// Buffers for more than a few tokens hold a multiple of 32, so that prompts of nearly the same length share
// them.
std::size_t buffered_tokens(int tokens) {
  return std::size_t(tokens <= 8 ? tokens : round_up(tokens, 32));
}

}  // namespace

ForwardPass::ForwardPass(const Device& device, const Model& model, const EngineOptions& options)
    : config_(model.config),
      tuning_(device.tuning()),
      options_(options),
      few_tokens_(all_projections_are_q4_0(model) ? device.tuning().few_tokens : 1),
      cache_shape_{options.kv_type, std::max(model.config.key_dim, model.config.value_dim)},
      weights_(device, model),
      qkv_dim_(config_.n_heads * config_.key_dim +
               config_.n_kv_heads * (config_.key_dim + config_.value_dim)),
      att_dim_(config_.n_heads * config_.value_dim),
      activation_(config_.activation == Activation::kGelu ? ACTIVATION_GELU : ACTIVATION_SILU) {
  static_cast<void>(cache_shape_.decode_size());  // throws for heads that are too large
  embedding_ = projection(model.token_embedding);
  output_ = projection(model.output);
  output_norm_ = weights_.view(model.output_norm);
  for (const LayerWeights& w : model.layers) layers_.push_back(layer_of(w));
}

ForwardPass::Layer ForwardPass::layer_of(const LayerWeights& w) {
  const auto optional = [&](const Tensor& t) { return t ? weights_.view(t) : View{}; };
  Layer layer = {.attn_norm = weights_.view(w.attn_norm),
                 .ffn_norm = weights_.view(w.ffn_norm),
                 .post_attn_norm = optional(w.post_attn_norm),
                 .post_ffn_norm = optional(w.post_ffn_norm),
                 .bias = {},
                 .q_norm = optional(w.q_norm),
                 .k_norm = optional(w.k_norm),
                 .qkv = merge({&w.wq, &w.wk, &w.wv}),
                 .gate_up = merge({&w.w_gate, &w.w_up}),
                 .wo = projection(w.wo),
                 .w_down = projection(w.w_down)};
  if (w.bq || w.bk || w.bv)
    layer.bias =
        weights_.concatenate("qkv_bias", {{{&w.bq, w.wq.rows}, {&w.bk, w.wk.rows}, {&w.bv, w.wv.rows}}});
  return layer;
}

Projection ForwardPass::projection(const Tensor& tensor) const {
  const Tensor* alone[] = {&tensor};
  const WeightBuffers::Stack stack = *weights_.stack(alone);
  return {stack.binding, stack.weights, tensor.type, tensor.cols, tensor.rows, 0};
}

std::vector<Projection> ForwardPass::merge(std::vector<const Tensor*> tensors) const {
  std::vector<Projection> merged;
  int column = 0;
  for (std::size_t first = 0; first < tensors.size();) {
    // The longest run of tensors that can be one stack.
    std::size_t n = tensors.size() - first;
    auto stack = weights_.stack(std::span(tensors).subspan(first, n));
    while (!stack) stack = weights_.stack(std::span(tensors).subspan(first, --n));
    int rows = 0;
    for (std::size_t i = first; i < first + n; ++i) rows += tensors[i]->rows;
    merged.push_back(
        {stack->binding, stack->weights, tensors[first]->type, tensors[first]->cols, rows, column});
    column += rows;
    first += n;
  }
  return merged;
}

Path ForwardPass::path_of(int tokens) const {
  if (tokens == 1) return Path::kOneToken;
  return tokens <= few_tokens_ ? Path::kFewTokens : Path::kManyTokens;
}

ForwardPass::Rows ForwardPass::wanted_rows(const Chunk& chunk) const {
  const int tokens = int(chunk.tokens.size());
  if (chunk.output == Output::kLogProbs) return {0, tokens, path_of(tokens)};
  const int count = chunk.output == Output::kNone ? 0 : 1;
  return {std::size_t(tokens - count), count, Path::kOneToken};
}

bool ForwardPass::fuses_norm(const std::vector<Projection>& projections) const {
  return options_.fused_norm && std::all_of(projections.begin(), projections.end(), [](const Projection& w) {
           return w.type == TensorType::kQ4_0 || w.type == TensorType::kF32;
         });
}

bool ForwardPass::fuses_silu(const Layer& w) const {
  return options_.fused_silu && w.w_down.type == TensorType::kQ4_0 && !w.post_ffn_norm.buffer;
}

bool ForwardPass::gate_up_apart(const Layer& w, Path path) const {
  return w.gate_up.size() > 1 || path == Path::kFewTokens ||
         (path == Path::kOneToken && (fuses_norm(w.gate_up) || fuses_silu(w)));
}

AttentionArgs ForwardPass::attention_args(int layer, int position, int tokens) const {
  const ops::DecodeSplits splits = ops::decode_splits(tuning_, tokens, position);
  return {.n_heads = u32_t(config_.n_heads),
          .n_kv_heads = u32_t(config_.n_kv_heads),
          .key_dim = u32_t(config_.key_dim),
          .value_dim = u32_t(config_.value_dim),
          .tokens = u32_t(tokens),
          .position = u32_t(position),
          .q_stride = u32_t(qkv_dim_),
          .window = u32_t(config_.window(layer)),
          .splits = u32_t(splits.count),
          .split_keys = u32_t(splits.keys),
          .scale = config_.attention_scale != 0.0f ? config_.attention_scale
                                                   : 1.0f / std::sqrt(float(config_.key_dim))};
}

ForwardPass::Activations ForwardPass::activations(const Chunk& chunk, Batch& batch,
                                                  CallCounters& counters) const {
  const int tokens = int(chunk.tokens.size());
  const Path path = path_of(tokens);
  const std::size_t n = buffered_tokens(tokens);
  // Float32, or half precision where a matmul reads it; the last token's are float32 in any case.
  const auto operand = [&](int columns) {
    return std::size_t(columns) * std::max(n * (path == Path::kManyTokens ? 2 : 4), std::size_t(4));
  };
  const auto floats = [&](int columns) { return std::size_t(columns) * n * 4; };
  const auto any_layer = [&](const auto& holds) {
    return std::any_of(layers_.begin(), layers_.end(), holds);
  };

  Activations a;
  a.x = batch.get(Name::kX, floats(config_.dim), counters);
  a.normed = batch.get(Name::kNormed, operand(config_.dim), counters);
  a.qkv = batch.get(Name::kQkv, floats(qkv_dim_), counters);
  a.att = batch.get(Name::kAtt, operand(att_dim_), counters);
  a.ffn = batch.get(Name::kFfn, operand(config_.ffn_dim), counters);
  if (any_layer([](const Layer& w) { return w.post_attn_norm.buffer || w.post_ffn_norm.buffer; }))
    a.block = batch.get(Name::kBlock, floats(config_.dim), counters);
  if (any_layer([&](const Layer& w) { return gate_up_apart(w, path) || gate_up_apart(w, Path::kOneToken); }))
    a.gate_up = batch.get(Name::kGateUp, floats(2 * config_.ffn_dim), counters);
  AttentionArgs attention = attention_args(0, chunk.position, tokens);
  if (attention.splits > 1) {
    attention.tokens = path == Path::kManyTokens ? 1 : u32_t(n);
    attention.splits = u32_t(tuning_.max_splits);
    a.partial = batch.get(Name::kPartial, ops::decode_partial_bytes(attention), counters);
  }
  return a;
}

std::vector<ForwardPass::Intermediate> ForwardPass::intermediates(const Chunk& chunk) const {
  const std::size_t tokens = chunk.tokens.size();
  const Rows wanted = wanted_rows(chunk);
  const std::size_t rows = std::size_t(wanted.count);
  std::vector<Intermediate> all = {{Name::kX, tokens * std::size_t(config_.dim), false},
                                   {Name::kQkv, tokens * std::size_t(qkv_dim_), false}};
  if (rows == 0) return all;
  all.push_back({Name::kNormed, rows * std::size_t(config_.dim), chunk.output == Output::kLogProbs});
  all.push_back({Name::kAtt, rows * std::size_t(att_dim_), wanted.half()});
  all.push_back({Name::kFfn, rows * std::size_t(config_.ffn_dim), wanted.half()});
  if (chunk.output == Output::kGreedy) all.push_back({Name::kLogits, std::size_t(config_.vocab_size), false});
  return all;
}

std::set<KernelKey> ForwardPass::kernels() const {
  std::set<KernelKey> wanted;
  const auto add = [&](Kernel kernel) { wanted.insert({kernel, TensorType::kF32}); };
  const auto add_typed = [&](Kernel kernel, const Projection& w) { wanted.insert({kernel, w.type}); };
  const auto add_tiles = [&](Kernel narrow, Kernel wide, const Projection& w, int fewest, int most) {
    if (!ops::uses_wide_tiles(tuning_, w.out_dim, fewest)) add_typed(narrow, w);
    if (ops::uses_wide_tiles(tuning_, w.out_dim, most)) add_typed(wide, w);
  };
  const int longest = std::min(options_.chunk_tokens, config_.context_length);
  const int fewest_many = few_tokens_ + 1;
  const bool has_few = few_tokens_ > 1 && longest > 1, has_many = longest >= fewest_many;

  // What one token needs, and the last token of any chunk.
  const auto add_normed = [&](const std::vector<Projection>& projections) {
    if (!fuses_norm(projections)) add(Kernel::kRmsnormF32);
    for (const Projection& w : projections)
      add_typed(fuses_norm(projections) ? Kernel::kRmsnormMatvec : Kernel::kMatvec, w);
  };
  add_typed(Kernel::kEmbed, embedding_);
  for (const Kernel k : {Kernel::kRopeAppend, Kernel::kRopeAttentionDecode, Kernel::kAttentionDecode,
                         Kernel::kArgmaxStage1, Kernel::kArgmaxStage2})
    add(k);
  if (ops::decode_splits(tuning_, 1, config_.context_length - 1).count > 1) add(Kernel::kAttentionCombine);
  add_normed({output_});
  for (const Layer& w : layers_) {
    add_normed(w.qkv);
    add_typed(Kernel::kMatvec, w.wo);
    if (gate_up_apart(w, Path::kOneToken)) {
      add_normed(w.gate_up);
      if (!fuses_silu(w)) add(Kernel::kSwigluF32);
    } else {
      add(Kernel::kRmsnormF32);
      add_typed(Kernel::kMatvecSwiglu, w.gate_up[0]);
    }
    if (fuses_silu(w))
      add(Kernel::kSiluMatvecQ4_0Accumulate);
    else
      add_typed(Kernel::kMatvec, w.w_down);
    if (w.post_attn_norm.buffer || w.post_ffn_norm.buffer) add(Kernel::kRmsnormAdd);
  }

  // What scoring needs.
  for (const Kernel k : {Kernel::kRmsnormF16, Kernel::kLogProb}) add(k);
  add_tiles(Kernel::kMatmulNarrow, Kernel::kMatmulWide, output_, 1, 1);

  if (has_few) {
    for (const Kernel k : {Kernel::kMultiTokenMatvecQ4_0, Kernel::kRmsnormF32, Kernel::kSwigluF32}) add(k);
    for (const Layer& w : layers_)
      if (!w.post_attn_norm.buffer || !w.post_ffn_norm.buffer) add(Kernel::kMultiTokenMatvecQ4_0Accumulate);
  }
  if (has_many) {
    add(Kernel::kAttentionPrefill);
    for (const Layer& w : layers_) {
      for (const Projection& p : w.qkv)
        add_tiles(Kernel::kMatmulNarrow, Kernel::kMatmulWide, p, fewest_many, longest);
      for (const Projection* p : {&w.wo, &w.w_down})
        add_tiles(Kernel::kMatmulNarrow, Kernel::kMatmulWide, *p, fewest_many, longest);
      if (gate_up_apart(w, Path::kManyTokens)) {
        add(Kernel::kSwigluF16);
        for (const Projection& p : w.gate_up)
          add_tiles(Kernel::kMatmulNarrow, Kernel::kMatmulWide, p, fewest_many, longest);
      } else {
        add_tiles(Kernel::kMatmulSwigluNarrow, Kernel::kMatmulSwigluWide, w.gate_up[0], fewest_many, longest);
      }
    }
  }
  return wanted;
}

}  // namespace metal_prefill::metal
