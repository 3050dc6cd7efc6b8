// All steps other than products and attention.
#include "ops.h"

#include <stdexcept>

#include "../../../shaders/gated_delta.h"
#include "ops_threads.h"

namespace metal_prefill::metal::ops {

static_assert(kMostScanRows == kSimd * DELTA_ROWS);  // of either recurrence

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
void dispatch_norm(Encoder& e, Kernel kernel, const Norm& norm, std::initializer_list<View> buffers,
                   int stride, int tokens) {
  e.dispatch(kernel, buffers, RmsnormArgs{u32_t(norm.dim), u32_t(stride), bool(norm.weight), norm.eps},
             {.x = std::size_t(tokens), .threads = norm_threads(e, kernel, norm.dim)});
}

}  // namespace

void norm(Encoder& e, const Norm& norm, const View& x, const View& y, int tokens, Precision precision) {
  const bool half = precision == Precision::kF16;
  if (norm.weight && norm.kind == NormKind::kLayer) {
    const Kernel kernel = half ? Kernel::kLayernormF16 : Kernel::kLayernormF32;
    e.dispatch(kernel, {norm.weight, norm.bias ? norm.bias : norm.weight, x, y},
               layernorm_args(norm, {}, norm.dim),
               {.x = std::size_t(tokens), .threads = norm_threads(e, kernel, norm.dim)});
    return;
  }
  // Without a weight any buffer that is not written will do.
  dispatch_norm(e, half ? Kernel::kRmsnormF16 : Kernel::kRmsnormF32, norm,
                {norm.weight ? norm.weight : x, x, y}, norm.dim, tokens);
}

void layernorm_stream(Encoder& e, const Norm& norm, const View& addend, const View& x, const View& copy,
                      int tokens) {
  e.dispatch(Kernel::kLayernormStream,
             {norm.weight, norm.bias ? norm.bias : norm.weight, addend ? addend : norm.weight, x, copy},
             layernorm_args(norm, addend, norm.dim),
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kLayernormStream, norm.dim)});
}

void layernorm_twice(Encoder& e, const Norm& first, const View& addend, const Norm& second, const View& y,
                     const View& x, const View& copy, int tokens) {
  LayernormArgs args = layernorm_args(first, addend, first.dim);
  args.has_second_bias = bool(second.bias);
  e.dispatch(Kernel::kLayernormTwice,
             {first.weight, first.bias ? first.bias : first.weight, addend ? addend : first.weight,
              second.weight, second.bias ? second.bias : second.weight, y, x, copy},
             args,
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kLayernormTwice, first.dim)});
}

void add_bias(Encoder& e, const View& bias, const View& x, int dim, int tokens) {
  const std::size_t threads = allowed_threads(e, Kernel::kAddBias, 256);
  e.dispatch(Kernel::kAddBias, {bias, x}, AddBiasArgs{u32_t(dim)},
             {.x = ceil_div(std::size_t(dim), threads), .y = std::size_t(tokens), .threads = threads});
}

void norm_in_place(Encoder& e, const Norm& norm, const View& addend, const StridedRows& rows, int tokens) {
  if (norm.kind == NormKind::kRms && addend) throw std::logic_error("RMSNorm of rows takes no addend");
  if (norm.kind == NormKind::kRms)
    return dispatch_norm(e, Kernel::kRmsnormInPlace, norm, {norm.weight, rows.view}, rows.stride, tokens);
  e.dispatch(Kernel::kLayernormInPlace,
             {norm.weight, norm.bias ? norm.bias : norm.weight, addend ? addend : norm.weight, rows.view},
             layernorm_args(norm, addend, rows.stride),
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kLayernormInPlace, norm.dim)});
}

namespace {

RmsnormAddArgs rmsnorm_add_args(const Norm& norm) {
  return {.dim = u32_t(norm.dim), .has_scale = false, .has_next = false, .eps = norm.eps, .next_eps = 0.0f};
}

}  // namespace

void rmsnorm_add(Encoder& e, const Norm& norm, const View& scale, const View& x, const View& y, int tokens) {
  RmsnormAddArgs args = rmsnorm_add_args(norm);
  args.has_scale = bool(scale);
  e.dispatch(Kernel::kRmsnormAdd, {norm.weight, scale ? scale : norm.weight, x, y}, args,
             {.x = std::size_t(tokens), .threads = norm_threads(e, Kernel::kRmsnormAdd, norm.dim)});
}

void rmsnorm_add_norm(Encoder& e, const Norm& norm, const Norm& next, const View& x, const View& y,
                      const View& normed, int tokens, Precision precision) {
  const bool half = precision == Precision::kF16;
  const Kernel kernel = half ? Kernel::kRmsnormAddNormF16 : Kernel::kRmsnormAddNormF32;
  RmsnormAddArgs args = rmsnorm_add_args(norm);
  args.has_next = bool(next.weight);
  args.next_eps = next.eps;
  e.dispatch(kernel, {norm.weight, next.weight ? next.weight : norm.weight, x, y, normed}, args,
             {.x = std::size_t(tokens), .threads = norm_threads(e, kernel, norm.dim)});
}

