// How a model's weights and a pass's buffers are laid out for the forward pass, and which kernels it can
// need.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "../rounding.h"
#include "../tensors.h"
#include "forward_pass.h"
#include "recorder.h"

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

// The tensors as one stack of rows, with offsets from the first of them in memory; nothing where they are in
// different buffers or differ in type or columns.
std::optional<Projection> stack(std::span<const Tensor* const> tensors, const WeightViews& weights) {
  const Tensor& like = *tensors[0];
  Projection stacked = {
      .weights = weights.view(like), .stack = {}, .type = like.type, .in_dim = like.cols, .out_dim = 0};
  std::array<std::size_t, 3> offsets{};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = *tensors[i];
    const View v = weights.view(t);
    if (v.buffer != stacked.weights.buffer || t.type != like.type || t.cols != like.cols) return std::nullopt;
    offsets[i] = v.offset;
    stacked.stack.rows[i] = u32_t(t.rows);
    stacked.out_dim += t.rows;
  }
  stacked.weights.offset =
      *std::min_element(offsets.begin(), offsets.begin() + std::ptrdiff_t(tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i)
    stacked.stack.offset[i] = offsets[i] - stacked.weights.offset;
  stacked.stack.row_bytes = u32_t(row_bytes(like.type, std::size_t(like.cols)));
  return stacked;
}

Projection projection(const Tensor& tensor, const WeightViews& weights) {
  const Tensor* alone[] = {&tensor};
  return *stack(alone, weights);
}

std::vector<Projection> merge(std::vector<const Tensor*> tensors, const WeightViews& weights) {
  std::vector<Projection> merged;
  int column = 0;
  for (std::size_t first = 0; first < tensors.size();) {
    // The longest run of tensors that can be one stack.
    std::size_t n = tensors.size() - first;
    auto stacked = stack(std::span(tensors).subspan(first, n), weights);
    while (!stacked) stacked = stack(std::span(tensors).subspan(first, --n), weights);
    stacked->column = column;
    column += stacked->out_dim;
    first += n;
    merged.push_back(*stacked);
  }
  return merged;
}

}  // namespace

ForwardPass::ForwardPass(const Tuning& tuning, const Model& model, const EngineOptions& options,
                         WeightViews& weights)
    : config_(model.config),
      tuning_(tuning),
      options_(options),
      few_tokens_(all_projections_are_q4_0(model) ? tuning.few_tokens : 1),
      cache_shape_{options.kv_type, std::max(model.config.key_dim, model.config.value_dim)},
      embedding_(projection(model.token_embedding, weights)),
      output_{projection(model.output, weights)},
      output_norm_{weights.view(model.output_norm), config_.dim, config_.norm_eps},
      qkv_dim_(config_.n_heads * config_.key_dim +
               config_.n_kv_heads * (config_.key_dim + config_.value_dim)),
      att_dim_(config_.n_heads * config_.value_dim),
      activation_(config_.activation == Activation::kGelu ? ACTIVATION_GELU : ACTIVATION_SILU) {
  static_cast<void>(cache_shape_.decode_size());  // throws for heads that are too large
  for (const LayerWeights& w : model.layers) layers_.push_back(layer_of(w, weights));
}

ForwardPass::Layer ForwardPass::layer_of(const LayerWeights& w, WeightViews& weights) const {
  const auto optional = [&](const Tensor& t) { return t ? weights.view(t) : View{}; };
  const auto norm = [&](const Tensor& t) { return Norm{optional(t), config_.dim, config_.norm_eps}; };
  Layer layer = {.attn_norm = norm(w.attn_norm),
                 .ffn_norm = norm(w.ffn_norm),
                 .post_attn_norm = norm(w.post_attn_norm),
                 .post_ffn_norm = norm(w.post_ffn_norm),
                 .bias = {},
                 .q_norm = optional(w.q_norm),
                 .k_norm = optional(w.k_norm),
                 .qkv = merge({&w.wq, &w.wk, &w.wv}, weights),
                 .gate_up = merge({&w.w_gate, &w.w_up}, weights),
                 .wo = projection(w.wo, weights),
                 .w_down = projection(w.w_down, weights)};
  if (w.bq || w.bk || w.bv)
    layer.bias = weights.concatenate(BufferName::kQkvBias,
                                     {{{&w.bq, w.wq.rows}, {&w.bk, w.wk.rows}, {&w.bv, w.wv.rows}}});
  return layer;
}

Path ForwardPass::path_of(int tokens) const {
  if (tokens == 1) return Path::kOneToken;
  return tokens <= few_tokens_ ? Path::kFewTokens : Path::kManyTokens;
}

ForwardPass::Rows ForwardPass::wanted_rows(const PassShape& pass) const {
  if (pass.output == Output::kLogProbs) return {0, pass.tokens, path_of(pass.tokens)};
  const int count = pass.output == Output::kNone ? 0 : 1;
  return {std::size_t(pass.tokens - count), count, Path::kOneToken};
}

bool ForwardPass::fuses_norm(const std::vector<Projection>& projections) const {
  return options_.fused_norm && std::all_of(projections.begin(), projections.end(), [](const Projection& w) {
           return w.type == TensorType::kQ4_0 || w.type == TensorType::kF32;
         });
}

