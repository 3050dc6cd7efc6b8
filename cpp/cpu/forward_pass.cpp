#include "forward_pass.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "../base/processor.h"
#include "../base/release_pages.h"

namespace metal_prefill::cpu {

namespace {

constexpr int kHeadRows = 32;  // rows whose logits are in memory together if the pass itself reads them

// Destination of the logits of a row with an output.
enum class LogitsUse {
  kNone,     // not computed
  kLargest,  // nowhere: only the largest is needed
  kCaller,   // to the caller's memory
  kPass,     // to the workspace, from which the pass reads them
};
LogitsUse logits_use(const Output& output) {
  return std::visit(
      Overloaded{
          [](const OneOf<NoOutput, HiddenOutput, PooledOutput> auto&) { return LogitsUse::kNone; },
          [](const GreedyOutput&) { return LogitsUse::kLargest; },
          [](const LogitsOutput&) { return LogitsUse::kCaller; },
          [](const OneOf<SampledOutput, LogProbsOutput> auto&) { return LogitsUse::kPass; },
      },
      output);
}

// Deals tiles to the threads, largest first and in alternating order, to balance their work and to keep the
// last tiles short.
void deal(std::vector<QueryTile>& tiles, int threads) {
  std::sort(tiles.begin(), tiles.end(), [](const QueryTile& a, const QueryTile& b) {
    return std::pair(b.position + b.count, a.first) < std::pair(a.position + a.count, b.first);
  });
  const std::vector<QueryTile> sorted = tiles;
  tiles.clear();
  for (int thread = 0; thread < threads; ++thread)
    for (int round = 0; round * threads < int(sorted.size()); ++round) {
      const int i = round * threads + (round % 2 == 0 ? thread : threads - 1 - thread);
      if (i < int(sorted.size())) tiles.push_back(sorted[std::size_t(i)]);
    }
}

}  // namespace

ForwardPass::ForwardPass(const Model& model, const EngineOptions& options, const Kernels& kernels,
                         const KvPages& cache, const StateSlots& states, Team& team)
    : model_(model),
      config_(model.config),
      layer_configs_(model.config),
      ones_(std::size_t(config_.value_norm ? config_.value_dim : 0), 1.0f),
      kernels_(kernels),
      cache_(cache),
      states_(states),
      team_(team),
      weights_(model, options.compute, kernels, team),
      ropes_(model),
      slopes_(alibi_slopes(config_)),
      bias_(position_bias(model)),
      scratch_(std::size_t(team.size())) {
  if (config_.has_head) {
    head_norm_ = model.output_norm;
    head_norm_bias_ = model.output_norm_bias;
    for (const Tensor* part : {&head_norm_, &head_norm_bias_})
      if (*part) scaled_norm_.insert(scaled_norm_.end(), floats(*part), floats(*part) + config_.dim);
    for (float& value : scaled_norm_) value *= config_.logit_scale;
    const auto* scaled = reinterpret_cast<const std::byte*>(scaled_norm_.data());
    head_norm_.data = scaled;
    if (head_norm_bias_) head_norm_bias_.data = scaled + head_norm_.bytes;
  }
  for (int layer = 0; layer < config_.n_layers; ++layer)
    if (config_.caches(layer) || config_.state_values(layer) > 0) last_stored_ = layer;
  const float keys = float(std::max(config_.scan_key_dim, 1));
  lengths_.assign(std::size_t(config_.scan_key_dim), 1.0f / keys);
  lengths_.resize(2 * lengths_.size(), 1.0f / std::sqrt(keys));
  for (Scratch& scratch : scratch_) {
    scratch.matrix =
        Buffer(std::size_t(config_.scan_key_dim) * kGatedDeltaColumns * sizeof(float), "a recurrence");
    scratch.weights = Buffer(weights_.scratch_bytes, "expanded weights");
    const std::size_t embedded = std::max(std::size_t(config_.embedding_width()),
                                          std::size_t(config_.n_layers) * std::size_t(config_.per_layer_dim));
    scratch.embedded = Buffer(embedded * sizeof(float), "a row of an embedding");
    scratch.rows = reserve_rows(config_.dim, weights_.dim_input, rows_of_own(team.size()), scratch.normed);
  }
}

double ForwardPass::run(std::span<Chunk> chunks) {
  weights_.settle(team_);
  plan(chunks);
  team_.run([&](Worker& worker) { run_layers({worker, kernels_, scratch_[std::size_t(worker.index())]}); });
  deliver();
  // The system has mapped many pages around each row that the pass has read.
  if (const Tensor& table = model_.per_layer_embedding) release_pages(table.data, table.bytes);
  double multiply_adds = 0;
  for (const Scratch& scratch : scratch_) multiply_adds += scratch.multiply_adds;
  return multiply_adds;
}

void ForwardPass::run_layers(const Context& c) {
  embed(c);
  const std::size_t table = all_.rows.size() * std::size_t(config_.rope_dim);
  for (std::size_t i = 0; i < ropes_.ropes.size(); ++i)
    rope_table(c, ropes_.ropes[i], all_.rows, work_.rotations + i * table);
  // Layers after the last one with K, V or a state compute only rows with an output.
  for (int layer = 0; layer < config_.n_layers; ++layer)
    run_layer(c, layer, layer <= last_stored_ ? all_ : wanted_, layer < last_stored_ ? all_ : wanted_);
  if (config_.n_layers == 0) keep_rows(c, work_.x, config_.dim, wanted_.rows);
  head(c);
  deliver_hidden(c);
}

void ForwardPass::embed(const Context& c) {
  const Linear& projection = weights_.embedding_projection;
  if (!projection.tensor) {
    cpu::embed(c, model_, all_.rows, work_.x);
  } else {
    cpu::embed(c, model_, all_.rows, work_.embedded.f32);
    multiply(c, {{.weight = projection, .out = work_.x, .bias = &model_.embedding_projection_bias}},
             NormedRows(work_.embedded), all_.count());
  }
  if (config_.per_layer_dim == 0) return;
  const NormedRows stream =
      normalize(c, work_.x, stream_norm(kNoTensor, kNoTensor), 0, all_.count(), work_.normed);
  multiply(c, {{weights_.per_layer_projection, work_.inputs}}, stream, all_.count());
  per_layer_inputs(c, model_, all_.rows, work_.inputs);
}

// The input of the first products of a layer.
NormedRows ForwardPass::attention_input(const Context& c, const LayerWeights& m, int rows) {
  return normalize(c, work_.x, stream_norm(m.attn_norm, m.attn_norm_bias), 0, rows, work_.normed);
}

// Stores K, V and states of all rows, and computes the wanted rows, which become the first rows of x.
void ForwardPass::run_layer(const Context& c, int layer, const Rows& all, const Rows& wanted) {
  if (all.count() == 0) return;
  const BlockOutput mixed = mix(c, layer, all, wanted);
  const int n = wanted.count();
  if (n == 0) return;
  const int part = rows_at_once(weights_.layer(layer), mixed, n);
  if (part == n) return finish_layer(c, layer, mixed, stream(layer, 0, n, 0));
  c.for_each(ceil_div(n, part), [&](int i) {
    Worker alone = c.worker.alone();
    const int first = i * part;
    const Activations in = mixed.in.rows_from(first);
    const BlockOutput own = {mixed.weight, mixed.bias, mixed.norm, in, mixed.separate};
    finish_layer({alone, c.kernels, c.scratch}, layer, own,
                 stream(layer, first, std::min(part, n - first), alone.index() * part));
  });
}

StreamRows ForwardPass::stream(int layer, int first, int count, int first_ffn) const {
  const int ffn_dim = std::max(layer_configs_[layer].ffn_dim, config_.shared_dim);
  return work_.stream(first, count, first_ffn, ffn_dim);
}

// The part of a layer that mixes tokens, up to its output projection.
ForwardPass::BlockOutput ForwardPass::mix(const Context& c, int layer, const Rows& all, const Rows& wanted) {
  switch (config_.kind(layer)) {
    case LayerKind::kShortConv:
      return short_convolution(c, layer, wanted);
    case LayerKind::kStateSpace:
    case LayerKind::kAttentionAndStateSpace:
      return scan(c, layer, wanted);
    case LayerKind::kGatedDelta:
      return gated_delta(c, layer, wanted);
    case LayerKind::kAttention:
      break;
  }
  return attention(c, layer, all, wanted);
}

// The rest of a layer, which treats each row independently.
void ForwardPass::finish_layer(const Context& c, int layer, const BlockOutput& mixed,
                               const StreamRows& rows) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  if (config_.parallel) feed_forward(c, layer, rows);  // reads x before attention adds to it
  add_residual(c, mixed, rows);
  normalize_attended(c, m, rows);
  if (!config_.parallel) feed_forward(c, layer, rows);
  normalize_stream(c, m.ffn_residual_norm, m.ffn_residual_norm_bias, rows);
  if (config_.per_layer_dim > 0) add_layer_input(c, layer, rows);
  if (m.layer_scale) scale_rows(c, *floats(m.layer_scale), config_.dim, rows.count, rows.x);
}

