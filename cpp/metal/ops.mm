#include "ops.h"

#include <algorithm>
#include <utility>

#include "../rounding.h"

namespace metal_prefill::metal {

namespace {

constexpr std::size_t kSimd = 32;
constexpr std::size_t kNarrowTile = 32, kWideTile = 64;  // tokens and rows of a matmul's tile

}  // namespace

Encoder::Encoder(id<MTLCommandBuffer> commands, const Kernels& kernels, const Tuning& tuning,
                 CallCounters& counters)
    : encoder_([commands computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent]),
      kernels_(kernels),
      tuning_(tuning),
      counters_(counters) {
  if (!encoder_)
    throw DeviceError("the GPU gave no compute encoder for " + std::string(commands.label.UTF8String));
}

Encoder::Encoder(const Device& device, const Kernels& kernels, CallCounters& counters,
                 std::vector<Dispatch>& trace, bool run)
    : kernels_(kernels),
      tuning_(device.tuning()),
      counters_(counters),
      run_on_(run ? &device : nullptr),
      trace_(&trace) {}

Encoder::~Encoder() {
  [encoder_ endEncoding];
}

Encoder::Overlap::Overlap(Encoder& encoder) : encoder_(encoder) {
  encoder_.overlap_ = true;
}

Encoder::Overlap::~Overlap() {
  encoder_.overlap_ = false;
  encoder_.needs_barrier_ = true;
}

void Encoder::dispatch(const id<MTLComputePipelineState>& pipeline, std::initializer_list<View> buffers,
                       const void* args, std::size_t args_bytes, const Grid& grid) {
  const bool barrier = std::exchange(needs_barrier_, !overlap_);
  if (trace_) return note(pipeline, buffers, args, args_bytes, grid, barrier);
  // Not retained for every message; this is on the way of every token.
  __unsafe_unretained const id<MTLComputeCommandEncoder> encoder = encoder_;
  if (barrier) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  [encoder setComputePipelineState:pipeline];
  NSUInteger index = 0;
  for (const View& view : buffers) [encoder setBuffer:view.buffer offset:view.offset atIndex:index++];
  [encoder setBytes:args length:args_bytes atIndex:index];
  if (grid.threadgroup_bytes > 0) [encoder setThreadgroupMemoryLength:grid.threadgroup_bytes atIndex:0];
  [encoder dispatchThreadgroups:MTLSizeMake(grid.x, grid.y, grid.z)
          threadsPerThreadgroup:MTLSizeMake(grid.threads, 1, 1)];
  ++counters_.dispatches;
}

void Encoder::note(id<MTLComputePipelineState> pipeline, std::initializer_list<View> buffers,
                   const void* args, std::size_t args_bytes, const Grid& grid, bool after_barrier) {
  const AutoreleasePool pool;
  Dispatch noted = {.kernel = kernels_.name_of(pipeline),
                    .layer = layer_,
                    .grid = {grid.x, grid.y, grid.z},
                    .threads = grid.threads,
                    .threadgroup_bytes = grid.threadgroup_bytes,
                    .after_barrier = after_barrier};
  for (const View& view : buffers) {
    NSString* label = view.buffer.label;
    noted.buffers.push_back(label ? label.UTF8String : "");
  }
  const auto* bytes = static_cast<const std::byte*>(args);
  noted.args.assign(bytes, bytes + args_bytes);
  if (run_on_) {
    id<MTLCommandBuffer> commands = run_on_->command_buffer(noted.kernel);
    {
      Encoder alone(commands, kernels_, tuning_, counters_);
      alone.dispatch(pipeline, buffers, args, args_bytes, grid);
    }
    run_on_->run(commands, counters_);
    noted.start = commands.GPUStartTime;
    noted.end = commands.GPUEndTime;
  }
  trace_->push_back(std::move(noted));
}

namespace ops {

namespace {

// Lanes that share a row: as few as keep them in step with the rows' length, but enough to have work for the
// whole GPU.
std::size_t lanes_per_row(const Tuning& tuning, std::size_t rows) {
  std::size_t lanes = 8;
  while (lanes < kSimd && rows * lanes < std::size_t(tuning.matvec_threads)) lanes *= 2;
  return lanes;
}

struct MatvecPlan {
  MatvecArgs args;
  Encoder::Grid grid;
};

MatvecPlan plan_matvec(const Tuning& tuning, const Projection& w, std::size_t rows) {
  const std::size_t lanes = lanes_per_row(tuning, rows), threads = std::size_t(tuning.matvec_group);
  return {
      {.weights = w.stack, .in_dim = u32_t(w.in_dim), .out_dim = u32_t(rows), .lanes_per_row = u32_t(lanes)},
      {.x = ceil_div(rows, threads / lanes), .threads = threads}};
}

// Four values a thread: a row is then read in one go.
std::size_t norm_threads(int dim) {
  return std::min<std::size_t>(1024, round_up(std::size_t(dim) / 4, kSimd));
}

}  // namespace

void embed(Encoder& e, const Projection& table, const View& ids, const View& x, int tokens, float scale) {
  const EmbedArgs args = {u32_t(table.in_dim), table.stack.row_bytes, u32_t(tokens), scale};
  e.dispatch(
      e.kernels().pipeline(Kernel::kEmbed, table.type), {table.weights, ids, x}, args,
      {.x = ceil_div(std::size_t(table.in_dim) / 8, kSimd), .y = std::size_t(tokens), .threads = kSimd});
}

void rmsnorm(Encoder& e, const View& weight, const View& x, const View& y, int dim, float eps, int tokens,
             bool half_out) {
  e.dispatch(e.kernels().pipeline(half_out ? Kernel::kRmsnormF16 : Kernel::kRmsnormF32), {weight, x, y},
             RmsnormArgs{u32_t(dim), eps}, {.x = std::size_t(tokens), .threads = norm_threads(dim)});
}

void rmsnorm_add(Encoder& e, const View& weight, const View& x, const View& y, int dim, float eps,
                 int tokens) {
  e.dispatch(e.kernels().pipeline(Kernel::kRmsnormAdd), {weight, x, y}, RmsnormArgs{u32_t(dim), eps},
             {.x = std::size_t(tokens), .threads = norm_threads(dim)});
}

void matvec(Encoder& e, const Projection& w, const View& x, const View& y, bool accumulate) {
  MatvecPlan plan = plan_matvec(e.tuning(), w, std::size_t(w.out_dim));
  plan.args.accumulate = accumulate;
  e.dispatch(e.kernels().pipeline(Kernel::kMatvec, w.type),
             {w.weights, x, {y.buffer, y.offset + std::size_t(w.column) * sizeof(float)}}, plan.args,
             plan.grid);
}

void matvec_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, u32_t activation) {
  MatvecPlan plan = plan_matvec(e.tuning(), w, std::size_t(w.out_dim) / 2);
  plan.args.activation = activation;
  e.dispatch(e.kernels().pipeline(Kernel::kMatvecSwiglu, w.type), {w.weights, x, y}, plan.args, plan.grid);
}

void rmsnorm_matvec(Encoder& e, const Projection& w, const View& norm, const View& x, const View& y,
                    float eps) {
  MatvecPlan plan = plan_matvec(e.tuning(), w, std::size_t(w.out_dim));
  plan.args.eps = eps;
  e.dispatch(e.kernels().pipeline(Kernel::kRmsnormMatvec, w.type),
             {w.weights, norm, x, {y.buffer, y.offset + std::size_t(w.column) * sizeof(float)}}, plan.args,
             plan.grid);
}

void silu_matvec_q4_0_accumulate(Encoder& e, const Projection& w, const View& gate_up, const View& y,
                                 u32_t activation) {
  MatvecPlan plan = plan_matvec(e.tuning(), w, std::size_t(w.out_dim));
  plan.args.activation = activation;
  e.dispatch(e.kernels().pipeline(Kernel::kSiluMatvecQ4_0Accumulate), {w.weights, gate_up, y}, plan.args,
             plan.grid);
}

void multi_token_matvec_q4_0(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                             int out_stride, bool accumulate) {
  const MultiTokenArgs args = {w.stack, u32_t(w.in_dim), u32_t(w.out_dim), u32_t(tokens), u32_t(out_stride)};
  e.dispatch(e.kernels().pipeline(accumulate ? Kernel::kMultiTokenMatvecQ4_0Accumulate
                                             : Kernel::kMultiTokenMatvecQ4_0),
             {w.weights, x, {y.buffer, y.offset + std::size_t(w.column) * sizeof(float)}}, args,
             {.x = ceil_div(std::size_t(w.out_dim), MULTI_TOKEN_ROWS),
              .y = ceil_div(std::size_t(tokens), MULTI_TOKEN_TILE),
              .threads = MULTI_TOKEN_ROWS * kSimd});
}

bool uses_wide_tiles(const Tuning& tuning, int rows, int tokens) {
  const std::size_t tiles = ceil_div(std::size_t(rows), kWideTile) * ceil_div(std::size_t(tokens), kWideTile);
  return std::size_t(tokens) > kNarrowTile && tiles >= std::size_t(tuning.wide_groups);
}

namespace {

Encoder::Grid matmul_grid(bool wide, std::size_t rows, std::size_t tokens) {
  const std::size_t tile = wide ? kWideTile : kNarrowTile;
  return {.x = ceil_div(rows, tile), .y = ceil_div(tokens, tile), .threads = MATMUL_THREADS};
}

}  // namespace

void matmul(Encoder& e, const Projection& w, const View& x, const View& y, int tokens, int out_stride,
            bool accumulate) {
  const std::size_t rows = std::size_t(w.out_dim);
  const bool wide = uses_wide_tiles(e.tuning(), w.out_dim, tokens);
  const MatmulArgs args = {.weights = w.stack,
                           .in_dim = u32_t(w.in_dim),
                           .out_dim = u32_t(rows),
                           .tokens = u32_t(tokens),
                           .out_stride = u32_t(out_stride),
                           .accumulate = accumulate};
  e.dispatch(e.kernels().pipeline(wide ? Kernel::kMatmulWide : Kernel::kMatmulNarrow, w.type),
             {w.weights, x, {y.buffer, y.offset + std::size_t(w.column) * sizeof(float)}}, args,
             matmul_grid(wide, rows, std::size_t(tokens)));
}

void matmul_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation) {
  const std::size_t rows = std::size_t(w.out_dim);  // of gate and up, which share the tiles
  const bool wide = uses_wide_tiles(e.tuning(), w.out_dim, tokens);
  const MatmulArgs args = {.weights = w.stack,
                           .in_dim = u32_t(w.in_dim),
                           .out_dim = u32_t(rows / 2),
                           .tokens = u32_t(tokens),
                           .out_stride = u32_t(rows / 2),
                           .activation = activation};
  e.dispatch(e.kernels().pipeline(wide ? Kernel::kMatmulSwigluWide : Kernel::kMatmulSwigluNarrow, w.type),
             {w.weights, x, y}, args, matmul_grid(wide, rows, std::size_t(tokens)));
}

