// Layout of a model's weights and a pass's buffers for the forward pass, and the kernels that it can need.
#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "../../base/rounding.h"
#include "../../model/tensors.h"
#include "forward_pass.h"
#include "recorder.h"

namespace metal_prefill::metal {

namespace {

// Buffers for more than a few tokens have a multiple of 32 rows, so that prompts of similar length share
// them.
std::size_t buffered_tokens(int tokens) {
  return std::size_t(tokens <= 8 ? tokens : round_up(tokens, 32));
}

// The tensors as one stack of rows, with offsets from the first of them in memory; nullopt if they are in
// different buffers or differ in type or columns.
std::optional<Projection> stack(std::span<const Tensor* const> tensors, const WeightViews& weights) {
  const Tensor& like = *tensors[0];
  Projection stacked = {
      .weights = weights.view(like), .stack = {}, .type = like.type, .in_dim = like.cols, .out_dim = 0};
  std::array<std::size_t, STACKED_MATRICES> offsets{};
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

// The shaders identify an activation by its number.
static_assert(u32_t(Activation::kSilu) == ACTIVATION_SILU && u32_t(Activation::kGelu) == ACTIVATION_GELU &&
              u32_t(Activation::kGeluErf) == ACTIVATION_GELU_ERF &&
              u32_t(Activation::kRelu) == ACTIVATION_RELU &&
              u32_t(Activation::kClampedSilu) == ACTIVATION_CLAMPED);

// Merges tensors into as few stacks as possible, without absent ones.
std::vector<Projection> merge(std::vector<const Tensor*> tensors, const WeightViews& weights) {
  std::erase_if(tensors, [](const Tensor* tensor) { return !*tensor; });
  std::vector<Projection> merged;
  int column = 0;
  for (std::size_t first = 0; first < tensors.size();) {
    // The longest run of tensors that can be one stack.
    std::size_t n = std::min(tensors.size() - first, std::size(StackedWeights{}.rows));
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
      layer_configs_(model.config),
      tuning_(tuning),
      options_(options),
      page_layout_(model.config, options.kv_type),
      state_layout_(model.config),
      embedding_(projection(model.token_embedding, weights)),
      embedding_norm_(
          config_.embedding_dim > 0
              ? norm_of(model.embedding_norm, model.embedding_norm_bias, config_.stream_eps(), weights)
              : stream_norm(model.embedding_norm, model.embedding_norm_bias, weights)),
      output_norm_(stream_norm(model.output_norm, model.output_norm_bias, weights)),
      head_norm_(output_norm_),
      norms_stream_(!model.layers.empty() && model.layers[0].attn_residual_norm),
      att_dim_(config_.n_heads * config_.value_dim),
      activation_(u32_t(config_.activation)) {
  if (model.output) output_.push_back(projection(model.output, weights));
  if (model.output_bias) output_bias_ = weights.view(model.output_bias);
  if (model.position_embedding) position_embedding_ = projection(model.position_embedding, weights);
  if (const Tensor& bias = model.position_bias)
    position_bias_ = weights.concatenate(BufferName::kPositionBias, {{{&bias, bias.rows * bias.cols}}}, 1.0f);
  if (model.relative_row_of) relative_row_of_ = weights.view(model.relative_row_of);
  if (model.embedding_projection) embedding_projection_ = projection(model.embedding_projection, weights);
  if (model.embedding_projection_bias)
    embedding_projection_bias_ = weights.view(model.embedding_projection_bias);
  if (config_.per_layer_dim > 0) {
    inputs_projection_ = projection(model.per_layer_projection, weights);
    // The norm of projection / sqrt(dim) is that of the projection with a larger epsilon.
    inputs_norm_ = norm_of(model.per_layer_norm, {}, config_.block_eps() * float(config_.dim), weights);
    inputs_filled_ = float(model.per_layer_embedding.cols) / float(inputs_projection_->out_dim);
  }
  if (model.token_types) token_types_ = projection(model.token_types, weights);
  if (config_.logit_scale != 1.0f) {
    const Tensor &norm = model.output_norm, &bias = model.output_norm_bias;
    head_norm_.weight = weights.concatenate(
        BufferName::kHeadNorm, {{{&norm, config_.dim}, {&bias, config_.dim}}}, config_.logit_scale);
    if (bias) head_norm_.bias = head_norm_.weight.row(1, config_.dim);
  }
  for (int layer = 0; layer < config_.n_layers; ++layer) {
    layers_.push_back(layer_of(layer, model.layers[std::size_t(layer)], weights));
    if (config_.caches(layer) || config_.state_values(layer) > 0) last_stored_ = layer;
    tile_shape_of_.push_back(0);
    if (!has_attention(config_.kind(layer))) continue;
    const TileShape shape = ops::tile_shape(tuning_, options_.kv_type, attention_args(layer));
    const auto same = std::find(tile_shapes_.begin(), tile_shapes_.end(), shape);
    tile_shape_of_.back() = std::size_t(same - tile_shapes_.begin());
    if (same == tile_shapes_.end()) tile_shapes_.push_back(shape);
  }
}

Norm ForwardPass::norm_of(const Tensor& weight, const Tensor& bias, float eps,
                          const WeightViews& weights) const {
  const auto view = [&](const Tensor& t) { return t ? weights.view(t) : View{}; };
  const int dim = weight ? weight.cols : config_.dim;
  return {view(weight), view(bias), dim, dim, eps, config_.norm_kind};
}

Norm ForwardPass::stream_norm(const Tensor& weight, const Tensor& bias, const WeightViews& weights) const {
  Norm norm = norm_of(weight, bias, config_.stream_eps(), weights);
  norm.width -= config_.padding;
  return norm;
}

ForwardPass::Layer ForwardPass::layer_of(int index, const LayerWeights& w, WeightViews& weights) const {
  const LayerKind kind = config_.kind(index);
  const float eps = config_.norm_eps;
  const auto view = [&](const Tensor& t) { return t ? weights.view(t) : View{}; };
  const auto norm = [&](const Tensor& weight, float e) { return norm_of(weight, {}, e, weights); };
  const auto output = [&](const Tensor& weight, const Tensor& bias, const Tensor& block_norm,
                          const Tensor& residual_norm, const Tensor& residual_bias) {
    if (!weight) return BlockOutput{};
    return BlockOutput{.w = projection(weight, weights),
                       .bias = bias ? weights.view(bias) : View{},
                       .norm = norm(block_norm, config_.block_eps()),
                       .residual_norm = stream_norm(residual_norm, residual_bias, weights)};
  };
  const bool gated = bool(w.w_gate), attention = has_attention(kind);
  const auto dense = [&] {
    if (w.shared_up)
      return Dense{.gate_up = merge({&w.shared_gate, &w.shared_up}, weights),
                   .gated = true,
                   .output = output(w.shared_down, {}, {}, {}, {}),
                   .dim = config_.shared_dim};
    return Dense{
        .gate_up = merge({&w.w_gate, &w.w_up}, weights),
        .gated = gated,
        .output = output(w.w_down, w.b_down, w.post_ffn_norm, w.ffn_residual_norm, w.ffn_residual_norm_bias),
        .dim = layer_configs_[index].ffn_dim};
  };
  std::vector<const Tensor*> in = {&w.conv_in,         &w.scan_in,           &w.gated_delta_gate,
                                   &w.gated_delta_qkv, &w.gated_delta_alpha, &w.gated_delta_beta};
  const std::array<const Tensor*, 3> qkv = {&w.wq, &w.wk, &w.wv};
  in.insert(projected_row(index).qkv > 0 ? in.end() : in.begin(), qkv.begin(), qkv.end());
  Layer layer = {.attn_norm = stream_norm(w.attn_norm, w.attn_norm_bias, weights),
                 .ffn_norm = stream_norm(w.ffn_norm, w.ffn_norm_bias, weights),
                 .q_norm = norm_of(w.q_norm, w.q_norm_bias, eps, weights),
                 .k_norm = norm_of(w.k_norm, w.k_norm_bias, eps, weights),
                 .in = merge(in, weights),
                 .relative_keys = view(w.relative_keys),
                 .relative_queries = view(w.relative_queries),
                 .sinks = view(w.sinks),
                 .conv = view(conv_filter(w)),
                 .conv_bias = view(w.scan_conv_bias),
                 .dense = dense(),
                 .attn_output = output(attention ? w.wo : w.conv_out, w.bo, w.post_attn_norm,
                                       w.attn_residual_norm, w.attn_residual_norm_bias),
                 .scan_output = output(w.scan_out, {}, w.post_attn_norm, {}, {}),
                 .input_output = output(w.per_layer_out, {}, w.per_layer_post_norm, {}, {})};
  if (w.per_layer_gate) layer.input_gate = projection(w.per_layer_gate, weights);
  if (layer.attn_output.norm.weight && !config_.parallel &&
      config_.feed_forward(index) != FeedForwardKind::kNone)
    layer.attn_output.next = layer.ffn_norm;
  if (layer.dense.output.norm.weight && layer.input_gate) layer.dense.output.next = no_norm();
  if (w.layer_scale) {
    BlockOutput& last = layer.input_gate ? layer.input_output : layer.dense.output;
    last.scale = view(w.layer_scale);
  }
  if (has_state_space(kind)) {
    layer.scan = {.a = view(w.scan_rates),
                  .bias = view(w.scan_step),
                  .skip = view(w.scan_skip),
                  .norm = view(w.scan_group_norm)};
  }
  if (kind == LayerKind::kGatedDelta) {
    layer.gated_delta = {
        .decay = view(w.gated_delta_decay), .step = view(w.scan_step), .norm = norm(w.gated_delta_norm, eps)};
  }
  if (w.router) {
    const std::vector<Projection> gate_up = merge({&w.gate_experts, &w.up_experts}, weights);
    if (gate_up.size() > 1)
      throw DeviceError("the tensors '" + w.gate_experts.name + "' and '" + w.up_experts.name +
                        "' are not in one buffer of this GPU: use device='cpu'");
    layer.router = {projection(w.router, weights), view(w.router_bias), view(w.router_offset)};
    layer.experts_up = {gate_up[0], {}};
    layer.experts_down = {projection(w.down_experts, weights), view(w.down_experts_bias)};
    layer.experts_output.bias = view(w.experts_bias);
    layer.experts_output.residual_norm = stream_norm(w.ffn_residual_norm, w.ffn_residual_norm_bias, weights);
    if (w.up_experts_bias)
      layer.experts_up.bias =
          weights.concatenate(BufferName::kExpertsBias,
                              {{{&w.gate_experts_bias, w.gate_experts ? w.gate_experts.rows : 0},
                                {&w.up_experts_bias, w.up_experts.rows}}},
                              1.0f);
  }
  if (w.second_residual_norm)
    layer.attn_output.second_norm = stream_norm(w.second_residual_norm, w.second_residual_norm_bias, weights);
  // The biases of q and k are added before a norm of rows, but after other norms.
  const Tensor none;
  const auto before = [&](const Norm& n) { return config_.qk_norm_place == QkNormPlace::kRows && n.weight; };
  if (before(layer.q_norm)) layer.q_bias = view(w.bq);
  if (before(layer.k_norm)) layer.k_bias = view(w.bk);
  const Tensor& bq = before(layer.q_norm) ? none : w.bq;
  const Tensor& bk = before(layer.k_norm) ? none : w.bk;
  if (bq || bk || w.bv)
    layer.bias = weights.concatenate(BufferName::kQkvBias,
                                     {{{&bq, w.wq.rows}, {&bk, w.wk.rows}, {&w.bv, w.wv.rows}}}, 1.0f);
  if (w.b_gate || w.b_up)
    layer.dense.bias = weights.concatenate(
        BufferName::kFfnBias, {{{&w.b_gate, gated ? w.w_gate.rows : 0}, {&w.b_up, w.w_up.rows}}}, 1.0f);
  return layer;
}

PassRows ForwardPass::rows_of(std::span<const PassChunk> chunks) const {
  PassRows rows(chunks, tuning_, tile_shapes_, config_.causal);
  if (state_layout_.values > 0) rows.add_states(chunks);
  return rows;
}

PassTables ForwardPass::tables(const PassRows& rows, PassBuffers& buffers) const {
  // Lists grow in steps, so that a sequence that grows by one token rarely needs a new buffer.
  const auto list = [&](BufferName name, std::size_t n, std::size_t step, std::size_t bytes) {
    return n > 0 ? buffers.get(name, round_up(n, step) * bytes) : View{};
  };
  const std::size_t n = buffered_tokens(rows.all.count);
  return {.ids = list(BufferName::kIds, n, 1, sizeof(TokenId)),
          .types = list(BufferName::kTypes, token_types_ ? n : 0, 1, sizeof(TokenId)),
          .rows = list(BufferName::kRows, n, 1, sizeof(PassRow)),
          .tiles = list(BufferName::kTiles, rows.tiles.size(), 64, sizeof(AttentionTile)),
          .pages = list(BufferName::kPages, rows.first_page.back(), 256, sizeof(PageId)),
          .states = rows.states.empty()
                        ? View{}
                        : list(BufferName::kStateRows, n + std::size_t(rows.chunks()), 1, sizeof(StateRow)),
          .targets = list(BufferName::kTargets, std::size_t(rows.scored.count), 1, sizeof(TokenId)),
          .layer_rows = inputs_projection_ ? list(BufferName::kLayerRows, n, 1,
                                                  std::size_t(inputs_projection_->out_dim) * sizeof(float))
                                           : View{}};
}

ForwardPass::ProjectedRow ForwardPass::projected_row(int layer) const {
  // Kernels read q four values at a time. Q, K and V come last if possible: V often has another type, and
  // would otherwise separate tensors of one type.
  constexpr int kTogether = 4;
  const LayerKind kind = config_.kind(layer);
  const Config& own = layer_configs_[layer];
  const int kv = config_.caches(layer) ? own.n_kv_heads * (own.key_dim + own.value_dim) : 0;
  const int recurrent = config_.recurrent_in_dim(kind),
            qkv = has_attention(kind) ? own.n_heads * own.query_step() + kv : 0;
  const bool last = recurrent % kTogether == 0;
  const int first = last ? 0 : qkv, gates = has_matrix_state(kind) ? config_.scan_dim() : 0;
  return {.stride = round_up(recurrent + qkv, kTogether),
          .qkv = last ? recurrent : 0,
          .recurrent = first,
          .conv = first + gates};
}

int ForwardPass::projected_columns() const {
  int most = 0;
  for (int layer = 0; layer < config_.n_layers; ++layer) most = std::max(most, projected_row(layer).stride);
  return most;
}

ForwardPass::Rows ForwardPass::all_rows(const PassRows& rows) const {
  return {0, rows.all.count, rows.few ? Path::kFewTokens : Path::kManyTokens};
}

ForwardPass::Rows ForwardPass::wanted_rows(const PassRows& rows) const {
  const bool few = rows.few || rows.one_wanted;
  return {rows.wanted.first, rows.wanted.count, few ? Path::kFewTokens : Path::kManyTokens};
}

bool ForwardPass::fuses_norm(const Norm& norm, const Rows& rows) const {
  return tuning_.fused_norm && rows.count == 1 && rows.path == Path::kFewTokens && norm.weight &&
         norm.kind == NormKind::kRms;
}

AttentionArgs ForwardPass::attention_args(int layer) const {
  const Config& own = layer_configs_[layer];
  return {.n_heads = u32_t(own.n_heads),
          .n_kv_heads = u32_t(own.n_kv_heads),
          .key_dim = u32_t(own.key_dim),
          .value_dim = u32_t(own.value_dim),
          .q_stride = u32_t(projected_row(layer).stride),
          .page_stride = u32_t(page_layout_.bytes / page_layout_.element),
          .window = u32_t(config_.window(layer)),
          .both_ways = !config_.causal,
          .splits = 1,
          .tiles = 0,
          .scale = own.score_scale(),
          .alibi_heads = config_.max_alibi_bias > 0 ? std::bit_floor(u32_t(config_.n_heads)) : 0,
          .max_alibi_bias = config_.max_alibi_bias,
          .position_bias = bool(position_bias_),
          .added_keys = 0,
          .query_step = u32_t(own.query_step()),
          .score_cap = config_.score_cap,
          .has_sinks = false};
}

RelativeScoresArgs ForwardPass::relative_args(const AttentionArgs& attention, const PassRows& rows) const {
  u32_t longest = 0;
  for (const AttentionTile& tile : rows.tiles) longest = std::max(longest, tile.end);
  return {.n_heads = attention.n_heads,
          .key_dim = attention.key_dim,
          .q_stride = attention.q_stride,
          .page_stride = attention.page_stride,
          .tile_rows = u32_t(ops::tile_shape(tuning_, options_.kv_type, attention).rows),
          .context = u32_t(config_.context_length),
          .keys = longest,
          .scale = attention.scale};
}

RopeArgs ForwardPass::rope_args(int layer, bool skip_queries) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Config& own = layer_configs_[layer];
  const bool of_heads = config_.qk_norm_place != QkNormPlace::kRows;
  return {.n_heads = u32_t(own.n_heads),
          .n_kv_heads = u32_t(own.n_kv_heads),
          .key_dim = u32_t(own.key_dim),
          .value_dim = u32_t(own.value_dim),
          .rope_dim = config_.uses_rope(layer) ? u32_t(own.rope_dim) : 0,
          .style = config_.rope_style == RopeStyle::kNeox ? u32_t(ROPE_NEOX) : u32_t(ROPE_INTERLEAVED),
          .page_stride = u32_t(page_layout_.bytes / page_layout_.element),
          .has_bias = bool(w.bias),
          .has_q_norm = of_heads && w.q_norm.weight,
          .has_k_norm = of_heads && w.k_norm.weight,
          .has_v_norm = config_.value_norm,
          .norm_after = config_.qk_norm_place == QkNormPlace::kRotatedHeads,
          .eps = config_.norm_eps,
          .skip_queries = skip_queries,
          .skip_keys = !config_.caches(layer),
          .query_step = u32_t(own.query_step()),
          .row_stride = u32_t(projected_row(layer).stride)};
}

ForwardPass::Activations ForwardPass::activations(const PassRows& rows, PassBuffers& buffers) const {
  const Rows all = all_rows(rows), wanted = wanted_rows(rows);
  const std::size_t n = buffered_tokens(all.count);
  // float32, or float16 if a matmul reads it; few rows continue in float32.
  const auto operand = [&](int columns) {
    const std::size_t few =
        buffered_tokens(rows.few                          ? all.count
                        : wanted.path == Path::kFewTokens ? wanted.count
                                                          : rows.greedy.count + rows.logits.count);
    return std::size_t(columns) * std::max(n * (rows.few ? 4 : 2), few * 4);
  };
  const auto floats = [](int columns, std::size_t count) { return std::size_t(columns) * count * 4; };
  const auto any_layer = [&](const auto& holds) {
    return std::any_of(layers_.begin(), layers_.end(), holds);
  };

  Activations a;
  a.x = buffers.get(BufferName::kX, floats(config_.dim, n));
  if (embedding_projection_)
    a.embedded = buffers.get(BufferName::kEmbedded, floats(config_.embedding_width(), n));
  a.normed = buffers.get(BufferName::kNormed, operand(std::max(config_.dim, config_.embedding_width())));
  if (config_.n_heads > 0) {
    a.att = buffers.get(BufferName::kAtt, operand(att_dim_));
    if (relative_row_of_) {
      const std::size_t keys = relative_args(attention_args(0), rows).keys;
      a.relative = buffers.get(BufferName::kRelative, floats(config_.n_heads, n) * keys);
    }
  }
  const int dense_dim = std::max(config_.ffn_dim, config_.shared_dim);
  const int ffn_columns = std::max(dense_dim, config_.per_layer_dim);
  if (ffn_columns > 0) a.ffn = buffers.get(BufferName::kFfn, operand(ffn_columns));
  if (inputs_projection_) a.inputs = buffers.get(BufferName::kInputs, floats(inputs_projection_->out_dim, n));
  if (config_.n_experts > 0) {
    const int used = config_.experts_used;
    const std::size_t routes = n * std::size_t(used);
    a.routes = {.routes = buffers.get(BufferName::kRoutes, routes * sizeof(Route)),
                .rows = buffers.get(BufferName::kRouteRows, routes * sizeof(u32_t)),
                .tiles = {},
                .experts = config_.n_experts,
                .used = used};
    a.routes.tiles = buffers.get(BufferName::kRouteTiles, a.routes.most_tiles(int(n)) * sizeof(ExpertTile));
    a.expert_ffn = buffers.get(BufferName::kExpertFfn, operand(config_.expert_dim * used));
    a.expert_out = buffers.get(BufferName::kExpertOut, floats(config_.dim * used, n));
  }
  const auto any_kind = [&](const auto& holds) {
    return std::any_of(config_.layer_kinds.begin(), config_.layer_kinds.end(), holds);
  };
  if (config_.n_layers > 0) a.projected = buffers.get(BufferName::kProjected, floats(projected_columns(), n));
  if (any_kind([](LayerKind kind) { return kind == LayerKind::kShortConv; }))
    a.conv = buffers.get(BufferName::kConv, operand(config_.dim));
  if (any_kind(has_matrix_state)) {
    a.convolved = buffers.get(BufferName::kConvolved, floats(config_.scan_channels(), n));
    a.scanned = buffers.get(BufferName::kScanned, floats(config_.scan_dim(), n));
    a.scan_out = buffers.get(BufferName::kScanOut, operand(config_.scan_dim()));
  }
  if (any_layer([](const Layer& w) {
        return w.attn_output.norm.weight || w.attn_output.second_norm.weight || w.dense.output.norm.weight ||
               w.input_output.norm.weight;
      }))
    a.block = buffers.get(BufferName::kBlock, floats(config_.dim, n));
  const bool separate = any_layer([](const Layer& w) { return w.dense.separate(); });
  if (const int columns = std::max(separate ? 2 * dense_dim : 0, config_.per_layer_dim); columns > 0)
    a.gate_up = buffers.get(BufferName::kGateUp, floats(columns, n));
  const PassPart& decoded = rows.few ? rows.all : rows.wanted;
  if (config_.n_heads > 0 && decoded.splits > 1 && wanted.path == Path::kFewTokens) {
    AttentionArgs attention = attention_args(0);
    attention.value_dim = u32_t(config_.value_dim);  // of the widest layer
    attention.splits = u32_t(tuning_.max_splits);
    const int count = int(buffered_tokens(decoded.count));
    a.partial = buffers.get(BufferName::kPartial, ops::decode_partial_bytes(attention, count));
  }
  if (const int most = std::max(rows.scored.count, rows.greedy.count); most > 0)
    a.logits =
        buffers.get(BufferName::kLogits, floats(config_.vocab_size, std::size_t(std::min(most, kHeadRows))));
  return a;
}

KernelThreads ForwardPass::kernels(const ThreadLimit& limit) const {
  // A pass chooses kernels by its path, except for the tiles of a matmul; at the last position attention may
  // also be split. So one pass per path at that position uses all other kernels.
  const int longest = std::min(pass_rows(), config_.context_length);
  KernelCollector collector(tuning_, options_.kv_type, limit);
  RecordedBuffers buffers;
  const RowOutput of_all = config_.has_head ? RowOutput::kLogProbs : RowOutput::kHidden;
  for (int tokens = MATMUL_NARROW_TILE; tokens <= std::min(longest, ops::kMostTiledTokens);
       tokens += MATMUL_NARROW_TILE)
    encode(collector, rows_of({{PassChunk{tokens, 0, of_all, tokens}}}), buffers);
  for (const int tokens : {1, std::min(kFewTokens, longest), longest})
    for (const RowOutput output :
         {RowOutput::kNone, RowOutput::kHidden, RowOutput::kGreedy, RowOutput::kLogProbs})
      if (config_.has_head || output == RowOutput::kNone || output == RowOutput::kHidden)
        encode(collector, rows_of({{last_rows(tokens, config_.context_length - tokens, output)}}), buffers);
  return collector.kernels();
}

}  // namespace metal_prefill::metal
