// Sends passes to the GPU, waits for them and delivers their results.
#include "sent_passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../base/release_pages.h"
#include "metal_cache.h"

namespace metal_prefill::metal {

// The buffers of a pass: pages, states and activations.
class MetalEngine::Buffers final : public PassBuffers {
 public:
  // `choices` are the results of the previous pass, or null.
  Buffers(const MetalEngine& engine, const Device& device, PassMemory& memory,
          RopeTables::ByLayer rope_tables, id<MTLBuffer> choices)
      : engine_(engine),
        device_(device),
        memory_(memory),
        rope_tables_(std::move(rope_tables)),
        choices_(choices) {}
  View get(BufferName name, std::size_t bytes) override { return memory_.get(device_, name, bytes); }
  LayerCache cache(int layer) override {
    const PageLayout::Place& place = engine_.forward_.page_layout()[layer];
    return {engine_.pages_.view(BufferName::kKeys, place.keys),
            engine_.pages_.view(BufferName::kValues, place.values)};
  }
  View states(int layer) override {
    const StateLayout& layout = engine_.forward_.state_layout();
    return engine_.states_.view(BufferName::kStates, layout.first[std::size_t(layer)] * sizeof(float));
  }
  View rope_table(int layer) override {
    return view_of((*rope_tables_)[std::size_t(layer)], BufferName::kRopeTable);
  }
  View choices() override { return choices_ ? view_of(choices_, BufferName::kResult) : View{}; }

