#include "forward_pass.h"

#include <algorithm>

namespace metal_prefill::metal {

void ForwardPass::encode(Encoder& e, const PassRows& rows, PassBuffers& buffers) const {
  const PassTables tables = this->tables(rows, buffers);
  Pass pass = {.e = e,
               .rows = rows,
               .buffers = buffers,
               .tables = tables,
               .all = {all_rows(rows), rows.all},
               .wanted = {wanted_rows(rows), rows.wanted},
               .a = activations(rows, buffers)};

  embed(pass);
  for (int layer = 0; layer < config_.n_layers; ++layer) {
    // The last layer with K, V or a state of its own stores them for every row, and continues only with rows
    // that have an output. Later layers only have those rows.
    e.enter_layer(layer);
    encode_layer(pass, layer, layer <= last_stored_ ? pass.all : pass.wanted,
                 layer < last_stored_ ? pass.all : pass.wanted);
  }
  e.leave_layers();
  score(pass);
  find_largest(pass);
  deliver_logits(pass);
  deliver_hidden(pass);
}

Sequences ForwardPass::sequences(const Pass& pass, const Part& part, int layer) const {
  const PassPart& rows = part.part;
  const PassRange tiles = rows.tiles.empty() ? PassRange{} : rows.tiles[tile_shape_of_[std::size_t(layer)]];
  return {
      .part = rows,
      .rows = pass.tables.rows.at(std::size_t(rows.first) * sizeof(PassRow)),
      .tiles = pass.tables.tiles.at(std::size_t(tiles.first) * sizeof(AttentionTile)),
      .tile_table = std::span(pass.rows.tiles).subspan(std::size_t(tiles.first), std::size_t(tiles.count)),
      .pages = pass.tables.pages};
}

void ForwardPass::embed(const Pass& pass) const {
  const int count = pass.all.rows.count;
  const auto add = [&](const Projection& table, const TokenIds& ids, float scale, Write write) {
    ops::embed(pass.e, table, ids, embedding_projection_ ? pass.a.embedded : pass.a.x, count, scale, write);
  };
  const View choices = pass.buffers.choices();
  const TokenIds ids = choices ? ids_of(choices) : TokenIds{pass.tables.ids};
  add(embedding_, ids, config_.stream_embedding_scale(), Write::kStore);
  if (token_types_) add(*token_types_, {pass.tables.types}, 1.0f, Write::kAccumulate);
  if (position_embedding_)
    add(*position_embedding_, positions_of(pass.tables.rows), 1.0f, Write::kAccumulate);
  if (embedding_projection_)
    project_embedding(pass);
  else if (embedding_norm_.weight)
    ops::layernorm_stream(pass.e, embedding_norm_, {}, pass.a.x, pass.a.normed, count);
  if (inputs_projection_) project_layer_inputs(pass);
}

// Computes the inputs of all layers from the tokens themselves.
void ForwardPass::project_layer_inputs(const Pass& pass) const {
  const Activations& a = pass.a;
  const Rows& rows = pass.all.rows;
  project(pass.e, *inputs_projection_, normalized(pass.e, no_norm(), a.x, a.normed, rows),
          {a.inputs, inputs_projection_->out_dim}, rows, Write::kStore);
  ops::layer_inputs(pass.e, inputs_norm_, inputs_filled_, pass.tables.layer_rows, a.inputs, config_.n_layers,
                    rows.count);
}

void ForwardPass::project_embedding(const Pass& pass) const {
  const Activations& a = pass.a;
  const Rows& rows = pass.all.rows;
  ops::norm(pass.e, embedding_norm_, a.embedded, a.normed, rows.count, rows.precision());
  project(pass.e, *embedding_projection_, a.normed, {a.x, config_.dim}, rows, Write::kStore);
  if (embedding_projection_bias_)
    ops::add_bias(pass.e, embedding_projection_bias_, a.x, config_.dim, rows.count);
  if (norms_stream_) ops::norm(pass.e, no_norm(), a.x, a.normed, rows.count, rows.precision());
}

void ForwardPass::encode_layer(Pass& pass, int layer, const Part& in, const Part& wanted) const {
  if (in.rows.count == 0) return;
  const Rows& rows = wanted.rows;
  project_in(pass, layer, in.rows);
  if (config_.parallel) feed_forward(pass, layer, rows);  // reads x before attention adds to it
  switch (config_.kind(layer)) {
    case LayerKind::kAttention:
      attention(pass, layer, in, wanted);
      break;
    case LayerKind::kShortConv:
      short_convolution(pass, layer, rows);
      break;
    case LayerKind::kStateSpace:
    case LayerKind::kAttentionAndStateSpace:
      scan(pass, layer, wanted);
      break;
    case LayerKind::kGatedDelta:
      gated_delta(pass, layer, rows);
      break;
  }
  if (!config_.parallel) feed_forward(pass, layer, rows);
  add_layer_input(pass, layer, rows);
}

void ForwardPass::feed_forward(const Pass& pass, int layer, const Rows& rows) const {
  if (rows.count == 0) return;
  const Layer& w = layers_[std::size_t(layer)];
  const BlockOutput& before = has_matrix_state(config_.kind(layer)) ? w.scan_output : w.attn_output;
  const View x = pass.a.x.row(std::size_t(rows.first), config_.dim);
  switch (config_.feed_forward(layer)) {
    case FeedForwardKind::kNone:
      break;
    case FeedForwardKind::kDense:
      dense(pass, w.dense, w.ffn_norm,
            fuses_norm(w.ffn_norm, rows) ? x : normalized_after(pass, before, w.ffn_norm, x, rows), x, rows);
      break;
    case FeedForwardKind::kExperts:
      experts(pass, w, normalized_after(pass, before, w.ffn_norm, x, rows), x, rows);
      break;
  }
}

// Adds the input of a layer from the token itself, through a gate that reads the stream.
void ForwardPass::add_layer_input(const Pass& pass, int layer, const Rows& rows) const {
  const Layer& w = layers_[std::size_t(layer)];
  if (rows.count == 0 || !w.input_gate) return;
  const Activations& a = pass.a;
  const int dim = config_.per_layer_dim, columns = config_.n_layers * dim;
  const View x = a.x.row(std::size_t(rows.first), config_.dim),
             inputs = a.inputs.row(std::size_t(rows.first), columns).row(std::size_t(layer), dim);
  project(pass.e, *w.input_gate, normalized_after(pass, w.dense.output, no_norm(), x, rows), {a.gate_up, dim},
          rows, Write::kStore);
  ops::gate_input(pass.e, a.gate_up, {inputs, columns}, a.ffn, dim, rows.count, activation_,
                  rows.precision());
  add_residual(pass, w.input_output, a.ffn, x, rows);
}

void ForwardPass::short_convolution(Pass& pass, int layer, const Rows& wanted) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Activations& a = pass.a;
  convolve(pass, layer, a.conv, wanted);
  if (wanted.count > 0)
    add_residual(pass, w.attn_output, a.conv, a.x.row(std::size_t(wanted.first), config_.dim), wanted);
}