bool ForwardPass::fuses_silu(const Layer& w) const {
  return options_.fused_silu && w.w_down.type == TensorType::kQ4_0 && !w.post_ffn_norm.weight;
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

RopeArgs ForwardPass::rope_args(int layer, const Pass& pass, const Rows& queries) const {
  const Layer& w = layers_[std::size_t(layer)];
  return {.n_heads = u32_t(config_.n_heads),
          .n_kv_heads = u32_t(config_.n_kv_heads),
          .key_dim = u32_t(config_.key_dim),
          .value_dim = u32_t(config_.value_dim),
          .rope_dim = config_.uses_rope(layer) ? u32_t(config_.rope_dim) : 0,
          .style = config_.rope_style == RopeStyle::kNeox ? u32_t(ROPE_NEOX) : u32_t(ROPE_INTERLEAVED),
          .position = u32_t(pass.shape.position),
          .has_bias = bool(w.bias),
          .has_q_norm = bool(w.q_norm),
          .has_k_norm = bool(w.k_norm),
          .eps = config_.norm_eps,
          .skip_queries = queries.count == 0};
}

ForwardPass::Activations ForwardPass::activations(const PassShape& pass, PassBuffers& buffers) const {
  const Path path = path_of(pass.tokens);
  const std::size_t n = buffered_tokens(pass.tokens);
  // Float32, or float16 where a matmul reads it; those of the last token are always float32.
  const auto operand = [&](int columns) {
    return std::size_t(columns) * std::max(n * (path == Path::kManyTokens ? 2 : 4), std::size_t(4));
  };
  const auto floats = [&](int columns) { return std::size_t(columns) * n * 4; };
  const auto any_layer = [&](const auto& holds) {
    return std::any_of(layers_.begin(), layers_.end(), holds);
  };

  Activations a;
  a.x = buffers.get(BufferName::kX, floats(config_.dim));
  a.normed = buffers.get(BufferName::kNormed, operand(config_.dim));
  a.qkv = buffers.get(BufferName::kQkv, floats(qkv_dim_));
  a.att = buffers.get(BufferName::kAtt, operand(att_dim_));
  a.ffn = buffers.get(BufferName::kFfn, operand(config_.ffn_dim));
  if (any_layer([](const Layer& w) { return w.post_attn_norm.weight || w.post_ffn_norm.weight; }))
    a.block = buffers.get(BufferName::kBlock, floats(config_.dim));
  if (any_layer([&](const Layer& w) { return gate_up_apart(w, path) || gate_up_apart(w, Path::kOneToken); }))
    a.gate_up = buffers.get(BufferName::kGateUp, floats(2 * config_.ffn_dim));
  AttentionArgs attention = attention_args(0, pass.position, pass.tokens);
  if (attention.splits > 1) {
    attention.tokens = path == Path::kManyTokens ? 1 : u32_t(n);
    attention.splits = u32_t(tuning_.max_splits);
    a.partial = buffers.get(BufferName::kPartial, ops::decode_partial_bytes(attention));
  }
  return a;
}

std::vector<ForwardPass::Intermediate> ForwardPass::intermediates(const PassShape& pass) const {
  const auto elements = [](int rows, int columns) { return std::size_t(rows) * std::size_t(columns); };
  const Rows wanted = wanted_rows(pass);
  std::vector<Intermediate> all = {{BufferName::kX, elements(pass.tokens, config_.dim), Precision::kF32},
                                   {BufferName::kQkv, elements(pass.tokens, qkv_dim_), Precision::kF32}};
  if (wanted.count == 0) return all;
  const Precision normed = pass.output == Output::kLogProbs ? Precision::kF16 : Precision::kF32;
  all.push_back({BufferName::kNormed, elements(wanted.count, config_.dim), normed});
  all.push_back({BufferName::kAtt, elements(wanted.count, att_dim_), wanted.precision()});
  all.push_back({BufferName::kFfn, elements(wanted.count, config_.ffn_dim), wanted.precision()});
  if (pass.output == Output::kGreedy)
    all.push_back({BufferName::kLogits, elements(1, config_.vocab_size), Precision::kF32});
  return all;
}

std::set<KernelKey> ForwardPass::kernels() const {
  // A pass chooses between kernels by the number of tokens or by the position, and each choice has one
  // threshold. So the shortest and the longest pass of each path, at the first and the last position, use
  // every kernel.
  const int longest = std::min(options_.chunk_tokens, config_.context_length);
  std::set<int> lengths;
  for (const int tokens : {1, 2, few_tokens_, few_tokens_ + 1, longest})
    if (tokens <= longest) lengths.insert(tokens);
  KernelCollector collector(tuning_, cache_shape_);
  RecordedBuffers buffers;
  for (const int tokens : lengths)
    for (const int position : {0, config_.context_length - tokens})
      for (const Output output : {Output::kNone, Output::kGreedy, Output::kLogits, Output::kLogProbs})
        encode(collector, {tokens, position, output}, buffers);
  return collector.kernels();
}

}  // namespace metal_prefill::metal
