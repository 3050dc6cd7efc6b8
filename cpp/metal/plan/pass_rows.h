// The rows of a pass in order, and the tables by which kernels find the sequence of each row.
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
  int output_rows;  // number of last tokens that have an output
  int hidden = 0;   // number of last tokens that no token sees: Expansion::hidden()
};

// A chunk with an output of its last token, or with log probabilities of all.
inline PassChunk last_rows(int tokens, int position, RowOutput output) {
  const int rows = output == RowOutput::kNone ? 0 : output == RowOutput::kLogProbs ? tokens : 1;
  return {tokens, position, output, rows, 0};
}

// Maximum tokens of a chunk whose results are bit-identical to those of single tokens.
inline constexpr int kFewTokens = 8;

// Rows that are consecutive both in the pass and in their sequence.
struct RowRun {
  int row;  // first row
  int count;
  int position;  // of the first row
  int chunk;
  int token;  // token of the first row, counted in the chunk
};

// Shape of the tiles into which attention_prefill divides stacked query heads.
struct TileShape {
  int heads;  // query heads that share a KV head
  int rows;   // stacked rows per tile
  bool operator==(const TileShape&) const = default;
};

// Consecutive rows, or tiles, of a pass.
struct PassRange {
  int first = 0, count = 0;
};

// The last `count` rows of a pass.
struct PassPart : PassRange {
  std::vector<RowRun> runs;
  std::vector<PassRange> tiles;      // of attention_prefill, per shape; their rows count from `first`
  u32_t splits = 1, split_keys = 1;  // of attention_decode: the maximum over the rows
};

struct PassRows {
  // If tokens see later ones, rows count as those of long chunks. `shapes` are the layers' tile shapes.
  PassRows(std::span<const PassChunk> chunks, const Tuning& tuning, std::span<const TileShape> shapes,
           bool causal);

  // Fills `states`, without slots.
  void add_states(std::span<const PassChunk> chunks);

  // Number of chunks in `states`.
  int chunks() const { return int(states.size() - rows.size()); }

  // In order: rows without an output, with scored targets, with a largest logit, with logits for the host,
  // with a hidden state after the output norm, and with one before it.
  PassPart all, wanted;
  PassRange scored, greedy, logits, hidden, residual;
  bool few = true;         // no chunk has more than kFewTokens
  bool one_each = true;    // every chunk has one token
  bool one_wanted = true;  // every chunk has at most one wanted row

  // Tables for the kernels.
  std::vector<PassRow> rows;
  std::vector<AttentionTile> tiles;     // of all rows, by shape, then of the wanted ones
  std::vector<StateRow> states;         // of each row, then of each chunk; empty: no layer has a state
  std::vector<std::size_t> first_page;  // of each chunk in the block tables; the last entry is the end
};

}  // namespace metal_prefill::metal