// Encodes the first projections of a layer, for its attention and its state, from the same input.
void ForwardPass::project_in(const Pass& pass, int layer, const Rows& rows) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Activations& a = pass.a;
  const View x = a.x.row(std::size_t(rows.first), config_.dim);
  const View input = fuses_norm(w.attn_norm, rows) ? x : normalized(pass.e, w.attn_norm, x, a.normed, rows);
  const Encoder::Overlap overlap(pass.e);
  normed_projections(pass.e, w.attn_norm, w.in, input, {a.projected, projected_row(layer).stride}, rows);
}

ops::ConvInputs ForwardPass::conv_inputs(const Pass& pass, int layer) const {
  const View filter = layers_[std::size_t(layer)].conv, bias = layers_[std::size_t(layer)].conv_bias;
  return {filter, bias.or_any(filter), pass.tables.states, pass.buffers.states(layer)};
}

CausalConvArgs ForwardPass::conv_args(const Pass& pass, int layer, const Rows& wanted) const {
  const LayerKind kind = config_.kind(layer);
  const int count = pass.all.rows.count;
  return {.channels = u32_t(config_.conv_channels(kind)),
          .taps = u32_t(config_.conv_taps),
          .in_stride = u32_t(projected_row(layer).stride),
          .slot_stride = u32_t(state_layout_.values),
          .tokens = u32_t(count),
          .first_out = u32_t(count - wanted.count),
          .gated = kind == LayerKind::kShortConv,
          .biased = bool(layers_[std::size_t(layer)].conv_bias)};
}