void ForwardPass::feed_forward(const Context& c, int layer, const StreamRows& rows) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const CpuLayer& w = weights_.layer(layer);
  switch (config_.feed_forward(layer)) {
    case FeedForwardKind::kNone:
      break;
    case FeedForwardKind::kDense:
      multiply_gated(c, {w.w_gate, w.w_up, floats(m.b_gate), floats(m.b_up), config_.activation},
                     feed_forward_input(c, m, rows), rows.count, rows.ffn);
      add_residual(c, {w.w_down, m.b_down, m.post_ffn_norm, rows.ffn}, rows);
      break;
    case FeedForwardKind::kExperts:
      experts(c, w, m, rows);
      break;
  }
}

// Adds the input of a layer from the token itself, through a gate that reads the stream.
void ForwardPass::add_layer_input(const Context& c, int layer, const StreamRows& rows) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const CpuLayer& w = weights_.layer(layer);
  const Activations& gated = rows.gated_input;
  multiply(c, {{w.per_layer_gate, gated.f32}},
           normalize(c, rows.x, stream_norm(kNoTensor, kNoTensor), 0, rows.count, rows.normed), rows.count);
  const std::size_t column = std::size_t(layer) * std::size_t(config_.per_layer_dim);
  activate_and_multiply(c, config_.activation, rows.inputs.from(column), config_.per_layer_dim, rows.count,
                        gated);
  add_residual(c, {w.per_layer_out, kNoTensor, m.per_layer_post_norm, gated}, rows);
}