namespace {

// Heads of a token that a threadgroup takes: thousands of groups of one simdgroup would take longer to start
// than to run.
std::size_t rope_simdgroups(std::size_t heads) {
  constexpr std::size_t kMost = 8;
  for (std::size_t n = kMost; n > 1; --n)
    if (heads % n == 0) return n;
  return 1;
}

}  // namespace

void rope_append(Encoder& e, const View& bias, const View& q_norm, const View& k_norm, const View& table,
                 const View& qkv, const View& k_cache, const View& v_cache, const RopeArgs& args,
                 int tokens) {
  const std::size_t heads = 2 * args.n_kv_heads + (args.skip_queries ? 0 : args.n_heads);
  const std::size_t simdgroups = rope_simdgroups(heads);
  e.dispatch(e.kernels().pipeline(Kernel::kRopeAppend), {bias, q_norm, k_norm, table, qkv, k_cache, v_cache},
             args, {.x = heads / simdgroups, .y = std::size_t(tokens), .threads = simdgroups * kSimd});
}

DecodeSplits decode_splits(const Tuning& tuning, int tokens, int position) {
  const int keys = position + tokens;
  const int count = std::clamp(keys / tuning.split_keys, 1, tuning.max_splits);
  return {count, int(ceil_div(std::size_t(keys), std::size_t(count)))};
}