void ForwardPass::convolve(const Pass& pass, int layer, const View& out, const Rows& wanted) const {
  const View in = pass.a.projected.row(1, projected_row(layer).conv);
  ops::causal_conv(pass.e, conv_inputs(pass, layer), in, out, conv_args(pass, layer, wanted),
                   wanted.precision(), pass.rows.all.runs);
}

// In a layer that also has attention, attention has already added to the rows and, if it rotates separately,
// convolved them.
void ForwardPass::scan(Pass& pass, int layer, const Part& wanted) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Activations& a = pass.a;
  const Rows &all = pass.all.rows, &rows = wanted.rows;
  const LayerKind kind = config_.kind(layer);
  const ProjectedRow row = projected_row(layer);
  const View projected = a.projected.row(1, row.recurrent);
  const u32_t stride = u32_t(row.stride), first_out = u32_t(all.count - rows.count);
  if (has_attention(kind)) attention(pass, layer, pass.all, wanted);
  if (!has_attention(kind) || rotates_in_attention(pass, pass.all, wanted))
    convolve(pass, layer, a.convolved, all.in_float32());
  // A norm needs whole rows; without one, the gate is part of the scan.
  const bool has_norm = bool(w.scan.norm);
  ops::scan(pass.e, w.scan, projected, a.convolved, pass.tables.states, matrices(pass, layer),
            has_norm ? a.scanned : a.scan_out,
            {.heads = u32_t(config_.scan_heads),
             .heads_per_group = u32_t(config_.scan_heads / config_.scan_groups),
             .dim = u32_t(config_.scan_value_dim),
             .rows = u32_t(config_.scan_key_dim),
             .row_stride = stride,
             .dt_column = u32_t(config_.scan_dim() + config_.scan_channels()),
             .slot_stride = u32_t(state_layout_.values),
             .tokens = u32_t(all.count),
             .first_out = first_out,
             .gated = !has_norm},
            pass.rows.chunks(), has_norm ? Precision::kF32 : rows.precision(), pass.rows.all.runs);
  if (rows.count == 0) return;
  if (has_norm)
    ops::scan_norm(pass.e, w.scan, projected, a.scanned, a.scan_out,
                   {.inner = u32_t(config_.scan_dim()),
                    .groups = u32_t(config_.scan_groups),
                    .row_stride = stride,
                    .first_out = first_out,
                    .eps = config_.norm_eps},
                   rows.count, rows.precision());
  add_residual(pass, w.scan_output, a.scan_out, a.x.row(std::size_t(rows.first), config_.dim), rows);
}

void ForwardPass::gated_delta(Pass& pass, int layer, const Rows& wanted) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Activations& a = pass.a;
  const Rows& all = pass.all.rows;
  const ProjectedRow row = projected_row(layer);
  const int stride = row.stride, inner = config_.scan_dim();
  const View gate = a.projected.row(1, row.recurrent), qkv = a.projected.row(1, row.conv),
             rates = qkv.row(1, config_.scan_channels());
  convolve(pass, layer, a.convolved, all.in_float32());
  ops::gated_delta(pass.e, w.gated_delta, a.convolved, rates, pass.tables.states, matrices(pass, layer),
                   a.scanned,
                   {.heads = u32_t(config_.scan_heads),
                    .groups = u32_t(config_.scan_groups),
                    .key_dim = u32_t(config_.scan_key_dim),
                    .value_dim = u32_t(config_.scan_value_dim),
                    .in_stride = u32_t(config_.scan_channels()),
                    .rate_stride = u32_t(stride),
                    .slot_stride = u32_t(state_layout_.values),
                    .tokens = u32_t(all.count)},
                   pass.rows.chunks(), pass.rows.all.runs);
  if (wanted.count == 0) return;
  const std::size_t first = std::size_t(wanted.first);
  ops::gated_norm(pass.e, w.gated_delta.norm, a.scanned.row(first, inner), {gate.row(first, stride), stride},
                  a.scan_out, config_.scan_heads, wanted.count, wanted.precision());
  add_residual(pass, w.scan_output, a.scan_out, a.x.row(first, config_.dim), wanted);
}

View ForwardPass::matrices(const Pass& pass, int layer) const {
  return pass.buffers.states(layer).at(config_.conv_state_values(layer) * sizeof(float));
}