// Number of rows for which one thread finishes a layer, so that activations stay in its L2 cache and no
// thread waits for another. All `rows` if threads would get too few, if weights are unpacked, which takes as
// long for few rows as for many, or if rows are sorted by expert.
int ForwardPass::rows_at_once(const CpuLayer& w, const BlockOutput& mixed, int rows) const {
  constexpr int kLeast = 32;
  for (const Linear* linear :
       {&mixed.weight, &w.w_gate, &w.w_up, &w.w_down, &w.per_layer_gate, &w.per_layer_out})
    if (linear->tensor && !linear->ready_panels()) return rows;
  if (w.router.tensor) return rows;
  const int threads = team_.size();
  if (rows < kLeast * threads) return rows;
  const std::size_t columns = std::size_t(std::max(config_.ffn_dim, 1));
  const int most = std::max(kLeast, int(bytes_at_once() / sizeof(float) / columns));
  const int blocks = round_up(ceil_div(rows, most), threads);
  const auto rows_of_thread = [&](int block) {  // maximum rows of a thread
    const int whole = rows / block, turns = whole / threads;
    return turns * block + (whole % threads == 0 ? rows % block : block);
  };
  const int longer = round_up(ceil_div(rows, blocks), kTileTokens), shorter = longer - kTileTokens;
  return shorter > 0 && rows_of_thread(shorter) < rows_of_thread(longer) ? shorter : longer;
}

ForwardPass::BlockOutput ForwardPass::attention(const Context& c, int layer, const Rows& all,
                                                const Rows& wanted) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const CpuLayer& w = weights_.layer(layer);
  const AttentionStep step = attention_step(layer);
  const AttentionItems items(step, wanted.tiles, team_.size());

  project_qkv(c, w, step, items, all, wanted);
  const Activations att = work_.att.of_width(config_.n_heads * step.config.value_dim);
  if (wanted.count() > 0) attend(c, step, items, work_.splits, att);
  return {w.wo, m.bo, m.post_attn_norm, att, bool(m.second_residual_norm)};
}

ForwardPass::BlockOutput ForwardPass::short_convolution(const Context& c, int layer, const Rows& wanted) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const CpuLayer& w = weights_.layer(layer);
  const int n = all_.count();
  const ConvStep step = conv_step(layer, work_.recurrent_in);
  multiply(c, {{w.conv_in, step.in}}, attention_input(c, m, n), n);
  causal_conv(c, step, all_.rows, wanted.rows, work_.conv);
  keep_rows(c, work_.x, config_.dim, wanted.rows);
  return {w.conv_out, kNoTensor, m.post_attn_norm, work_.conv};
}

