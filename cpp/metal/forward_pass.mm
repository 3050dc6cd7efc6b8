#include "forward_pass.h"

#include <algorithm>
#include <cmath>

namespace metal_prefill::metal {

namespace {

// Tokens whose logits are in memory together when scoring.
constexpr int kScoredTogether = 32;

// Row `n` of an array of 4-byte elements.
View row(const View& view, std::size_t n, int columns) {
  return {view.buffer, view.offset + n * std::size_t(columns) * sizeof(float)};
}

}  // namespace

void ForwardPass::encode(Encoder& e, const Chunk& chunk, Batch& batch, const KvCache& cache,
                         const std::vector<id<MTLBuffer>>& rope_tables, CallCounters& counters) const {
  const Activations a = activations(chunk, batch, counters);
  const Rows all = {0, int(chunk.tokens.size()), path_of(int(chunk.tokens.size()))};
  const Rows wanted = wanted_rows(chunk);

  ops::embed(e, embedding_, {batch.peek(Name::kIds), 0}, a.x, all.count, config_.embedding_scale);
  for (int layer = 0; layer < config_.n_layers; ++layer) {
    // The last layer writes K and V of every token, and goes on with those alone whose output is asked for.
    const bool last = layer == config_.n_layers - 1;
    e.enter_layer(layer);
    encode_layer(e, layer, a, cache, {rope_tables[std::size_t(layer)]}, chunk, all, last ? wanted : all);
  }
  e.leave_layers();

  const std::size_t logits_bytes = std::size_t(config_.vocab_size) * sizeof(float);
  const View last_token = row(a.x, wanted.first, config_.dim);
  switch (chunk.output) {
    case Output::kNone:
      break;
    case Output::kGreedy: {
      const View logits = batch.get(Name::kLogits, logits_bytes, counters);
      const View candidates = batch.get(Name::kCandidates, ops::candidates_bytes(tuning_), counters);
      head(e, last_token, a, logits);
      ops::argmax(e, logits, candidates, batch.get(Name::kResult, sizeof(Candidate), counters),
                  config_.vocab_size);
      break;
    }
    case Output::kLogits:
      head(e, last_token, a, batch.get(Name::kHostLogits, logits_bytes, counters));
      break;
    case Output::kLogProbs:
      score(e, chunk, batch, a, counters);
      break;
  }
}

void ForwardPass::encode_layer(Encoder& e, int layer, const Activations& a, const KvCache& cache,
                               const View& rope_table, const Chunk& chunk, const Rows& all,
                               const Rows& wanted) const {
  const Layer& w = layers_[std::size_t(layer)];
  const View k_cache = cache.keys(layer), v_cache = cache.values(layer);

  normed_projections(e, w.attn_norm, w.qkv, a.x, a.normed, a.qkv, qkv_dim_, all);
  const RopeArgs rope = {
      .n_heads = u32_t(config_.n_heads),
      .n_kv_heads = u32_t(config_.n_kv_heads),
      .key_dim = u32_t(config_.key_dim),
      .value_dim = u32_t(config_.value_dim),
      .rope_dim = config_.uses_rope(layer) ? u32_t(config_.rope_dim) : 0,
      .style = config_.rope_style == RopeStyle::kNeox ? u32_t(ROPE_NEOX) : u32_t(ROPE_INTERLEAVED),
      .position = u32_t(chunk.position),
      .has_bias = w.bias.buffer != nil,
      .has_q_norm = w.q_norm.buffer != nil,
      .has_k_norm = w.k_norm.buffer != nil,
      .eps = config_.norm_eps,
      .skip_queries = wanted.count == 0};
  // A binding that the model has no tensor for is never read; any buffer will do.
  const auto bound = [&](const View& view) { return view.buffer ? view : rope_table; };
  const View bias = bound(w.bias), q_norm = bound(w.q_norm), k_norm = bound(w.k_norm);
  const bool rope_with_attention = all.count == 1 && wanted.count == 1;
  if (!rope_with_attention)
    ops::rope_append(e, bias, q_norm, k_norm, rope_table, a.qkv, k_cache, v_cache, rope, all.count);
  if (wanted.count == 0) return;

  const int position = chunk.position + int(wanted.first);
  const AttentionArgs attention = attention_args(layer, position, wanted.count);
  const View q = row(a.qkv, wanted.first, qkv_dim_), x = row(a.x, wanted.first, config_.dim);
  if (rope_with_attention)
    ops::rope_attention_decode(e, bias, q_norm, k_norm, rope_table, a.qkv, k_cache, v_cache, a.partial, a.att,
                               {rope, attention});
  else if (wanted.path == Path::kManyTokens)
    ops::attention_prefill(e, q, k_cache, v_cache, a.att, attention);
  else
    ops::attention_decode(e, q, k_cache, v_cache, a.partial, a.att, attention);
  add_block(e, w.wo, a.att, w.post_attn_norm, a.block, x, wanted);
  feed_forward(e, w, a, x, wanted);
}

void ForwardPass::feed_forward(Encoder& e, const Layer& w, const Activations& a, const View& x,
                               const Rows& rows) const {
  const bool one_token = rows.path == Path::kOneToken;
  if (!gate_up_apart(w, rows.path)) {
    ops::rmsnorm(e, w.ffn_norm, x, a.normed, config_.dim, config_.norm_eps, rows.count, rows.half());
    if (one_token)
      ops::matvec_swiglu(e, w.gate_up[0], a.normed, a.ffn, activation_);
    else
      ops::matmul_swiglu(e, w.gate_up[0], a.normed, a.ffn, rows.count, activation_);
  } else {
    normed_projections(e, w.ffn_norm, w.gate_up, x, a.normed, a.gate_up, 2 * config_.ffn_dim, rows);
    if (one_token && fuses_silu(w)) {
      ops::silu_matvec_q4_0_accumulate(e, w.w_down, a.gate_up, x, activation_);
      return;
    }
    ops::swiglu(e, a.gate_up, a.ffn, config_.ffn_dim, rows.count, activation_, rows.half());
  }
  add_block(e, w.w_down, a.ffn, w.post_ffn_norm, a.block, x, rows);
}

void ForwardPass::normed_projections(Encoder& e, const View& norm, const std::vector<Projection>& projections,
                                     const View& x, const View& normed, const View& y, int out_stride,
                                     const Rows& rows) const {
  const bool fused = rows.path == Path::kOneToken && fuses_norm(projections);
  if (!fused) ops::rmsnorm(e, norm, x, normed, config_.dim, config_.norm_eps, rows.count, rows.half());
  const Encoder::Overlap overlap(e);
  for (const Projection& w : projections) {
    if (fused)
      ops::rmsnorm_matvec(e, w, norm, x, y, config_.norm_eps);
    else
      project(e, w, normed, y, out_stride, rows, false);
  }
}

void ForwardPass::project(Encoder& e, const Projection& w, const View& x, const View& y, int out_stride,
                          const Rows& rows, bool accumulate) const {
  switch (rows.path) {
    case Path::kOneToken:
      return ops::matvec(e, w, x, y, accumulate);
    case Path::kFewTokens:
      return ops::multi_token_matvec_q4_0(e, w, x, y, rows.count, out_stride, accumulate);
    case Path::kManyTokens:
      return ops::matmul(e, w, x, y, rows.count, out_stride, accumulate);
  }
}

void ForwardPass::add_block(Encoder& e, const Projection& w, const View& x, const View& post_norm,
                            const View& block, const View& residual, const Rows& rows) const {
  if (!post_norm.buffer) return project(e, w, x, residual, config_.dim, rows, true);
  project(e, w, x, block, config_.dim, rows, false);
  ops::rmsnorm_add(e, post_norm, block, residual, config_.dim, config_.norm_eps, rows.count);
}

void ForwardPass::head(Encoder& e, const View& x, const Activations& a, const View& logits) const {
  normed_projections(e, output_norm_, {output_}, x, a.normed, logits, config_.vocab_size,
                     {0, 1, Path::kOneToken});
}

void ForwardPass::score(Encoder& e, const Chunk& chunk, Batch& batch, const Activations& a,
                        CallCounters& counters) const {
  const int tokens = int(chunk.tokens.size()), together = std::min(tokens, kScoredTogether);
  const std::size_t vocab = std::size_t(config_.vocab_size);
  const View logits = batch.get(Name::kLogits, std::size_t(together) * vocab * sizeof(float), counters);
  const View targets = {batch.peek(Name::kTargets), 0};
  const View log_probs = batch.get(Name::kLogProbs, std::size_t(tokens) * sizeof(float), counters);
  ops::rmsnorm(e, output_norm_, a.x, a.normed, config_.dim, config_.norm_eps, tokens, true);
  for (int first = 0; first < tokens; first += together) {
    const int count = std::min(together, tokens - first);
    const View normed = {a.normed.buffer, std::size_t(first) * std::size_t(config_.dim) * sizeof(fp16_t)};
    ops::matmul(e, output_, normed, logits, count, config_.vocab_size, false);
    ops::log_prob(e, logits, row(targets, std::size_t(first), 1), row(log_probs, std::size_t(first), 1),
                  config_.vocab_size, count);
  }
}

}  // namespace metal_prefill::metal