void ForwardPass::attention(Pass& pass, int layer, const Part& in, const Part& wanted) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Activations& a = pass.a;
  const Rows& rows = wanted.rows;
  const Sequences all = sequences(pass, in, layer), own = sequences(pass, wanted, layer);
  const ProjectedRow row = projected_row(layer);
  const View qkv = a.projected.row(1, row.qkv);
  const LayerCache cache = pass.buffers.cache(layer);
  const View table = pass.buffers.rope_table(layer);
  const RopeInputs rope_inputs = {w.bias.or_any(table), w.q_norm.weight.or_any(table),
                                  w.k_norm.weight.or_any(table), table};

  if (config_.qk_norm_place == QkNormPlace::kRows) norm_rows_of_qk(pass, layer);
  const RopeArgs rope = rope_args(layer, rows.count == 0);
  const bool rope_with_attention = rotates_in_attention(pass, in, wanted);
  if (!rope_with_attention && has_state_space(config_.kind(layer)))
    ops::rope_append_conv(pass.e, rope_inputs, conv_inputs(pass, layer), a.projected, all, cache, a.convolved,
                          {.rope = rope,
                           .conv = conv_args(pass, layer, in.rows),
                           .qkv_column = u32_t(row.qkv),
                           .conv_column = u32_t(row.conv),
                           .head_groups = 0});
  else if (!rope_with_attention)
    ops::rope_append(pass.e, rope_inputs, qkv, all, cache, rope);
  if (rows.count == 0) return;

  AttentionArgs attention = attention_args(layer);
  attention.has_sinks = bool(w.sinks);
  const View q = qkv.row(std::size_t(rows.first - in.rows.first), row.stride),
             x = a.x.row(std::size_t(rows.first), config_.dim);
  if (relative_row_of_) {
    const RelativeScoresArgs relative = relative_args(attention, pass.rows);
    ops::relative_scores(pass.e, {w.relative_keys, w.relative_queries, relative_row_of_}, q, own, cache,
                         a.relative, relative);
    attention.added_keys = relative.keys;
  }
  if (rope_with_attention)
    ops::rope_attention_decode(pass.e, rope_inputs, qkv, own, cache, {a.partial, a.att}, {rope, attention});
  else if (rows.path == Path::kManyTokens)
    ops::attention_prefill(pass.e, q, own, cache,
                           (relative_row_of_ ? a.relative : position_bias_).or_any(table),
                           w.sinks.or_any(table), a.att, attention);
  else
    ops::attention_decode(pass.e, q, own, cache, {a.partial, a.att}, attention);
  if (config_.query_gate)
    ops::gate_heads(pass.e, q, a.att,
                    {.n_heads = attention.n_heads,
                     .value_dim = attention.value_dim,
                     .q_stride = attention.q_stride,
                     .query_step = attention.query_step,
                     .tokens = u32_t(rows.count)},
                    rows.precision());
  add_residual(pass, w.attn_output, a.att, x, rows);
}

bool ForwardPass::rotates_in_attention(const Pass& pass, const Part& in, const Part& wanted) {
  return pass.rows.one_each && wanted.rows.count == in.rows.count;
}

void ForwardPass::norm_rows_of_qk(const Pass& pass, int layer) const {
  const Layer& w = layers_[std::size_t(layer)];
  if (!w.q_norm.weight && !w.k_norm.weight) return;
  const ProjectedRow row = projected_row(layer);
  const View q = pass.a.projected.row(1, row.qkv), k = q.row(1, config_.n_heads * config_.key_dim);
  const Encoder::Overlap overlap(pass.e);
  if (w.q_norm.weight) ops::norm_in_place(pass.e, w.q_norm, w.q_bias, {q, row.stride}, pass.all.rows.count);
  if (w.k_norm.weight) ops::norm_in_place(pass.e, w.k_norm, w.k_bias, {k, row.stride}, pass.all.rows.count);
}