// In a layer that also has attention, attention reads the same rows of x and adds to them first.
ForwardPass::BlockOutput ForwardPass::scan(const Context& c, int layer, const Rows& wanted) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const CpuLayer& w = weights_.layer(layer);
  const int n = all_.count(), n_wanted = wanted.count();
  const std::size_t first = states_.layout().first[std::size_t(layer)];
  const ScanStep step = {.config = config_,
                         .weights = m,
                         .first = first + config_.conv_state_values(layer),
                         .projected = work_.recurrent_in,
                         .convolved = work_.convolved.f32,
                         .out = work_.scanned};
  multiply(c, {{w.scan_in, step.projected}}, attention_input(c, m, n), n);
  const bool attends = has_attention(config_.kind(layer));
  if (attends) {
    const BlockOutput attended = attention(c, layer, all_, wanted);
    if (n_wanted > 0) add_residual(c, attended, stream(layer, 0, n_wanted, 0));
  }
  const ConvStep conv = conv_step(layer, step.projected.from(config_.scan_dim()));
  causal_conv(c, conv, all_.rows, all_.rows, work_.convolved);
  cpu::scan(c, step, all_.rows, sequences_);
  gate_scan(c, step, wanted.rows, work_.scan);
  if (!attends) keep_rows(c, work_.x, config_.dim, wanted.rows);
  return {w.scan_out, kNoTensor, m.post_attn_norm, work_.scan};
}

ForwardPass::BlockOutput ForwardPass::gated_delta(const Context& c, int layer, const Rows& wanted) {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const CpuLayer& w = weights_.layer(layer);
  const int n = all_.count();
  const std::size_t first = states_.layout().first[std::size_t(layer)];
  const FloatRows gate = work_.recurrent_in, qkv = gate.from(config_.scan_dim()),
                  alpha = qkv.from(config_.scan_channels()), beta = alpha.from(config_.scan_heads);
  const GatedDeltaStep step = {.config = config_,
                               .weights = m,
                               .q_norm = lengths_.data(),
                               .k_norm = lengths_.data() + config_.scan_key_dim,
                               .conv = conv_step(layer, qkv),
                               .first = first + config_.conv_state_values(layer),
                               .convolved = work_.convolved.f32,
                               .rates = alpha,
                               .out = work_.scanned};
  multiply(c,
           {{w.gated_delta_gate, gate},
            {w.gated_delta_qkv, qkv},
            {w.gated_delta_alpha, alpha},
            {w.gated_delta_beta, beta}},
           attention_input(c, m, n), n);
  cpu::gated_delta(c, step, all_.rows, sequences_);
  keep_rows(c, work_.x, config_.dim, wanted.rows);
  const Norm of_heads = {m.gated_delta_norm, kNoTensor, config_.scan_value_dim, config_.norm_eps,
                         NormKind::kRms};
  gated_norm(c, of_heads, step.out, gate, wanted.rows, config_.scan_heads, work_.scan);
  return {w.scan_out, kNoTensor, m.post_attn_norm, work_.scan};
}

ConvStep ForwardPass::conv_step(int layer, const FloatRows& in) const {
  const LayerWeights& m = model_.layers[std::size_t(layer)];
  const LayerKind kind = config_.kind(layer);
  return {.channels = config_.conv_channels(kind),
          .taps = config_.conv_taps,
          .filter = weights_.filter(layer),
          .bias = m.scan_conv_bias ? floats(m.scan_conv_bias) : nullptr,
          .first = states_.layout().first[std::size_t(layer)],
          .in = in,
          .gated = kind == LayerKind::kShortConv};
}

AttentionStep ForwardPass::attention_step(int layer) const {
  const std::size_t table = std::size_t(ropes_.of_layer[std::size_t(layer)]) * std::size_t(all_.count());
  return {
      .config = layer_configs_[layer],
      .weights = model_.layers[std::size_t(layer)],
      .cache = cache_,
      .layer = layer,
      .rotations =
          config_.uses_rope(layer) ? work_.rotations + table * std::size_t(config_.rope_dim) : nullptr,
      .ones = ones_.data(),
      .slopes = slopes_.empty() ? nullptr : slopes_.data(),
      .bias = bias_.empty() ? nullptr : bias_.data() + kBiasMargin,
      .relative_row_of =
          model_.relative_row_of ? floats(model_.relative_row_of) + config_.context_length : nullptr,
      .q = work_.q,
      .k = work_.k,
      .v = work_.v,
  };
}