 private:
  const MetalEngine& engine_;
  const Device& device_;
  PassMemory& memory_;
  const RopeTables::ByLayer rope_tables_;
  const id<MTLBuffer> choices_;
};

namespace {

std::string label_of(const PassRows& rows, std::span<Chunk* const> chunks) {
  const std::string tokens = std::to_string(rows.all.count) + " tokens ";
  return chunks.size() == 1 ? tokens + "at position " + std::to_string(chunks[0]->position)
                            : tokens + "of " + std::to_string(chunks.size()) + " sequences";
}

std::vector<PassChunk> shapes_of(std::span<Chunk* const> chunks) {
  std::vector<PassChunk> shapes;
  for (const Chunk* chunk : chunks)
    shapes.push_back({int(chunk->tokens.size()), chunk->position, row_output_of(chunk->output),
                      rows_of(chunk->output), chunk->expansion.hidden()});
  return shapes;
}

// The chunks of the next tokens, for a pass that is sent ahead.
std::vector<Chunk> chunks_after(std::span<Chunk* const> chunks) {
  static constexpr TokenId kUnknown[] = {0};  // placeholder: kernels read the tokens from the previous pass
  std::vector<Chunk> next(chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = *chunks[i];
    next[i].tokens = kUnknown;
    next[i].position = chunk.position + int(chunk.tokens.size());
    next[i].cache = chunk.cache;
    if (!chunk.states.writes.empty())
      next[i].states = {chunk.states.writes.back().state, {{1, chunk.states.ahead, false}}, {}};
  }
  return next;
}

template <typename T>
void copy(std::span<const T> from, const View& to, std::size_t index = 0) {
  if (!from.empty())
    std::memcpy(static_cast<T*>(buffer_of(to).contents) + index, from.data(), from.size_bytes());
}

}  // namespace

// Results of chunks with few tokens are bit-identical to those of the chunk alone only in a pass without
// longer chunks.
void MetalEngine::forward(std::span<Chunk> chunks, CallCounters& counters) {
  require_unforked();
  residency_.used();
  std::vector<Chunk*> few, many;
  for (Chunk& chunk : chunks) (chunk.tokens.size() <= std::size_t(kFewTokens) ? few : many).push_back(&chunk);
  for (const std::vector<Chunk*>* together : {&few, &many})
    if (!together->empty()) run_pass(*together, counters);
}

MetalEngine::SentPass::SentPass(MetalEngine& engine, std::span<Chunk* const> chunks, id<MTLBuffer> choices)
    : device_(engine.device_.counting(counters_)),
      memory_(engine.pass_memory_.take()),
      choices_(choices),
      rope_tables_(engine.rope_tables_.by_layer()),
      rows_(engine.forward_.rows_of(shapes_of(chunks))),
      encoder_(device_, engine.kernels_, label_of(rows_, chunks),
               choices || engine.slot_use_.left ? Gpu::kBusy : Gpu::kIdle) {
  Buffers buffers(engine, device_, *memory_, rope_tables_, choices);
  engine.fill(engine.forward_.tables(rows_, buffers), rows_, chunks);
  engine.forward_.encode(encoder_, rows_, buffers);
  last_ = encoder_.send();
  engine.slot_use_.left = last_;
}

void MetalEngine::run_pass(std::span<Chunk* const> chunks, CallCounters& counters) {
  const AutoreleasePool pool;
  if (chunks[0]->trace) return trace_pass(chunks, counters);
  // States are retained before the hold and released after it: a thread that takes a slot holds the lock of
  // the pool of states while it waits for the hold to grow the slots.
  std::vector<RequestedPass> passes;
  std::vector<Chunk*> others = take_ahead(chunks, passes);
  const bool continues = std::all_of(chunks.begin(), chunks.end(), [](const Chunk* chunk) {
    const auto* greedy = std::get_if<GreedyOutput>(&chunk->output);
    return greedy && greedy->continues;
  });
  std::vector<Chunk> after = continues ? chunks_after(chunks) : std::vector<Chunk>();
  std::shared_ptr<SentPass> next;
  const std::scoped_lock hold(slot_use_.mutex);
  if (!others.empty()) passes.push_back({std::make_shared<SentPass>(*this, others, nil), std::move(others)});
  // The next pass reads its tokens from these rows.
  if (continues && std::equal(chunks.begin(), chunks.end(), passes[0].chunks.begin(), passes[0].chunks.end()))
    next = send_after(after, *passes[0].pass);
  for (const auto& [pass, asking] : passes) {
    pass->finish(slot_use_, counters);
    deliver(pass->rows(), asking, pass->memory());
  }
  if (!next) return;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const std::span<const PageId> held = chunks[i]->cache->pages();
    static_cast<MetalCache&>(*chunks[i]->cache)
        .keep_ahead({next,
                     i,
                     after[i].position,
                     std::get<GreedyOutput>(chunks[i]->output).choices.chosen[0],
                     {held.begin(), held.end()},
                     std::move(after[i].states)});
  }
}

// Appends the passes that were sent ahead for some of the chunks, and returns the other chunks.
std::vector<Chunk*> MetalEngine::take_ahead(std::span<Chunk* const> chunks,
                                            std::vector<RequestedPass>& passes) {
  std::vector<Chunk*> others;
  for (Chunk* chunk : chunks) {
    const std::unique_ptr<Ahead> ahead = static_cast<MetalCache&>(*chunk->cache).take_ahead(*chunk);
    if (!ahead) {
      others.push_back(chunk);
      continue;
    }
    auto asked = std::find_if(passes.begin(), passes.end(),
                              [&](const RequestedPass& other) { return other.pass == ahead->pass; });
    if (asked == passes.end()) {
      const std::size_t n = std::size_t(ahead->pass->rows().all.count);  // chunks of one token
      asked = passes.insert(passes.end(), {ahead->pass, std::vector<Chunk*>(n)});
    }
    asked->chunks[ahead->chunk] = chunk;
  }
  return others;
}