std::size_t decode_partial_bytes(const AttentionArgs& args) {
  return std::size_t(args.tokens) * args.n_heads * args.splits * (args.value_dim + 2) * sizeof(float);
}

namespace {

Encoder::Grid decode_grid(const Encoder& e, const AttentionArgs& args) {
  const int chunks = e.kernels().cache().decode_size() / 32;
  const std::size_t head_blocks = ceil_div(args.n_heads / args.n_kv_heads, std::size_t(DECODE_HEADS(chunks)));
  // Four keys for each simdgroup at a time: no more simdgroups than have keys.
  const std::size_t simdgroups = std::clamp<std::size_t>(ceil_div(args.split_keys, 4), 1, DECODE_SIMDGROUPS);
  return {
      .x = args.splits, .y = args.n_kv_heads * head_blocks, .z = args.tokens, .threads = simdgroups * kSimd};
}

void attention_combine(Encoder& e, const View& partial, const View& out, const AttentionArgs& args) {
  e.dispatch(e.kernels().pipeline(Kernel::kAttentionCombine), {partial, out}, args,
             {.x = args.n_heads, .y = args.tokens, .threads = round_up(args.value_dim, kSimd)});
}

}  // namespace

void attention_decode(Encoder& e, const View& q, const View& k, const View& v, const View& partial,
                      const View& out, const AttentionArgs& args) {
  const bool combine = args.splits > 1;
  e.dispatch(e.kernels().pipeline(Kernel::kAttentionDecode), {q, k, v, combine ? partial : out}, args,
             decode_grid(e, args));
  if (combine) attention_combine(e, partial, out, args);
}