// Stores keys and values of all rows in the cache, and computes queries of the wanted rows, which become the
// first rows of x. Prefetches the first keys of attention meanwhile.
void ForwardPass::project_qkv(const Context& c, const CpuLayer& w, const AttentionStep& step,
                              const AttentionItems& items, const Rows& all, const Rows& wanted) {
  const LayerWeights& m = step.weights;
  const Product q = {.weight = w.wq, .out = step.q, .bias = &m.bq};
  const Product k = {.weight = w.wk, .out = step.k, .bias = &m.bk, .part = CachePart::kKeys};
  const Product v = {.weight = w.wv, .out = step.v, .bias = &m.bv, .part = CachePart::kValues};
  const int n = all.count(), n_wanted = wanted.count();
  if (!config_.caches(step.layer)) return multiply(c, {q}, attention_input(c, m, n), n, &items);
  const CacheWriter cache(step, all.rows, key_blocks_, work_.cache_done);
  // A norm of the stream itself has filled work_.normed already.
  const bool ready = step.layer > 0 && m.attn_residual_norm;
  const NormedRows input = ready ? NormedRows(work_.normed) : attention_input(c, m, n);
  if (n_wanted == n)
    multiply(c, {q, k, v}, input, n, &items, &cache);
  else
    multiply(c, {k, v}, input, n, &items, &cache);
  cache.store_rest(c);
  if (n_wanted == n || n_wanted == 0) return;
  keep_rows(c, work_.x, config_.dim, wanted.rows);
  keep_rows(c, work_.inputs, config_.n_layers * config_.per_layer_dim, wanted.rows);
  multiply(c, {q}, attention_input(c, m, n_wanted), n_wanted);
}

// x += w * in, or x += norm(w * in) in a model with norms after its blocks.
void ForwardPass::add_residual(const Context& c, const BlockOutput& w, const StreamRows& rows) {
  const bool add = !w.norm && !w.separate;
  fill_up(c, w.in, int(w.weight.tensor.cols), rows.count);
  multiply(c, {{.weight = w.weight, .out = add ? rows.x : rows.block, .bias = &w.bias, .add = add}},
           NormedRows(w.in), rows.count);
  if (w.norm) add_normalized(c, rows.block, norm(w.norm, kNoTensor, config_.norm_eps), rows.count, rows.x);
}

// Applies the norms of the residual stream after attention. If there are two, the layer's input is added
// again between them.
void ForwardPass::normalize_attended(const Context& c, const LayerWeights& m, const StreamRows& rows) {
  if (!m.second_residual_norm)
    return normalize_stream(c, m.attn_residual_norm, m.attn_residual_norm_bias, rows);
  const float eps = config_.stream_eps();
  normalize_twice(c, rows.block, norm(m.attn_residual_norm, m.attn_residual_norm_bias, eps),
                  norm(m.second_residual_norm, m.second_residual_norm_bias, eps), rows.count, rows.x,
                  rows.normed);
}

// x = norm(x), in a model with norms of the residual stream itself.
void ForwardPass::normalize_stream(const Context& c, const Tensor& weight, const Tensor& bias,
                                   const StreamRows& rows) {
  if (weight)
    normalize_in_place(c, norm(weight, bias, config_.stream_eps()), rows.count, rows.x, rows.normed);
}

NormedRows ForwardPass::feed_forward_input(const Context& c, const LayerWeights& m, const StreamRows& rows) {
  // A norm of the stream itself has filled rows.normed already.
  if (m.attn_residual_norm) return NormedRows(rows.normed);
  return normalize(c, rows.x, stream_norm(m.ffn_norm, m.ffn_norm_bias), 0, rows.count, rows.normed);
}