void MetalEngine::trace_pass(std::span<Chunk* const> chunks, CallCounters& counters) {
  const Device device = device_.counting(counters);
  const std::shared_ptr<PassMemory> memory = pass_memory_.take();
  for (Chunk* chunk : chunks) static_cast<MetalCache&>(*chunk->cache).drop_ahead();
  const std::scoped_lock hold(slot_use_.mutex);
  slot_use_.settle();
  Buffers buffers(*this, device, *memory, rope_tables_.by_layer(), nil);
  const PassRows rows = forward_.rows_of(shapes_of(chunks));
  fill(forward_.tables(rows, buffers), rows, chunks);
  TracingEncoder encoder(device, kernels_, *chunks[0]->trace);
  forward_.encode(encoder, rows, buffers);
  deliver(rows, chunks, *memory);
}

// Sends the pass with the tokens that `before` chooses. Returns null if that fails, as the current call does
// not need the pass.
std::shared_ptr<MetalEngine::SentPass> MetalEngine::send_after(std::span<Chunk> chunks,
                                                               const SentPass& before) {
  std::vector<TokenId> chosen(chunks.size(), -1);  // filled by the call that requests the pass, not here
  std::vector<Chunk*> pointers;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    chunks[i].output = GreedyOutput{.choices = {.chosen = {&chosen[i], 1}}};
    pointers.push_back(&chunks[i]);
  }
  try {
    return std::make_shared<SentPass>(*this, pointers, before.memory().peek(BufferName::kResult));
  } catch (const DeviceError&) {
    return nullptr;
  }
}

void MetalEngine::fill(const PassTables& tables, const PassRows& rows, std::span<Chunk* const> chunks) const {
  copy(std::span(rows.rows), tables.rows);
  copy(std::span(rows.tiles), tables.tiles);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const std::size_t first = rows.first_page[i], end = rows.first_page[i + 1];
    copy(chunks[i]->cache->pages().first(end - first), tables.pages, first);
  }
  if (!rows.states.empty()) {
    std::vector<StateRow> states = rows.states;
    const std::span of_chunks = std::span(states).last(chunks.size());
    for (std::size_t i = 0; i < chunks.size(); ++i)
      if (const StateRef& before = chunks[i]->states.before) of_chunks[i].before = before.slot();
    for (const RowRun& run : rows.all.runs) {
      const ChunkStates& chunk = chunks[std::size_t(run.chunk)]->states;
      for (int i = 0; i < run.count; ++i) {
        StateRow& row = states[std::size_t(run.row + i)];
        if (chunk.before) row.before = chunk.before.slot();
        for (const StateWrite& write : chunk.writes)
          if (write.tokens == run.token + i + 1) row.after = write.state.slot();
      }
    }
    copy(std::span<const StateRow>(states), tables.states);
  }
  const auto tokens_of = [](const RowRun& run, std::span<const TokenId> tokens) {
    return tokens.subspan(std::size_t(run.token), std::size_t(run.count));
  };
  for (const RowRun& run : rows.all.runs)
    copy(tokens_of(run, chunks[std::size_t(run.chunk)]->tokens), tables.ids, std::size_t(run.row));
  if (tables.types) {
    for (const RowRun& run : rows.all.runs) {
      const Chunk& chunk = *chunks[std::size_t(run.chunk)];
      const int first_type = first_segment(config(), chunk.tokens, chunk.segment);
      std::vector<TokenId> types(chunk.tokens.size());
      for (std::size_t i = 0; i < types.size(); ++i) types[i] = int(i) >= first_type;
      copy(tokens_of(run, types), tables.types, std::size_t(run.row));
    }
  }
  if (tables.layer_rows) fill_layer_rows(tables.layer_rows, rows, chunks);
  for (const RowRun& run : rows.wanted.runs)
    if (const auto* scored = std::get_if<LogProbsOutput>(&chunks[std::size_t(run.chunk)]->output))
      copy(scored->targets, tables.targets, std::size_t(run.row - rows.scored.first));
}

