// The operations that are implemented once per instruction set, in one table of functions.
//
// All of them work on single rows, or on tiles that do not affect values: each output is summed over its
// inputs in one fixed order, so that results do not depend on how a prompt is split.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../../../shaders/position_bias.h"
#include "../../cache/pages.h"
#include "../../model/model.h"
#include "packing.h"

namespace metal_prefill::cpu {

constexpr int kTileTokens = 16;  // tokens in a tile of quantized activations

// 32 columns of 16 tokens in 8 bits, x = scale * q, with the other inputs of a product. Tokens are stored
// together so that products of vectors and of matrices read one linear stream.
struct alignas(64) ActivationTile {
  struct Terms {
    float scale;
    float scaled_sum;         // scale * sum(q), multiplies the minimum of a weight block
    std::int32_t start;       // -8 * sum(q): initial integer sum for codes with a zero point of 8
    std::int32_t start_half;  // the same over the first 16 columns
  };

  std::int8_t q[kTileTokens][kBlockCols];
  Terms terms[kTileTokens];  // one struct per token: threads that fill adjacent tokens share few cache lines
};

// Scale * sum of q over half a block.
inline float scaled_half_sum(const ActivationTile& x, int token, int half) {
  const ActivationTile::Terms& terms = x.terms[token];
  const auto first = std::uint32_t(terms.start_half), both = std::uint32_t(terms.start);
  return terms.scale * (float(std::int32_t(half == 0 ? first : both - first)) * -0.125f);
}

// Activations in 8 bits. Tiles are always allocated whole, though only some tokens may be in use.
template <class Tile>
struct TileRows {
  Tile* tiles = nullptr;  // [tokens / 16, rounded up][blocks]
  int blocks = 0;         // blocks of columns

  Tile* tile(int token) const { return tiles + std::size_t(token / kTileTokens) * std::size_t(blocks); }
};
using Int8Rows = TileRows<ActivationTile>;

// A super-block of columns of 16 tokens in 8 bits, x = scale * (q - zero), for weights whose scales are
// integers.
constexpr int kSuperCols = kSuperSpans * kBlockCols, kSuperSums = kSuperCols / 16;
struct alignas(64) SuperTile {
  std::int8_t q[kSuperCols / 64][kTileTokens][64];
  std::uint16_t pair_sums[kTileTokens][kSuperSums][2];  // sums of 16 q, each as two bfloat16 addends
  std::int16_t sums[kTileTokens][kSuperSums];
  float scale[kTileTokens], minus_zero[kTileTokens];
};
using SuperRows = TileRows<SuperTile>;

// Rows of float32, padded with zeros to a stride that is a multiple of kFloatPad.
struct FloatRows {
  float* data = nullptr;
  std::size_t stride = 0;  // in floats

  float* row(int token) const { return data + std::size_t(token) * stride; }
  // The same rows without their first columns.
  FloatRows from(int column) const { return {data + column, stride}; }
  // The same columns without the first rows.
  FloatRows rows_from(int token) const { return {row(token), stride}; }
};

// Rows of bfloat16, padded with zeros to a multiple of kPairPad. The number of allocated rows is a multiple
// of kTileTokens.
struct PairRows {
  std::uint16_t* data = nullptr;
  std::size_t stride = 0;  // in elements; whole cache lines

  std::uint16_t* row(int token) const { return data + std::size_t(token) * stride; }
};
constexpr int kPairPad = 32;

// Rows of signed bytes, or of 16-bit integers, rotated in blocks of 64 columns: x = scale * q. They are
// padded with zeros to a multiple of kRotatedCols. The number of allocated rows is a multiple of kTileTokens.
struct RotatedRows {
  struct Terms {
    float scale;
    std::int32_t start;  // initial integer sum: minus the contribution of the weights' zero point
    std::int32_t rests = 0;
  };
  // A part of the codes of four columns that limit_pairs stores after the row.
  struct Rest {
    std::int32_t offset;  // of the weights of a row of the group, in bytes
    std::int32_t codes;
  };

  std::byte* data = nullptr;
  std::size_t stride = 0;  // in bytes; whole cache lines
  Terms* terms = nullptr;

