#include "forward_pass.h"

#include <algorithm>

namespace metal_prefill::metal {

namespace {

// Tokens whose logits are in memory together when scoring.
constexpr int kScoredTogether = 32;

}  // namespace

void ForwardPass::encode(Encoder& e, const PassShape& shape, PassBuffers& buffers) const {
  Pass pass = {.e = e,
               .shape = shape,
               .buffers = buffers,
               .all = {0, shape.tokens, path_of(shape.tokens)},
               .wanted = wanted_rows(shape),
               .a = activations(shape, buffers)};
  const View ids = buffers.get(BufferName::kIds, std::size_t(shape.tokens) * sizeof(TokenId));

  ops::embed(e, embedding_, ids, pass.a.x, shape.tokens, config_.embedding_scale);
  for (int layer = 0; layer < config_.n_layers; ++layer) {
    // The last layer writes K and V of every token, and continues only with tokens whose output is wanted.
    const bool last = layer == config_.n_layers - 1;
    e.enter_layer(layer);
    encode_layer(pass, layer, last ? pass.wanted : pass.all);
  }
  e.leave_layers();

  const std::size_t logits_bytes = std::size_t(config_.vocab_size) * sizeof(float);
  switch (shape.output) {
    case Output::kNone:
      break;
    case Output::kGreedy: {
      const View logits = buffers.get(BufferName::kLogits, logits_bytes);
      const View candidates = buffers.get(BufferName::kCandidates, ops::candidates_bytes(tuning_));
      head(pass, logits);
      ops::argmax(e, logits, candidates, buffers.get(BufferName::kResult, sizeof(Candidate)),
                  config_.vocab_size);
      break;
    }
    case Output::kLogits:
    case Output::kSampled:
      head(pass, buffers.get(BufferName::kHostLogits, logits_bytes));
      break;
    case Output::kLogProbs:
      score(pass);
      break;
  }
}

void ForwardPass::encode_layer(Pass& pass, int layer, const Rows& wanted) const {
  const Layer& w = layers_[std::size_t(layer)];
  const Activations& a = pass.a;
  const LayerCache cache = pass.buffers.cache(layer);
  const View table = pass.buffers.rope_table(layer);
  // A binding for which the model has no tensor is never read, but must have a buffer: any will do.
  const auto bound = [&](const View& view) { return view ? view : table; };
  const RopeInputs rope_inputs = {bound(w.bias), bound(w.q_norm), bound(w.k_norm), table};

  normed_projections(pass.e, w.attn_norm, w.qkv, a.x, a.normed, {a.qkv, qkv_dim_}, pass.all);
  const RopeArgs rope = rope_args(layer, pass, wanted);
  const bool rope_with_attention = pass.all.count == 1 && wanted.count == 1;
  if (!rope_with_attention) ops::rope_append(pass.e, rope_inputs, a.qkv, cache, rope, pass.all.count);
  if (wanted.count == 0) return;

  const AttentionArgs attention =
      attention_args(layer, pass.shape.position + int(wanted.first), wanted.count);
  const View q = a.qkv.row(wanted.first, qkv_dim_), x = a.x.row(wanted.first, config_.dim);
  if (rope_with_attention)
    ops::rope_attention_decode(pass.e, rope_inputs, a.qkv, cache, {a.partial, a.att}, {rope, attention});
  else if (wanted.path == Path::kManyTokens)
    ops::attention_prefill(pass.e, q, cache, a.att, attention);
  else
    ops::attention_decode(pass.e, q, cache, {a.partial, a.att}, attention);
  add_block(pass, w.wo, a.att, w.post_attn_norm, x, wanted);
  feed_forward(pass, w, x, wanted);
}

void ForwardPass::feed_forward(const Pass& pass, const Layer& w, const View& x, const Rows& rows) const {
  Encoder& e = pass.e;
  const Activations& a = pass.a;
  const bool one_token = rows.path == Path::kOneToken;
  if (!gate_up_apart(w, rows.path)) {
    ops::rmsnorm(e, w.ffn_norm, x, a.normed, rows.count, rows.precision());
    if (one_token)
      ops::matvec_swiglu(e, w.gate_up[0], a.normed, a.ffn, activation_);
    else
      ops::matmul_swiglu(e, w.gate_up[0], a.normed, a.ffn, rows.count, activation_);
  } else {
    normed_projections(e, w.ffn_norm, w.gate_up, x, a.normed, {a.gate_up, 2 * config_.ffn_dim}, rows);
    if (one_token && fuses_silu(w)) {
      ops::silu_matvec_q4_0_accumulate(e, w.w_down, a.gate_up, x, activation_);
      return;
    }
    ops::swiglu(e, a.gate_up, a.ffn, config_.ffn_dim, rows.count, activation_, rows.precision());
  }
  add_block(pass, w.w_down, a.ffn, w.post_ffn_norm, x, rows);
}

void ForwardPass::normed_projections(Encoder& e, const Norm& norm, const std::vector<Projection>& projections,
                                     const View& x, const View& normed, const StridedRows& y,
                                     const Rows& rows) const {
  const bool fused = rows.path == Path::kOneToken && fuses_norm(projections);
  if (!fused) ops::rmsnorm(e, norm, x, normed, rows.count, rows.precision());
  const Encoder::Overlap overlap(e);
  for (const Projection& w : projections) {
    if (fused)
      ops::rmsnorm_matvec(e, w, norm, x, y.view);
    else
      project(e, w, normed, y, rows, Write::kStore);
  }
}

void ForwardPass::project(Encoder& e, const Projection& w, const View& x, const StridedRows& y,
                          const Rows& rows, Write write) const {
  switch (rows.path) {
    case Path::kOneToken:
      return ops::matvec(e, w, x, y.view, write);
    case Path::kFewTokens:
      return ops::multi_token_matvec_q4_0(e, w, x, y, rows.count, write);
    case Path::kManyTokens:
      return ops::matmul(e, w, x, y, rows.count, write);
  }
}

void ForwardPass::add_block(const Pass& pass, const Projection& w, const View& x, const Norm& post_norm,
                            const View& residual, const Rows& rows) const {
  if (!post_norm.weight) return project(pass.e, w, x, {residual, config_.dim}, rows, Write::kAccumulate);
  project(pass.e, w, x, {pass.a.block, config_.dim}, rows, Write::kStore);
  ops::rmsnorm_add(pass.e, post_norm, pass.a.block, residual, rows.count);
}

void ForwardPass::head(const Pass& pass, const View& logits) const {
  const View last_token = pass.a.x.row(pass.wanted.first, config_.dim);
  normed_projections(pass.e, output_norm_, output_, last_token, pass.a.normed, {logits, config_.vocab_size},
                     {0, 1, Path::kOneToken});
}

void ForwardPass::score(const Pass& pass) const {
  Encoder& e = pass.e;
  const int tokens = pass.shape.tokens, together = std::min(tokens, kScoredTogether);
  const auto bytes = [](int rows, int columns) {
    return std::size_t(rows) * std::size_t(columns) * sizeof(float);
  };
  const View logits = pass.buffers.get(BufferName::kLogits, bytes(together, config_.vocab_size));
  const View targets = pass.buffers.get(BufferName::kTargets, bytes(tokens, 1));
  const View log_probs = pass.buffers.get(BufferName::kLogProbs, bytes(tokens, 1));
  ops::rmsnorm(e, output_norm_, pass.a.x, pass.a.normed, tokens, Precision::kF16);
  for (int first = 0; first < tokens; first += together) {
    const int count = std::min(together, tokens - first);
    const View normed = pass.a.normed.at(bytes(first, config_.dim) / 2);  // half precision
    ops::matmul(e, output_[0], normed, {logits, config_.vocab_size}, count, Write::kStore);
    ops::log_prob(e, logits, targets.row(std::size_t(first), 1), log_probs.row(std::size_t(first), 1),
                  config_.vocab_size, count);
  }
}

}  // namespace metal_prefill::metal
