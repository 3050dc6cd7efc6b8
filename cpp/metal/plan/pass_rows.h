// The rows of a pass in their order, and the tables by which kernels find the sequence of each row.
#pragma once

#include <span>
#include <vector>

#include "../../../shaders/args.h"
#include "../../engine/engine.h"
#include "tuning.h"

namespace metal_prefill::metal {

// Result that dispatches compute for a row after the last layer.
enum class RowOutput {
  kNone,
  kGreedy,    // the id of the largest logit
  kLogits,    // all logits
  kLogProbs,  // the log probability of the row's target
  kHidden,    // the residual stream after the output norm
  kResidual,  // the same before the output norm
};
RowOutput row_output_of(const Output& output);

// The part of one sequence in a pass. The dispatches of a pass depend on its chunks, and not on the ids of
// their tokens.
struct PassChunk {
  int tokens;
  int position;  // of the first one
  RowOutput output;
  int output_rows;  // the last tokens, which have an output
  int hidden = 0;   // the last tokens, which no token sees: Expansion::hidden()
};

// One with an output of its last token, or log probabilities of all.
inline PassChunk last_rows(int tokens, int position, RowOutput output) {
  const int rows = output == RowOutput::kNone ? 0 : output == RowOutput::kLogProbs ? tokens : 1;
  return {tokens, position, output, rows, 0};
}

// Most tokens of a chunk that are computed as if they came one by one, bit for bit.
inline constexpr int kFewTokens = 8;

// Rows that are consecutive both in the pass and in their sequence.
struct RowRun {
  int row;  // the first
  int count;
  int position;  // of the first row
  int chunk;
  int token;  // of the chunk: that of the first row
};

// How attention_prefill divides stacked query heads into tiles.
struct TileShape {
  int heads;  // query heads that share a KV head
  int rows;   // stacked rows of a tile
  bool operator==(const TileShape&) const = default;
};

// Consecutive rows, or tiles, of a pass.
struct PassRange {
  int first = 0, count = 0;
};

// The last `count` rows of a pass.
struct PassPart : PassRange {
  std::vector<RowRun> runs;
  std::vector<PassRange> tiles;      // of attention_prefill, of each shape; their rows count from `first`
  u32_t splits = 1, split_keys = 1;  // of attention_decode: most of any row
};

struct PassRows {
  // If tokens see later ones, the rows count as those of long chunks. `shapes` are those of tiles of layers.
  PassRows(std::span<const PassChunk> chunks, const Tuning& tuning, std::span<const TileShape> shapes,
           bool causal);

  // Fills `states`, without slots.
  void add_states(std::span<const PassChunk> chunks);

  // Chunks in `states`.
  int chunks() const { return int(states.size() - rows.size()); }

  // In this order: rows without an output, with scored targets, with a largest logit, with logits for the
  // host, with a hidden state after the output norm, and with one before it.
  PassPart all, wanted;
  PassRange scored, greedy, logits, hidden, residual;
  bool few = true;         // no chunk has more than kFewTokens
  bool one_each = true;    // every chunk has one token
  bool one_wanted = true;  // of each chunk at most

  // Tables for the kernels.
  std::vector<PassRow> rows;
  std::vector<AttentionTile> tiles;     // of all rows, those of each shape, then of the wanted ones
  std::vector<StateRow> states;         // of each row, then of each chunk; empty: no layer has a state
  std::vector<std::size_t> first_page;  // of each chunk in the block tables, and after the last chunk
};

}  // namespace metal_prefill::metal