  std::byte* row(int token) const { return data + std::size_t(token) * stride; }
  // Room for the codes of a row and, if a set limits pairs, for the maximum number of rests. A row ends with
  // an unused cache line, as in float32.
  static constexpr std::size_t stride_of(std::size_t cols, bool wide, bool rests) {
    const std::size_t padded = round_up(cols, std::size_t(kRotatedCols));
    return padded * (wide ? sizeof(std::int16_t) : 1) + (rests ? padded / 4 * sizeof(Rest) : 0) +
           kRotatedCols;
  }
};

// Memory that is read after a product, and prefetched into the L2 cache during it.
struct PrefetchRange {
  const std::byte* begin = nullptr;
  std::size_t bytes = 0;
};

// Consecutive groups of a matrix.
struct GroupRange {
  int first, count;
};

// Destination of the products of row groups and tokens: out[token][row] = activation(product + bias[row]), or
// +=.
struct ProductOutput {
  float* data;
  std::size_t stride;           // between tokens
  const float* bias = nullptr;  // [rows]; null: none
  bool add = false;
  const Activation* activation = nullptr;  // null: none

  float* row(int token) const { return data + std::size_t(token) * stride; }
  // The columns of one group.
  ProductOutput group(int i) const {
    return {data + i * kGroupRows, stride, bias ? bias + i * kGroupRows : nullptr, add, activation};
  }
  // Whether only products are stored.
  bool is_plain() const { return !bias && !add && !activation; }
};

constexpr int kKeyBlock = 16;  // positions in a transposed block of keys
// Positions per step of the online softmax: a page, so that the steps of a row do not depend on the other
// rows of the pass.
constexpr int kKeySpan = kPagePositions;
// Positions of a split, which has its own softmax. Splits begin at fixed positions and are combined in order,
// so that results are bit-identical for any number of threads.
constexpr int kSplitPositions = 8 * kKeySpan;
// Distances in the table of a relative position bias: a span that begins further away has the same bias
// throughout.
constexpr int kBiasMargin = BIAS_REACH + kKeySpan, kBiasRow = 2 * kBiasMargin;
constexpr int kMaxHeadDim = 512;  // of keys and of values, at most
constexpr int kQueryTile = 32;    // maximum tokens of an attention item, for which K and V are read once

// Layout of a head's keys and values in a page. `key_stride` and `value_stride` are padded dimensions.
enum class KvLayout {
  kFloat,  // float32: keys [kKeySpan / 16][key_stride][16], values [kKeySpan][value_stride]
  kHalf,   // the same in f16
  // Values rounded to f16, then to bfloat16, in pairs of dimensions (keys) or positions (values): keys
  // [key_stride / 2][kKeySpan][2], values [kKeySpan / 2][value_stride][2].
  kPairs,
  // Blocks of Q8_0, of 32 dimensions: codes, 128 higher than in Q8_0, in fours of dimensions (keys) or
  // positions (values), then scales in f16: keys [key_dim / 4][kKeySpan][4], [key_dim / 32][kKeySpan], values
  // [kKeySpan / 4][value_dim][4], [value_dim / 32][kKeySpan].
  kQ8,
};
// In kPairs and kQ8, a lane of a key is two or four dimensions: bytes of a lane, and distance to the lane of
// the next dimensions. A span is read in memory order, so that the processor prefetches it.
constexpr std::size_t kKeyLane = 4, kKeyLaneStep = kKeyLane * kKeySpan;
constexpr int kKeyPairStep = kKeySpan * 2;  // elements between pairs of dimensions of a key
// Offsets in kQ8: from the values to the first code of a position; from keys or values to a block's scale.
static constexpr std::size_t q8_value(int dim, int position) {
  return std::size_t(position / 4 * 4 * dim + position % 4);
}
static constexpr std::size_t q8_scale(int dim, int block, int position) {
  return std::size_t(kKeySpan * dim) + std::size_t(block * kKeySpan + position) * sizeof(std::uint16_t);
}
// Bytes of an element in the layouts that are not blocks.
constexpr std::size_t element_bytes(KvLayout layout) {
  return layout == KvLayout::kFloat ? sizeof(float) : sizeof(std::uint16_t);
}
// Bytes of the keys, or of the values, of a head in a page.
constexpr std::size_t span_bytes(KvLayout layout, int stride) {
  if (layout == KvLayout::kQ8) return q8_scale(stride, stride / kBlockCols, 0);
  return std::size_t(kKeySpan) * std::size_t(stride) * element_bytes(layout);
}

// Denominator of a softmax, the sum of the weights 2^(score - shift); 0: none.
struct SoftmaxSum {
  float shift, sum;
};

// The positions [begin, end) that a token sees. Neither bound decreases from one token to the next.
struct VisibleRange {
  int begin, end;
  bool operator==(const VisibleRange&) const = default;
};
// Range of the token at position `own`. `window`: number of positions that it sees, including itself; 0: all.
// `length`: end of the visible positions if it also sees later ones, half the window before it and half after
// it; otherwise 0.
inline VisibleRange visible_range(int own, int window, int length) {
  const int before = window == 0 ? own : length == 0 ? window - 1 : window / 2;
  const int after = length == 0 ? 0 : window == 0 ? length : window / 2;
  const int last = length > 0 && own + after >= length ? length - 1 : own + after;
  const int begin = own > before ? own - before : 0;
  return {begin < last + 1 ? begin : last + 1, last + 1};
}

// Attention of the query heads that share one key-value head. Rows of q, out and sums are tokens.
struct AttentionHead {
  const float* q;                // [tokens][q_stride], at the first head of the group
  std::size_t q_stride, q_step;  // between tokens, and between heads
  float* out;                    // [tokens][out_stride], likewise
  std::size_t out_stride;
  const std::byte* const* pages;  // of the sequence, by position / kKeySpan
  std::size_t keys, values;       // byte offsets of the head's keys and values in a page
  KvLayout layout;
  int key_dim, value_dim;
  int key_stride, value_stride;
  int heads;           // query heads in the group
  int position;        // of token 0
  int window, length;  // of visible_range()
  float scale;         // multiplies q.k
  float cap = 0;       // soft limit of scores; 0: none
  // ALiBi: slope of each head of the group, subtracted for each position of distance; null: none.
  const float* slopes = nullptr;
  // The relative position bias in base-2 logarithms, at distance 0 of the key from the query. Heads of the
  // group are kBiasRow apart. Null: none.
  const float* bias = nullptr;
  // Other addends of the scores, in base-2 logarithms: [tokens * heads][added_stride], a whole number of
  // spans; null: none.
  const float* added = nullptr;
  std::size_t added_stride = 0;
  // Scores per head of the group that count in the sums of weights, without a value; null: none.
  const float* sinks = nullptr;
  // With `sums`, [tokens][sums_stride], computes only one split: without sinks, and without the division by
  // the sums of weights.
  SoftmaxSum* sums = nullptr;
  std::size_t sums_stride = 0;
  int split = 0;

