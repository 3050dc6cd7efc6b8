// All steps other than products and attention.
#include "ops.h"

#include <stdexcept>

#include "../../../shaders/gated_delta.h"
#include "ops_threads.h"

namespace metal_prefill::metal::ops {

static_assert(kMostScanRows == kSimd * GATED_DELTA_ROWS);  // of either recurrence

void embed(Encoder& e, const Projection& table, const TokenIds& ids, const View& x, int tokens, float scale,
           Write write) {
  const EmbedArgs args = {.dim = u32_t(table.in_dim),
                          .row_bytes = table.stack.row_bytes,
                          .tokens = u32_t(tokens),
                          .vocab_size = u32_t(table.out_dim),
                          .id_stride = ids.stride,
                          .accumulate = write == Write::kAccumulate,
                          .scale = scale};
  e.dispatch(
      {Kernel::kEmbed, table.type}, {table.weights, ids.view, x}, args,
      {.x = ceil_div(std::size_t(table.in_dim) / 8, kSimd), .y = std::size_t(tokens), .threads = kSimd});
}

namespace {

LayernormArgs layernorm_args(const Norm& norm, const View& addend, int stride) {
  return {.dim = u32_t(norm.dim),
          .width = u32_t(norm.width),
          .stride = u32_t(stride),
          .has_bias = bool(norm.bias),
          .has_addend = bool(addend),
          .has_second_bias = false,
          .eps = norm.eps};
}

// Rows of the buffers start `stride` elements apart.
void dispatch_norm(Encoder& e, const KernelKey& kernel, const Norm& norm, std::initializer_list<View> buffers,
                   int stride, int tokens) {
  dispatch_rows(e, kernel, buffers, RmsnormArgs{u32_t(norm.dim), u32_t(stride), bool(norm.weight), norm.eps},
                norm.dim, tokens);
}

}  // namespace

void norm(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens, Precision precision) {
  if (norm.weight && norm.kind == NormKind::kLayer)
    return dispatch_rows(e, {Kernel::kLayernorm, precision},
                         {norm.weight, norm.bias.or_any(norm.weight), x, y},
                         layernorm_args(norm, {}, norm.dim), norm.dim, tokens);
  dispatch_norm(e, {Kernel::kRmsnorm, precision}, norm, {norm.weight.or_any(x), x, y}, norm.dim, tokens);
}

void layernorm_stream(Encoder& e, const Norm& norm, const View& addend, const View& x, const View& copy,
                      int tokens) {
  dispatch_rows(e, Kernel::kLayernormStream,
                {norm.weight, norm.bias.or_any(norm.weight), addend.or_any(norm.weight), x, copy},
                layernorm_args(norm, addend, norm.dim), norm.dim, tokens);
}

void layernorm_twice(Encoder& e, const Norm& first, const View& addend, const Norm& second, const View& y,
                     const View& x, const View& copy, int tokens) {
  LayernormArgs args = layernorm_args(first, addend, first.dim);
  args.has_second_bias = bool(second.bias);
  dispatch_rows(e, Kernel::kLayernormTwice,
                {first.weight, first.bias.or_any(first.weight), addend.or_any(first.weight), second.weight,
                 second.bias.or_any(second.weight), y, x, copy},
                args, first.dim, tokens);
}

void add_bias(Encoder& e, const View& bias, const View& x, int dim, int tokens) {
  dispatch_values(e, Kernel::kAddBias, {bias, x}, AddBiasArgs{u32_t(dim)}, std::size_t(dim), tokens);
}

void norm_in_place(Encoder& e, const Norm& norm, const View& addend, const StridedRows& rows, int tokens) {
  if (norm.kind == NormKind::kRms && addend) throw std::logic_error("RMSNorm of rows takes no addend");
  if (norm.kind == NormKind::kRms)
    return dispatch_norm(e, Kernel::kRmsnormInPlace, norm, {norm.weight, rows.view}, rows.stride, tokens);
  dispatch_rows(e, Kernel::kLayernormInPlace,
                {norm.weight, norm.bias.or_any(norm.weight), addend.or_any(norm.weight), rows.view},
                layernorm_args(norm, addend, rows.stride), norm.dim, tokens);
}

void rmsnorm_add(Encoder& e, const Norm& norm, const View& scale, const View& x, const View& y, int tokens) {
  dispatch_rows(e, Kernel::kRmsnormAdd, {norm.weight, scale.or_any(norm.weight), x, y},
                RmsnormAddArgs{u32_t(norm.dim), bool(scale), false, norm.eps, 0.0f}, norm.dim, tokens);
}

void rmsnorm_add_norm(Encoder& e, const Norm& norm, const Norm& next, const View& x, const View& y,
                      const View& normed, int tokens, Precision precision) {
  dispatch_rows(
      e, {Kernel::kRmsnormAddNorm, precision}, {norm.weight, next.weight.or_any(norm.weight), x, y, normed},
      RmsnormAddArgs{u32_t(norm.dim), false, bool(next.weight), norm.eps, next.eps}, norm.dim, tokens);
}

void swiglu(Encoder& e, const GateUp& gate_up, const View& out, int tokens, Precision precision) {
  dispatch_values(e, {Kernel::kSwiglu, precision}, {gate_up.bias.or_any(gate_up.rows), gate_up.rows, out},
                  SwigluArgs{u32_t(gate_up.ffn_dim), u32_t(tokens), gate_up.activation, gate_up.gated,
                             bool(gate_up.bias)},
                  std::size_t(gate_up.ffn_dim), tokens);
}

void layer_inputs(Encoder& e, const Norm& norm, float filled, const View& added, const View& x, int layers,
                  int tokens) {
  dispatch_values(
      e, Kernel::kLayerInputs, {norm.weight, added, x},
      LayerInputsArgs{.dim = u32_t(norm.dim), .layers = u32_t(layers), .filled = filled, .eps = norm.eps},
      std::size_t(layers) * kSimd, tokens);
}

void gate_input(Encoder& e, const View& gate, const StridedRows& input, const View& out, int dim, int tokens,
                u32_t activation, Precision precision) {
  dispatch_values(e, {Kernel::kGateInput, precision}, {gate, input.view, out},
                  GateInputArgs{.dim = u32_t(dim),
                                .input_stride = u32_t(input.stride),
                                .tokens = u32_t(tokens),
                                .activation = activation},
                  std::size_t(dim), tokens);
}

void causal_conv(Encoder& e, const ConvInputs& inputs, const View& in, const View& out,
                 const CausalConvArgs& args, Precision precision, std::span<const RowRun> runs) {
  dispatch_values(e, {Kernel::kCausalConv, precision},
                  {inputs.filter, inputs.bias, in, inputs.rows, inputs.states, out}, args, args.channels,
                  int(args.tokens), runs);
}

void scan(Encoder& e, const ScanWeights& w, const View& projected, const View& convolved, const View& rows,
          const View& states, const View& out, const ScanArgs& args, int sequences, Precision precision,
          std::span<const RowRun> runs) {
  const KernelKey kernel = {args.rows > 128 ? Kernel::kScan256 : Kernel::kScan128, precision};
  const std::size_t threads = allowed_threads(e, kernel, 128);
  const std::size_t simdgroups = args.heads * ceil_div(args.dim, std::size_t(SCAN_COLUMNS));
  e.dispatch(kernel, {w.a, w.bias, w.skip, projected, convolved, rows, states, out}, args,
             {.x = ceil_div(simdgroups, threads / kSimd),
              .y = std::size_t(sequences),
              .threads = threads,
              .work = 3.0 * args.tokens * args.heads * args.dim * args.rows},
             runs);
}

void scan_norm(Encoder& e, const ScanWeights& w, const View& gates, const View& y, const View& out,
               const ScanNormArgs& args, int tokens, Precision precision) {
  const KernelKey kernel = {Kernel::kScanNorm, precision};
  const std::size_t columns = args.inner / args.groups;
  e.dispatch(kernel, {w.norm, gates, y, out}, args,
             {.x = std::size_t(tokens),
              .y = args.groups,
              .threads = allowed_threads(e, kernel, std::min(round_up(columns, kSimd), std::size_t(256)))});
}

void gated_delta(Encoder& e, const GatedDeltaWeights& w, const View& qkv, const View& rates, const View& rows,
                 const View& states, const View& out, const GatedDeltaArgs& args, int sequences,
                 std::span<const RowRun> runs) {
  const std::size_t threads = allowed_threads(e, Kernel::kGatedDelta, GATED_DELTA_SIMDGROUPS * kSimd);
  e.dispatch(Kernel::kGatedDelta, {w.decay, w.step, qkv, rates, rows, states, out}, args,
             {.x = ceil_div(std::size_t(args.value_dim), threads / kSimd * GATED_DELTA_COLUMNS),
              .y = std::size_t(args.heads),
              .z = std::size_t(sequences),
              .threads = threads,
              .work = 4.0 * args.tokens * args.heads * args.value_dim * args.key_dim},
             runs);
}

void gated_norm(Encoder& e, const Norm& norm, const View& x, const StridedRows& gate, const View& y,
                int heads, int tokens, Precision precision) {
  dispatch_values(e, {Kernel::kGatedNorm, precision}, {norm.weight, x, gate.view, y},
                  GatedNormArgs{u32_t(heads), u32_t(norm.dim), u32_t(gate.stride), norm.eps},
                  std::size_t(heads) * kSimd, tokens);
}

void soft_cap(Encoder& e, const View& x, std::size_t n, float cap) {
  dispatch_values(e, Kernel::kSoftCap, {x}, SoftCapArgs{u32_t(n), cap}, n, 1);
}

void gate_heads(Encoder& e, const View& q, const View& y, const GateHeadsArgs& args, Precision precision) {
  dispatch_values(e, {Kernel::kGateHeads, precision}, {q, y}, args,
                  std::size_t(args.n_heads) * args.value_dim, int(args.tokens));
}

std::size_t candidates_bytes(const Tuning& tuning, int rows) {
  return std::size_t(rows) * std::size_t(tuning.argmax_groups) * sizeof(Candidate);
}

void argmax(Encoder& e, const View& logits, const View& candidates, const View& result, int n, int rows) {
  const std::size_t groups = std::size_t(e.tuning().argmax_groups);
  e.dispatch(
      Kernel::kArgmaxStage1, {logits, candidates}, ArgmaxArgs{u32_t(n)},
      {.x = groups, .y = std::size_t(rows), .threads = allowed_threads(e, Kernel::kArgmaxStage1, 256)});
  e.dispatch(Kernel::kArgmaxStage2, {candidates, result}, ArgmaxArgs{u32_t(groups)},
             {.x = std::size_t(rows), .threads = kSimd});
}

void log_prob(Encoder& e, const View& logits, const View& targets, const View& out, int vocab_size,
              int tokens) {
  e.dispatch(Kernel::kLogProb, {logits, targets, out}, LogProbArgs{u32_t(vocab_size)},
             {.x = std::size_t(tokens), .threads = allowed_threads(e, Kernel::kLogProb, 256)});
}

}  // namespace metal_prefill::metal::ops
