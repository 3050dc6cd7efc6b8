#include "pass_rows.h"

#include <algorithm>

#include "../../../shaders/attention.h"
#include "../../base/rounding.h"

namespace metal_prefill::metal {

namespace {

static_assert(PAGE_POSITIONS == kPagePositions && kPagePositions % PREFILL_KEYS == 0);

// Splits the keys of a row among threadgroups of attention_decode, with enough keys for each.
PassRow row_at(int position, std::size_t first_page, const Tuning& tuning) {
  const int keys = position + 1, splits = std::clamp(keys / tuning.split_keys, 1, tuning.max_splits);
  return {u32_t(position), u32_t(first_page), u32_t(splits),
          u32_t(ceil_div(std::size_t(keys), std::size_t(splits)))};
}

// Appends the tiles of a part, of one shape. Those with the most visible keys, which take longest, are first.
void add_tiles(std::vector<AttentionTile>& tiles, PassPart& part, const PassRows& pass,
               std::span<const PassChunk> chunks, const TileShape& shape) {
  const int first_tile = int(tiles.size());
  for (const RowRun& run : part.runs) {
    const PassChunk& chunk = chunks[std::size_t(run.chunk)];
    const int stacked = run.count * shape.heads;
    for (int first = (stacked - 1) / shape.rows * shape.rows; first >= 0; first -= shape.rows)
      tiles.push_back({u32_t(run.row - part.first), u32_t(run.count), u32_t(run.position),
                       u32_t(pass.first_page[std::size_t(run.chunk)]), u32_t(first),
                       u32_t(chunk.position + chunk.tokens - chunk.hidden)});
  }
  part.tiles.push_back({first_tile, int(tiles.size()) - first_tile});
  if (part.runs.size() < 2) return;
  const auto last_key = [&](const AttentionTile& tile) {
    return tile.position +
           std::min(tile.tokens - 1, (tile.first + u32_t(shape.rows) - 1) / u32_t(shape.heads));
  };
  std::stable_sort(tiles.begin() + first_tile, tiles.end(),
                   [&](const AttentionTile& a, const AttentionTile& b) { return last_key(a) > last_key(b); });
}

}  // namespace

RowOutput row_output_of(const Output& output) {
  return std::visit(Overloaded{
                        [](const NoOutput&) { return RowOutput::kNone; },
                        [](const GreedyOutput&) { return RowOutput::kGreedy; },
                        [](const OneOf<SampledOutput, LogitsOutput> auto&) { return RowOutput::kLogits; },
                        [](const LogProbsOutput&) { return RowOutput::kLogProbs; },
                        [](const HiddenOutput& hidden) {
                          return hidden.normed ? RowOutput::kHidden : RowOutput::kResidual;
                        },
                        [](const PooledOutput&) { return RowOutput::kHidden; },
                    },
                    output);
}

PassRows::PassRows(std::span<const PassChunk> chunks, const Tuning& tuning, std::span<const TileShape> shapes,
                   bool causal)
    : few(causal), one_each(causal), one_wanted(causal) {
  first_page.push_back(0);
  std::size_t n = 0;
  for (const PassChunk& chunk : chunks) {
    few = few && chunk.tokens <= kFewTokens;
    one_each = one_each && chunk.tokens == 1;
    one_wanted = one_wanted && chunk.output_rows <= 1;
    first_page.push_back(first_page.back() + pages_of(chunk.position + chunk.tokens));
    n += std::size_t(chunk.tokens);
  }
  rows.reserve(n);

  const auto add = [&](int chunk, int token, int count, int position) {
    const RowRun run = {int(rows.size()), count, position + token, chunk, token};
    for (int i = 0; i < count; ++i)
      rows.push_back(row_at(run.position + i, first_page[std::size_t(chunk)], tuning));
    return run;
  };
  for (int i = 0; i < int(chunks.size()); ++i) {
    const PassChunk& chunk = chunks[std::size_t(i)];
    const int unwanted = chunk.tokens - chunk.output_rows;
    if (unwanted > 0) all.runs.push_back(add(i, 0, unwanted, chunk.position));
  }
  wanted.first = int(rows.size());
  const auto add_wanted = [&](RowOutput output) {
    const int first = int(rows.size());
    for (int i = 0; i < int(chunks.size()); ++i) {
      const PassChunk& chunk = chunks[std::size_t(i)];
      if (chunk.output != output) continue;
      const int count = chunk.output_rows;
      const RowRun run = add(i, chunk.tokens - count, count, chunk.position);
      wanted.runs.push_back(run);
      if (!all.runs.empty() && all.runs.back().chunk == i)
        all.runs.back().count += count;  // continues the previous rows of its sequence
      else
        all.runs.push_back(run);
    }
    return PassRange{first, int(rows.size()) - first};
  };
  scored = add_wanted(RowOutput::kLogProbs);
  greedy = add_wanted(RowOutput::kGreedy);
  logits = add_wanted(RowOutput::kLogits);
  hidden = add_wanted(RowOutput::kHidden);
  residual = add_wanted(RowOutput::kResidual);

  all.count = int(rows.size());
  wanted.count = all.count - wanted.first;
  for (PassPart* part : {&all, &wanted}) {
    for (const PassRow& row : std::span(rows).subspan(std::size_t(part->first))) {
      part->splits = std::max(part->splits, row.splits);
      part->split_keys = std::max(part->split_keys, row.split_keys);
    }
  }
  if (few) return;
  for (const TileShape& shape : shapes) add_tiles(tiles, all, *this, chunks, shape);
  if (one_wanted) return;
  for (const TileShape& shape : shapes) add_tiles(tiles, wanted, *this, chunks, shape);
}

void PassRows::add_states(std::span<const PassChunk> chunks) {
  states.resize(rows.size());
  std::vector<StateRow> of_chunk(chunks.size(), StateRow{0, 0, 0, 0, STATE_NONE, STATE_NONE, 0});
  for (std::size_t i = 0; i < chunks.size(); ++i) of_chunk[i].tokens = u32_t(chunks[i].tokens);
  for (const RowRun& run : all.runs) {
    StateRow& row = of_chunk[std::size_t(run.chunk)];
    if (run.token == 0) row.first = u32_t(run.row);
    row.split = u32_t(run.token);
    row.rest = u32_t(run.row);
  }
  for (const RowRun& run : all.runs)
    for (int i = 0; i < run.count; ++i) {
      StateRow& row = states[std::size_t(run.row + i)];
      row = of_chunk[std::size_t(run.chunk)];
      row.token = u32_t(run.token + i);
    }
  states.insert(states.end(), of_chunk.begin(), of_chunk.end());
}

}  // namespace metal_prefill::metal