  const void* keys_of(int span) const { return pages[span] + keys; }
  const void* values_of(int span) const { return pages[span] + values; }
};

// Contribution of the content of a query, and of each key, to their score for their relative position
// (arXiv:2006.03654). Keys and queries of relative positions have `stride` floats a row.
struct RelativeQuery {
  const float* q;  // [dim]
  const float* k;  // keys, the first of position 0; a row each k_stride elements
  std::size_t k_stride;
  const float *keys, *queries;  // keys and queries of relative positions
  std::size_t stride;
  const float* row_of;  // the row for position 0; that for position j is at -j
  int positions, dim;
  float scale;
};

// log(1 + exp(x)), which is x in float32 if x is large.
static inline float softplus(float x) {
  return x > 20.0f ? x : std::log1p(std::exp(x));
}

// One head of a state-space layer (Mamba-2, arXiv:2405.21060) over consecutive tokens of a sequence. With
// step = softplus(dt + dt_bias) of a token: state = exp(step * a) * state + b (step * x)^T, and
// y = state^T c + skip * x.
struct ScanHead {
  const float* x;                   // [tokens][dim]
  const float *b, *c;               // [tokens][rows]
  const float* dt;                  // [tokens]
  float* y;                         // [tokens][dim]
  std::size_t x_stride, dt_stride;  // between tokens; x_stride also of b and c
  std::size_t y_stride;
  int dim, rows;
  float a, dt_bias, skip;
  float* state;  // [rows][dim]: in, before the first token; out, after the last one
};

// A token of the gated delta rule, for kGatedDeltaColumns columns of the matrix of a head.
constexpr int kGatedDeltaColumns = 32;
struct GatedDeltaToken {
  const float *q, *k;  // [key_dim]
  const float* v;      // [columns]
  float decay, beta;
  int key_dim, columns;  // columns up to kGatedDeltaColumns
};

struct Kernels {
  const char* name;