void ForwardPass::dense(const Pass& pass, const Dense& w, const Norm& norm, const View& input, const View& x,
                        const Rows& rows) const {
  Encoder& e = pass.e;
  const Activations& a = pass.a;
  const bool few = rows.path == Path::kFewTokens;
  if (!w.separate() && fuses_norm(norm, rows)) {
    ops::rmsnorm_matvec_swiglu(e, w.gate_up[0], norm, input, a.ffn, activation_);
  } else if (!w.separate()) {
    if (few)
      ops::matvec_swiglu(e, w.gate_up[0], input, a.ffn, rows.count, activation_);
    else
      ops::matmul_swiglu(e, w.gate_up[0], input, a.ffn, rows.count, activation_);
  } else {
    const int columns = (w.gated ? 2 : 1) * w.dim;
    {
      const Encoder::Overlap overlap(e);
      normed_projections(e, norm, w.gate_up, input, {a.gate_up, columns}, rows);
    }
    ops::swiglu(e, {w.bias, a.gate_up, w.dim, w.gated, activation_}, a.ffn, rows.count, rows.precision());
  }
  add_residual(pass, w.output, a.ffn, x, rows);
}

// Passes each row through the experts that the router chooses for it, and through the one for all rows.
void ForwardPass::experts(const Pass& pass, const Layer& w, const View& input, const View& x,
                          const Rows& rows) const {
  Encoder& e = pass.e;
  const Activations& a = pass.a;
  const int n = rows.count;
  ops::choose_experts(e, w.router, w.ffn_norm, x, a.routes, n, config_.router_score == RouterScore::kSigmoid,
                      config_.normalize_routes, config_.route_scale);
  if (rows.path == Path::kFewTokens) {
    ops::matvec_experts(e, w.experts_up, input, a.routes, a.expert_ffn, n, activation_);
    ops::matvec_experts(e, w.experts_down, a.expert_ffn, a.routes, a.expert_out, n);
  } else {
    ops::sort_routes(e, a.routes, n);
    ops::matmul_experts(e, w.experts_up, input, a.routes, a.expert_ffn, n, activation_);
    ops::matmul_experts(e, w.experts_down, a.expert_ffn, a.routes, a.expert_out, n);
  }
  if (!w.dense.gate_up.empty()) dense(pass, w.dense, {}, input, x, rows);
  ops::add_experts(e, a.routes, a.expert_out, x, config_.dim, n);
  end_block(pass, w.experts_output, x, rows);
}

View ForwardPass::normalized(Encoder& e, const Norm& norm, const View& x, const View& normed,
                             const Rows& rows) const {
  if (!norm.weight && norms_stream_) return normed;
  if (!norm.weight && rows.precision() == Precision::kF32) return x;
  ops::norm(e, norm, x, normed, rows.count, rows.precision());
  return normed;
}

bool ForwardPass::leaves_normed(const BlockOutput& output, const Rows& rows) const {
  if (!output.next) return false;
  return output.next->weight ? !fuses_norm(*output.next, rows) : rows.precision() == Precision::kF16;
}

View ForwardPass::normalized_after(const Pass& pass, const BlockOutput& output, const Norm& norm,
                                   const View& x, const Rows& rows) const {
  return leaves_normed(output, rows) ? pass.a.normed : normalized(pass.e, norm, x, pass.a.normed, rows);
}

void ForwardPass::normed_projections(Encoder& e, const Norm& norm, const std::vector<Projection>& projections,
                                     const View& input, const StridedRows& y, const Rows& rows) const {
  const bool fused = fuses_norm(norm, rows);
  for (const Projection& w : projections) {
    if (fused)
      ops::rmsnorm_matvec(e, w, norm, input, y);
    else
      project(e, w, input, y, rows, Write::kStore);
  }
}

void ForwardPass::project(Encoder& e, const Projection& w, const View& x, const StridedRows& y,
                          const Rows& rows, Write write) const {
  if (rows.path == Path::kFewTokens)
    ops::matvec(e, w, x, y, rows.count, write);
  else
    ops::matmul(e, w, x, y, rows.count, write);
}

void ForwardPass::add_residual(const Pass& pass, const BlockOutput& output, const View& x,
                               const View& residual, const Rows& rows) const {
  if (output.norm.weight || output.second_norm.weight) {
    project(pass.e, output.w, x, {pass.a.block, config_.dim}, rows, Write::kStore);
    if (output.second_norm.weight)
      ops::layernorm_twice(pass.e, output.residual_norm, output.bias, output.second_norm, pass.a.block,
                           residual, pass.a.normed, rows.count);
    else if (leaves_normed(output, rows))
      ops::rmsnorm_add_norm(pass.e, output.norm, *output.next, pass.a.block, residual, pass.a.normed,
                            rows.count, rows.precision());
    else
      ops::rmsnorm_add(pass.e, output.norm, output.scale, pass.a.block, residual, rows.count);
    return;
  }
  project(pass.e, output.w, x, {residual, config_.dim}, rows, Write::kAccumulate);
  end_block(pass, output, residual, rows);
}