void swiglu(Encoder& e, const GateUp& gate_up, const View& out, int tokens, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kSwigluF16 : Kernel::kSwigluF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(
      kernel, {gate_up.bias ? gate_up.bias : gate_up.rows, gate_up.rows, out},
      SwigluArgs{u32_t(gate_up.ffn_dim), u32_t(tokens), gate_up.activation, gate_up.gated,
                 bool(gate_up.bias)},
      {.x = ceil_div(std::size_t(gate_up.ffn_dim), threads), .y = std::size_t(tokens), .threads = threads});
}

void layer_inputs(Encoder& e, const Norm& norm, float filled, const View& added, const View& x, int layers,
                  int tokens) {
  const std::size_t simdgroups = allowed_threads(e, Kernel::kLayerInputs, 8 * kSimd) / kSimd;
  e.dispatch(
      Kernel::kLayerInputs, {norm.weight, added, x},
      LayerInputsArgs{.dim = u32_t(norm.dim), .layers = u32_t(layers), .filled = filled, .eps = norm.eps},
      {.x = ceil_div(std::size_t(layers), simdgroups),
       .y = std::size_t(tokens),
       .threads = simdgroups * kSimd});
}

void gate_input(Encoder& e, const View& gate, const StridedRows& input, const View& out, int dim, int tokens,
                u32_t activation, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kGateInputF16 : Kernel::kGateInputF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(kernel, {gate, input.view, out},
             GateInputArgs{.dim = u32_t(dim),
                           .input_stride = u32_t(input.stride),
                           .tokens = u32_t(tokens),
                           .activation = activation},
             {.x = ceil_div(std::size_t(dim), threads), .y = std::size_t(tokens), .threads = threads});
}

void causal_conv(Encoder& e, const ConvInputs& inputs, const View& in, const View& out,
                 const CausalConvArgs& args, Precision precision, std::span<const RowRun> runs) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kCausalConvF16 : Kernel::kCausalConvF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(
      kernel, {inputs.filter, inputs.bias, in, inputs.rows, inputs.states, out}, args,
      {.x = ceil_div(std::size_t(args.channels), threads), .y = std::size_t(args.tokens), .threads = threads},
      runs);
}

void scan(Encoder& e, const ScanWeights& w, const View& projected, const View& convolved, const View& rows,
          const View& states, const View& out, const ScanArgs& args, int sequences, Precision precision,
          std::span<const RowRun> runs) {
  const bool many_rows = args.rows > 128;
  const Kernel kernel = precision == Precision::kF16
                            ? (many_rows ? Kernel::kScanF16Rows256 : Kernel::kScanF16Rows128)
                            : (many_rows ? Kernel::kScanF32Rows256 : Kernel::kScanF32Rows128);
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
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kScanNormF16 : Kernel::kScanNormF32;
  const std::size_t columns = args.inner / args.groups;
  e.dispatch(kernel, {w.norm, gates, y, out}, args,
             {.x = std::size_t(tokens),
              .y = args.groups,
              .threads = allowed_threads(e, kernel, std::min(round_up(columns, kSimd), std::size_t(256)))});
}

void gated_delta(Encoder& e, const DeltaWeights& w, const View& qkv, const View& rates, const View& rows,
                 const View& states, const View& out, const GatedDeltaArgs& args, int sequences,
                 std::span<const RowRun> runs) {
  const std::size_t threads = allowed_threads(e, Kernel::kGatedDelta, DELTA_SIMDGROUPS * kSimd);
  e.dispatch(Kernel::kGatedDelta, {w.decay, w.step, qkv, rates, rows, states, out}, args,
             {.x = ceil_div(std::size_t(args.value_dim), threads / kSimd * DELTA_COLUMNS),
              .y = std::size_t(args.heads),
              .z = std::size_t(sequences),
              .threads = threads,
              .work = 4.0 * args.tokens * args.heads * args.value_dim * args.key_dim},
             runs);
}

void gated_norm(Encoder& e, const Norm& norm, const View& x, const StridedRows& gate, const View& y,
                int heads, int tokens, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kGatedNormF16 : Kernel::kGatedNormF32;
  const std::size_t threads = allowed_threads(e, kernel, 8 * kSimd);
  e.dispatch(
      kernel, {norm.weight, x, gate.view, y},
      GatedNormArgs{u32_t(heads), u32_t(norm.dim), u32_t(gate.stride), norm.eps},
      {.x = ceil_div(std::size_t(heads) * kSimd, threads), .y = std::size_t(tokens), .threads = threads});
}

void soft_cap(Encoder& e, const View& x, std::size_t n, float cap) {
  const std::size_t threads = allowed_threads(e, Kernel::kSoftCap, 256);
  e.dispatch(Kernel::kSoftCap, {x}, SoftCapArgs{u32_t(n), cap},
             {.x = ceil_div(n, threads), .threads = threads});
}

void gate_heads(Encoder& e, const View& q, const View& y, const GateHeadsArgs& args, Precision precision) {
  const Kernel kernel = precision == Precision::kF16 ? Kernel::kGateHeadsF16 : Kernel::kGateHeadsF32;
  const std::size_t threads = allowed_threads(e, kernel, 256);
  e.dispatch(kernel, {q, y}, args,
             {.x = ceil_div(std::size_t(args.n_heads) * args.value_dim, threads),
              .y = std::size_t(args.tokens),
              .threads = threads});
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