void rope_attention_decode(Encoder& e, const View& bias, const View& q_norm, const View& k_norm,
                           const View& table, const View& qkv, const View& k_cache, const View& v_cache,
                           const View& partial, const View& out, const RopeAttentionArgs& args) {
  const bool combine = args.attention.splits > 1;
  e.dispatch(e.kernels().pipeline(Kernel::kRopeAttentionDecode),
             {bias, q_norm, k_norm, table, qkv, k_cache, v_cache, combine ? partial : out}, args,
             decode_grid(e, args.attention));
  if (combine) attention_combine(e, partial, out, args.attention);
}

void attention_prefill(Encoder& e, const View& q, const View& k, const View& v, const View& out,
                       const AttentionArgs& args) {
  const CacheShape& cache = e.kernels().cache();
  const std::size_t row_blocks = PREFILL_ROW_BLOCKS(cache.prefill_size(), cache.type == KvType::kF16 ? 2 : 4);
  const std::size_t simdgroups = std::size_t(e.tuning().prefill_simdgroups);
  const std::size_t rows = args.n_heads / args.n_kv_heads * args.tokens;
  e.dispatch(e.kernels().pipeline(Kernel::kAttentionPrefill), {q, k, v, out}, args,
             {.x = ceil_div(rows, simdgroups * row_blocks * 8),
              .y = args.n_kv_heads,
              .threads = simdgroups * kSimd,
              .threadgroup_bytes = simdgroups * PREFILL_SCRATCH(row_blocks) * sizeof(float)});
}

void swiglu(Encoder& e, const View& gate_up, const View& out, int ffn_dim, int tokens, u32_t activation,
            bool half_out) {
  constexpr std::size_t kThreads = 256;
  e.dispatch(e.kernels().pipeline(half_out ? Kernel::kSwigluF16 : Kernel::kSwigluF32), {gate_up, out},
             SwigluArgs{u32_t(ffn_dim), u32_t(tokens), activation},
             {.x = ceil_div(std::size_t(ffn_dim), kThreads), .y = std::size_t(tokens), .threads = kThreads});
}

std::size_t candidates_bytes(const Tuning& tuning) {
  return std::size_t(tuning.argmax_groups) * sizeof(Candidate);
}

void argmax(Encoder& e, const View& logits, const View& candidates, const View& result, int n) {
  const std::size_t groups = std::size_t(e.tuning().argmax_groups);
  e.dispatch(e.kernels().pipeline(Kernel::kArgmaxStage1), {logits, candidates}, ArgmaxArgs{u32_t(n)},
             {.x = groups, .threads = 256});
  e.dispatch(e.kernels().pipeline(Kernel::kArgmaxStage2), {candidates, result}, ArgmaxArgs{u32_t(groups)},
             {.x = 1, .threads = kSimd});
}

void log_prob(Encoder& e, const View& logits, const View& targets, const View& out, int vocab_size,
              int tokens) {
  e.dispatch(e.kernels().pipeline(Kernel::kLogProb), {logits, targets, out}, LogProbArgs{u32_t(vocab_size)},
             {.x = std::size_t(tokens), .threads = 256});
}

}  // namespace ops
}  // namespace metal_prefill::metal