void ForwardPass::end_block(const Pass& pass, const BlockOutput& output, const View& residual,
                            const Rows& rows) const {
  if (output.residual_norm.weight)
    ops::layernorm_stream(pass.e, output.residual_norm, output.bias, residual, pass.a.normed, rows.count);
  else if (output.bias)
    ops::add_bias(pass.e, output.bias, residual, config_.dim, rows.count);
}

void ForwardPass::head(const Pass& pass, const Rows& rows, const View& logits) const {
  // Never fused: each of the many rows of the vocabulary would repeat the norm.
  const View x = pass.a.x.row(std::size_t(rows.first), config_.dim);
  const View input = normalized(pass.e, head_norm_, x, pass.a.normed, rows);
  for (const Projection& w : output_)
    project(pass.e, w, input, {logits, config_.vocab_size}, rows, Write::kStore);
  if (output_bias_) ops::add_bias(pass.e, output_bias_, logits, config_.vocab_size, rows.count);
  if (config_.logit_cap > 0)
    ops::soft_cap(pass.e, logits, std::size_t(rows.count) * std::size_t(config_.vocab_size),
                  config_.logit_cap);
}

void ForwardPass::score(const Pass& pass) const {
  const auto [first, count] = pass.rows.scored;
  if (count == 0) return;
  const View log_probs = pass.buffers.get(BufferName::kLogProbs, std::size_t(count) * sizeof(float));
  for (int i = 0; i < count; i += kHeadRows) {
    const Rows rows = {first + i, std::min(count - i, kHeadRows), pass.wanted.rows.path};
    head(pass, rows, pass.a.logits);
    ops::log_prob(pass.e, pass.a.logits, pass.tables.targets.row(std::size_t(i), 1),
                  log_probs.row(std::size_t(i), 1), config_.vocab_size, rows.count);
  }
}

void ForwardPass::find_largest(const Pass& pass) const {
  const auto [first, count] = pass.rows.greedy;
  if (count == 0) return;
  const View candidates =
      pass.buffers.get(BufferName::kCandidates, ops::candidates_bytes(tuning_, std::min(count, kHeadRows)));
  const View result = pass.buffers.get(BufferName::kResult, std::size_t(count) * sizeof(Candidate));
  for (int i = 0; i < count; i += kHeadRows) {
    const Rows rows = {first + i, std::min(count - i, kHeadRows), Path::kFewTokens};
    head(pass, rows, pass.a.logits);
    ops::argmax(pass.e, pass.a.logits, candidates, result.at(std::size_t(i) * sizeof(Candidate)),
                config_.vocab_size, rows.count);
  }
}

void ForwardPass::deliver_logits(const Pass& pass) const {
  const auto [first, count] = pass.rows.logits;
  if (count == 0) return;
  const std::size_t bytes = std::size_t(count) * std::size_t(config_.vocab_size) * sizeof(float);
  head(pass, {first, count, Path::kFewTokens}, pass.buffers.get(BufferName::kHostLogits, bytes));
}

void ForwardPass::deliver_hidden(const Pass& pass) const {
  const PassRange &hidden = pass.rows.hidden, &residual = pass.rows.residual;
  const std::size_t count = std::size_t(hidden.count + residual.count);
  if (count == 0) return;
  const View out = pass.buffers.get(BufferName::kHidden, count * std::size_t(config_.dim) * sizeof(float));
  const auto deliver = [&](const Norm& norm, const PassRange& rows, int at) {
    if (rows.count > 0)
      ops::norm(pass.e, norm, pass.a.x.row(std::size_t(rows.first), config_.dim),
                out.row(std::size_t(at), config_.dim), rows.count, Precision::kF32);
  };
  deliver(output_norm_, hidden, 0);
  deliver(no_norm(), residual, hidden.count);
}

}  // namespace metal_prefill::metal