// Fills rows of the embedding of layer inputs, which stays in the mapped file.
void MetalEngine::fill_layer_rows(const View& out, const PassRows& rows,
                                  std::span<Chunk* const> chunks) const {
  const Tensor& table = model_.per_layer_embedding;
  const std::size_t dim = std::size_t(config().per_layer_dim),
                    padded_dim = std::size_t(padded_.config.per_layer_dim),
                    layers = std::size_t(config().n_layers);
  const float scale = std::sqrt(float(dim));
  std::vector<float> own(layers * dim);
  for (const RowRun& run : rows.all.runs) {
    for (int i = 0; i < run.count; ++i) {
      const TokenId token = chunks[std::size_t(run.chunk)]->tokens[std::size_t(run.token + i)];
      dequantize_row(table.type, table.row(token), own.data(), own.size());
      float* row =
          static_cast<float*>(buffer_of(out).contents) + std::size_t(run.row + i) * layers * padded_dim;
      for (std::size_t layer = 0; layer < layers; ++layer, row += padded_dim) {
        std::fill(row + dim, row + padded_dim, 0.0f);
        std::transform(own.data() + layer * dim, own.data() + (layer + 1) * dim, row,
                       [&](float value) { return scale * value; });
      }
    }
  }
  // The system has mapped many pages around each row.
  release_pages(table.data, table.bytes);
}

// Copies the outputs from the buffers that the host can read.
void MetalEngine::deliver(const PassRows& rows, std::span<Chunk* const> chunks,
                          const PassMemory& memory) const {
  const auto contents = [&](BufferName name) { return memory.peek(name).contents; };
  const std::size_t vocab_size = std::size_t(config().vocab_size);
  // Logits of rows for the host, [rows][vocab_size].
  const auto logits_of = [&](const RowRun& run) {
    const auto* logits = static_cast<const float*>(contents(BufferName::kHostLogits));
    return logits + std::size_t(run.row - rows.logits.first) * vocab_size;
  };
  // Hidden states: rows of the residual stream come after normalized ones.
  const std::size_t padded_dim = std::size_t(padded_.config.dim);
  const auto states_of = [&](const RowRun& run) {
    const auto* states = static_cast<const float*>(contents(BufferName::kHidden));
    return states + std::size_t(run.row - rows.hidden.first) * padded_dim;
  };
  for (const RowRun& run : rows.wanted.runs) {
    if (!chunks[std::size_t(run.chunk)]) continue;
    std::visit(Overloaded{[](const NoOutput&) {},
                          [&](const GreedyOutput& greedy) {
                            const auto* best = static_cast<const Candidate*>(contents(BufferName::kResult));
                            best += run.row - rows.greedy.first;
                            for (TokenId& chosen : greedy.choices.chosen) {
                              chosen = best->index == ARGMAX_NONE ? -1 : TokenId(best->index);
                              ++best;
                            }
                          },
                          [&](SampledOutput& sampled) {
                            const float* logits = logits_of(run);
                            for (int i = 0; i < run.count; ++i)
                              sampled.choose(i, {logits + std::size_t(i) * vocab_size, vocab_size});
                          },
                          [&](const LogitsOutput& all) {
                            std::memcpy(all.logits, logits_of(run), vocab_size * sizeof(float));
                          },
                          [&](const LogProbsOutput& scored) {
                            const auto* log_probs =
                                static_cast<const float*>(contents(BufferName::kLogProbs));
                            log_probs += run.row - rows.scored.first;
                            std::memcpy(scored.log_probs, log_probs, std::size_t(run.count) * sizeof(float));
                          },
                          [&](const HiddenOutput& hidden) {
                            const float* states = states_of(run);
                            const std::size_t dim = std::size_t(hidden.dim);
                            const float factor = hidden.normed ? 1.0f : config().residual_scale;
                            for (std::size_t i = 0; i < std::size_t(run.count); ++i) {
                              const float* x = states + i * padded_dim;
                              std::transform(x, x + dim, hidden.states + i * dim,
                                             [&](float value) { return value * factor; });
                            }
                          },
                          [&](PooledOutput& pooled) { pooled.pool(states_of(run), padded_dim); }},
               chunks[std::size_t(run.chunk)]->output);
  }
}

}  // namespace metal_prefill::metal