  // out[t][r] = sum over k of weight[32 * group + r][k] * x[first + t][k], for r < 32 and t < count, with
  // weights in wide blocks.
  void (*multiply_int8)(const PackedMatrix& weight, int group, const Int8Rows& x, int first, int count,
                        float* out, std::size_t stride);
  // multiply_int8 for one token, with weights in narrow blocks.
  void (*multiply_narrow)(const PackedMatrix& weight, int group, const Int8Rows& x, int token, float* out);
  // Converts a group of a narrow matrix to wide blocks.
  void (*widen)(const PackedMatrix& weight, int group, std::byte* out);
  // multiply_int8 with weights in narrow blocks whose scales are integers, and activations that share a scale
  // in a super-block; null if a set multiplies such weights like others. Any number of tokens.
  void (*multiply_super)(const PackedMatrix& weight, int group, const SuperRows& x, int first, int count,
                         float* out, std::size_t stride) = nullptr;
  // Releases the registers that multiply_int8 and attention keep configured in this thread between calls;
  // null if there are none. Each thread calls it after its last item of a phase.
  void (*end_phase)() = nullptr;
  // multiply_int8 with 32 weight rows in float32; cols, strides and rows are padded with zeros to kFloatPad.
  void (*multiply_float)(const FloatRows& weight, int cols, const FloatRows& x, int first, int count,
                         float* out, std::size_t stride, const PrefetchRange& next);
  // multiply_float for few tokens, with 16-bit weights in the file: rows of cols, a multiple of kFloatPad.
  void (*multiply_half)(const std::uint16_t* weight, bool bfloat16, int cols, const FloatRows& x, int first,
                        int count, float* out, std::size_t stride);
  // multiply_float with a group in panels.
  void (*multiply_float_panels)(const FloatBlock* blocks, int n_blocks, const FloatRows& x, int first,
                                int count, const ProductOutput& out, const PrefetchRange& next);
  // Converts kGroupRows rows of floats to panels.
  void (*to_blocks)(const FloatRows& rows, int n_blocks, FloatBlock* out);
  // multiply_int8 with a group of weights in pairs and x rounded to bfloat16; null if a set multiplies such
  // weights in float32.
  void (*multiply_pairs)(const PairBlock* blocks, int n_blocks, const PairRows& x, int first, int count,
                         const ProductOutput& out, const PrefetchRange& next) = nullptr;
  // multiply_int8 of groups with rotated rows. A weight is its code minus `rotated_zero`.
  void (*multiply_rotated)(const PackedMatrix& weight, GroupRange groups, const RotatedRows& x, int first,
                           int count, const ProductOutput& out, const PrefetchRange& next);
  int rotated_zero;
  // Rotates and rounds a row of n values. `memory` has room for them, padded to a multiple of kRotatedCols.
  void (*rotate)(const float* x, int n, float* memory, std::byte* q, RotatedRows::Terms& terms);
  // As rotate, to 16 bits; null if a set multiplies float32 as fast. multiply_rotated takes such rows, too.
  void (*rotate_wide)(const float* x, int n, float* memory, std::byte* q, RotatedRows::Terms& terms);
  // For multiply_rotated in 8 bits, after rotate: limits the sums of adjacent bytes, so that sums of two
  // products fit 16 bits. Null if a set adds them in 32 bits.
  void (*limit_pairs)(std::byte* q, int padded, RotatedRows::Terms& terms) = nullptr;
  void rotate_activations(const float* x, int n, bool wide, float* memory, const RotatedRows& rows,
                          int row) const {
    (wide ? rotate_wide : rotate)(x, n, memory, rows.row(row), rows.terms[row]);
    if (limit_pairs && !wide) limit_pairs(rows.row(row), round_up(n, kRotatedCols), rows.terms[row]);
  }
  // Rounds a group of a quantized matrix in wide blocks to pairs, to nearest; null as multiply_pairs.
  void (*widen_to_pairs)(const PackedMatrix& weight, int group, PairBlock* out) = nullptr;
  // Rounds the first n values of rows to nearest even.
  void (*round_to_bfloat16)(const float* x, std::size_t x_stride, int rows, int n, std::uint16_t* out,
                            std::size_t out_stride) = nullptr;
  void (*half_to_float)(const std::uint16_t* in, float* out, int n);
  void (*bfloat16_to_float)(const std::uint16_t* in, float* out, int n);