// Passes each row through the experts that the router chooses for it, and through the shared one.
void ForwardPass::experts(const Context& c, const CpuLayer& w, const LayerWeights& m,
                          const StreamRows& rows) {
  const Routes routes = work_.routes.of(rows.count);
  const NormedRows normed = feed_forward_input(c, m, rows);
  multiply(c, {{.weight = w.router, .out = routes.scores, .bias = &m.router_offset}}, normed, rows.count);
  route(c, config_, m.router_bias, routes);
  gather_rows(c, normed, config_.dim, routes, work_.routed);
  multiply_gated_experts(
      c, {w.gate_experts, w.up_experts, m.gate_experts_bias, m.up_experts_bias, config_.activation}, routes,
      work_.routed, work_.expert_ffn);
  if (config_.shared_dim > 0) {
    multiply_gated(c, {w.shared_gate, w.shared_up, nullptr, nullptr, config_.activation}, normed, rows.count,
                   rows.ffn);
    add_residual(c, {w.shared_down, kNoTensor, kNoTensor, rows.ffn}, rows);
  }
  add_experts(c, {w.down_experts, m.down_experts_bias, floats(m.experts_bias)}, routes, work_.expert_ffn,
              rows.x);
}

void ForwardPass::head(const Context& c) {
  const int n = int(logits_.size());
  for (int first = 0; first < n; first += kHeadRows) {
    const int count = std::min(kHeadRows, n - first);
    const NormedRows normed =
        normalize(c, work_.x, stream_norm(head_norm_, head_norm_bias_), first, count, work_.normed);
    multiply_head(c, weights_.output, model_.output_bias, normed, count, config_.logit_cap,
                  logits_.data() + first, first);
    use_logits(c, std::span(outputs_).subspan(std::size_t(first), std::size_t(count)));
  }
}

void ForwardPass::deliver_hidden(const Context& c) {
  const int first = int(logits_.size());
  const Norm norm = stream_norm(model_.output_norm, model_.output_norm_bias);
  c.worker.for_each(int(outputs_.size()) - first, [&](int i) {
    const auto& [chunk, row, index] = outputs_[std::size_t(first + i)];
    float* x = work_.x.row(index);
    if (auto* pooled = std::get_if<PooledOutput>(&chunk->output)) {
      for (int j = index; j < index + pooled->rows; ++j)
        apply(c.kernels, norm, work_.x.row(j), work_.x.row(j));
      return pooled->pool(x, work_.x.stride);
    }
    const auto& hidden = std::get<HiddenOutput>(chunk->output);
    float* out = hidden.states + std::ptrdiff_t(row) * config_.dim;
    if (hidden.normed)
      apply(c.kernels, norm, x, out);
    else
      std::transform(x, x + config_.dim, out, [&](float value) { return value * config_.residual_scale; });
  });
}

// Computes log probabilities of targets, and samples tokens, if requested.
void ForwardPass::use_logits(const Context& c, std::span<const Wanted> wanted) {
  if (std::none_of(wanted.begin(), wanted.end(),
                   [](const Wanted& w) { return logits_use(w.chunk->output) == LogitsUse::kPass; }))
    return;
  const float* const* logits_of = logits_.data() + (wanted.data() - outputs_.data());
  const int n = int(wanted.size());
  // One thread handles all rows of a chunk, as earlier rows determine which later ones count.
  const auto choose = [&](SampledOutput& sampled, int i) {
    const Chunk* chunk = wanted[std::size_t(i)].chunk;
    if (i > 0 && wanted[std::size_t(i) - 1].chunk == chunk) return;
    for (int j = i; j < n && wanted[std::size_t(j)].chunk == chunk; ++j)
      sampled.choose(wanted[std::size_t(j)].row, {logits_of[j], std::size_t(config_.vocab_size)});
  };
  const auto score = [&](const LogProbsOutput& scored, int i) {
    const int row = wanted[std::size_t(i)].row;
    const TokenId target = scored.targets[std::size_t(row)];
    if (target < 0) return;
    const float* logits = logits_of[i];
    const float largest = *std::max_element(logits, logits + config_.vocab_size);
    const double log_sum = std::log(kernels_.sum_exp(logits, largest, config_.vocab_size));
    scored.log_probs[row] = float(double(logits[target]) - double(largest) - log_sum);
  };
  c.worker.for_each(n, [&](int i) {
    std::visit(
        Overloaded{
            [&](SampledOutput& sampled) { choose(sampled, i); },
            [&](const LogProbsOutput& scored) { score(scored, i); },
            [](const OneOf<NoOutput, GreedyOutput, LogitsOutput, HiddenOutput, PooledOutput> auto&) {}},
        wanted[std::size_t(i)].chunk->output);
  });
}