  // Quantizes tokens [first, first + count) of a tile. x is [count][stride], out the tokens' [n_blocks]
  // tiles.
  void (*quantize)(const float* x, std::size_t stride, int first, int count, int n_blocks,
                   ActivationTile* out);
  // Quantizes a row of n_blocks super-blocks as token `token` of their tiles; null as multiply_super.
  void (*quantize_super)(const float* x, int token, int n_blocks, SuperTile* out) = nullptr;
  // out = x / rms(x) * weight. out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // out = (x - mean(x)) / deviation(x) * weight + bias. `bias` may be null. out may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);
  // Turns each pair by its angle; cos_sin is [pairs] cosines, then [pairs] sines.
  void (*rope)(float* head, const float* cos_sin, int pairs, RopeStyle style);
  // out = products + bias, or += with `add`, for the first `columns` of kGroupRows products in each row.
  // `bias` has kGroupRows values, or is null.
  void (*add_products)(const float* products, const float* bias, int rows, int columns, bool add, float* out,
                       std::size_t stride);
  // out = activation(gate) * up, with limits if the activation has them.
  void (*gated)(const float* gate, const float* up, Activation activation, int n, float* out);
  // out = activation(x) of the first `columns` values of rows. out may be x.
  void (*activate)(const float* x, std::size_t x_stride, Activation activation, int rows, int columns,
                   float* out, std::size_t out_stride);
  // Scans token by token, and sums each value of y row by row, so that results do not depend on how tokens
  // are divided among calls.
  void (*scan)(const ScanHead& head, int tokens);
  // x = cap * tanh(x / cap).
  void (*soft_cap)(float* x, float cap, int n);
  // x *= sigmoid(gate).
  void (*apply_gate)(const float* gate, int n, float* x);
  // S = decay * S; S += k * beta * (v - k S); out = q S. `state` is S, [key_dim][kGatedDeltaColumns].
  void (*gated_delta)(const GatedDeltaToken& token, float* state, float* out);
  // out[j] = scale * (q . keys[row] + k[j] . queries[row]).
  void (*relative_scores)(const RelativeQuery& query, float* out);
  // Sum of exp(x - shift).
  double (*sum_exp)(const float* x, float shift, int n);
  // Stores keys, or values, of `count` positions of a page from `position` on, for one head. Rows of the
  // input are `step` floats apart. The positions are in one block of kKeyBlock; `stride` is key_stride or
  // value_stride.
  void (*store_keys)(const float* key, std::size_t step, int count, int dim, int stride, KvLayout layout,
                     void* keys, int position);
  void (*store_values)(const float* value, std::size_t step, int count, int dim, int stride, KvLayout layout,
                       void* values, int position);
  // Fastest layout for attention if the cache is in f16. All sets support the other layouts in float32. Keys
  // in pairs are padded with zeros to a multiple of key_multiple.
  KvLayout half_layout = KvLayout::kHalf;
  int key_multiple = 1;
  // Computes tokens [first, first + count), count <= kQueryTile.
  void (*attention)(const AttentionHead& head, int first, int count);
  // out = attention of a head of one token, from its results for `count` splits. `results` and `sums` are of
  // the first split; further ones follow at the strides. `sink` is that of the head; null: none.
  void (*combine_splits)(const float* results, std::size_t results_stride, const SoftmaxSum* sums,
                         std::size_t sums_stride, int count, int value_dim, const float* sink, float* out);

  // Register-only products at peak rate, of 8-bit integers, of float32 and, if the set has them, of pairs of
  // bfloat16. Each returns the number of multiply-adds.
  double (*run_dots)(int rounds);
  double (*run_fmas)(int rounds);
  double (*run_bfloat16)(int rounds) = nullptr;
};

// The fastest set that this machine runs, or the one named by the environment variable METAL_PREFILL_CPU_ISA.
// Throws DeviceError if that names a set that is unknown or that this machine lacks.
const Kernels& select_kernels();

// Speed of products of bfloat16 pairs in vectors relative to float32, measured once per process; 0 if this
// machine has no such products. Decides whether avx512bf16 comes before avx512vnni.
double pair_speedup();

// Sets the result of pair_speedup() of an earlier process on the same processor; has no effect after a
// measurement, or on a processor without such products.
void use_pair_speedup(double speedup);

// Sets that were built and that this machine runs, fastest first, and their names.
std::vector<const Kernels*> available_kernels();
std::vector<std::string> kernel_sets();

// Names of all sets that were built, whether this machine runs them or not, fastest first.
std::vector<std::string> built_sets();

// Returns the set of that name. Throws std::invalid_argument if this machine has none.
const Kernels& kernels_named(const std::string& set);

}  // namespace metal_prefill::cpu