// Lists the rows of the pass and of its last layer, and reserves memory for them.
void ForwardPass::plan(std::span<Chunk> chunks) {
  int n = 0, n_wanted = 0, n_used = 0;
  std::size_t n_pages = 0, longest = 0;
  for (const Chunk& chunk : chunks) {
    longest = std::max(longest, std::size_t(chunk.visible_end()));
    n += int(chunk.tokens.size());
    n_wanted += rows_of(chunk.output);
    if (logits_use(chunk.output) == LogitsUse::kPass) n_used += rows_of(chunk.output);
    n_pages += chunk.cache->pages().size();
  }
  work_.reserve(config_, weights_, ropes_.ropes.size(), n, std::min(n_used, kHeadRows), team_.size());
  pages_.resize(n_pages);
  all_.rows.clear();
  all_.tiles.clear();
  sequences_.clear();
  key_blocks_.clear();
  wanted_.rows.clear();
  wanted_.tiles.clear();
  outputs_.clear();
  logits_.clear();

  const auto tile_rows = [&](int total) { return query_tile_rows(total, config_.n_kv_heads, team_.size()); };
  const bool attends = config_.n_heads > 0;  // whether any layer has attention
  std::byte** pages = pages_.data();
  const auto add = [&](Chunk& chunk) {
    const int first = all_.count(), first_wanted = wanted_.count();
    const int count = int(chunk.tokens.size()), count_wanted = rows_of(chunk.output);
    const auto* logits = std::get_if<LogitsOutput>(&chunk.output);
    cache_.addresses(chunk.cache->pages(), pages);
    const int first_type = first_segment(config_, chunk.tokens, chunk.segment);
    const float* state = states_.values(chunk.states.before);
    for (int i = 0; i < count; ++i) {
      const TokenId token = chunk.tokens[std::size_t(i)];
      all_.rows.push_back({token, int(i >= first_type), chunk.position + i, first + i, pages, i, state});
    }
    for (const StateWrite& write : chunk.states.writes)
      all_.rows[std::size_t(first + write.tokens - 1)].next = states_.values(write.state);
    const auto rows = std::span<const Row>(all_.rows).subspan(std::size_t(first));
    sequences_.push_back({first, count});
    if (attends) {
      add_tiles(all_.tiles, rows, first, tile_rows(n), chunk.visible_end());
      add_key_blocks(key_blocks_, rows, first);
    }
    for (int i = 0; i < count_wanted; ++i) {
      wanted_.rows.push_back(all_.rows[std::size_t(first + count - count_wanted + i)]);
      if (i == 0 || !std::holds_alternative<PooledOutput>(chunk.output))
        outputs_.push_back({&chunk, i, first_wanted + i});
      if (logits_use(chunk.output) != LogitsUse::kNone) logits_.push_back(logits ? logits->logits : nullptr);
    }
    if (attends)
      add_tiles(wanted_.tiles, std::span(wanted_.rows).subspan(std::size_t(first_wanted)), first_wanted,
                tile_rows(n_wanted), chunk.visible_end());
    pages += chunk.cache->pages().size();
  };
  for (const bool with_logits : {true, false})
    for (Chunk& chunk : chunks)
      if ((logits_use(chunk.output) != LogitsUse::kNone) == with_logits) add(chunk);
  // Logits that only the pass needs share the memory of kHeadRows rows.
  std::size_t used = 0;
  for (std::size_t i = 0; i < logits_.size(); ++i)
    if (logits_use(outputs_[i].chunk->output) == LogitsUse::kPass)
      logits_[i] = work_.logits + used++ % kHeadRows * std::size_t(config_.vocab_size);
  for (Rows* rows : {&all_, &wanted_}) {
    if (!attends) break;
    deal(rows->tiles, team_.size());
    // Assumes a layer without a window: with one, splits are fewer and items more alike.
    int splits = 1;
    for (const Config& config : layer_configs_.distinct())
      splits = std::max(splits, attention_splits(config, 0, rows->tiles, team_.size()));
    if (splits > 1) work_.reserve_splits(config_, splits, rows->count());
  }
  for (Scratch& scratch : scratch_) {
    scratch.best.assign(logits_.size(), {});
    scratch.multiply_adds = 0;
    if (model_.relative_row_of) scratch.reserve_added(longest);
  }
}

void ForwardPass::deliver() {
  for (std::size_t i = 0; i < outputs_.size(); ++i)
    if (auto* greedy = std::get_if<GreedyOutput>(&outputs_[i].chunk->output))
      greedy->choices.chosen[std::size_t(outputs_[i].row)] = best_of(scratch_, int(i)).index;
}

}  // namespace metal_prefill::cpu
