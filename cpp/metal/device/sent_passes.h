// Passes in flight on the GPU.
#pragma once

#include "metal_encoder.h"
#include "metal_engine.h"

namespace metal_prefill::metal {

// A pass on the GPU, with all that it uses there except pages and states. The holder of SlotUse::mutex
// creates and finishes it.
class MetalEngine::SentPass {
 public:
  // `choices` are results of an earlier pass, used as tokens of this one; null if the chunks have the tokens.
  SentPass(MetalEngine& engine, std::span<Chunk* const> chunks, id<MTLBuffer> choices);

  // Waits for the pass and counts it, once. Throws DeviceError on every call if the GPU failed, or the error
  // of an interrupted wait.
  void finish(SlotUse& use, CallCounters& counters) {
    if (!is_finished_) {
      try {
        encoder_.finish();
        if (use.left == last_) use.left = nil;
        counters += counters_;
      } catch (const DeviceError&) {
        failure_ = std::current_exception();
      }
      is_finished_ = true;
    }
    if (failure_) std::rethrow_exception(failure_);
  }
  const PassRows& rows() const { return rows_; }
  const PassMemory& memory() const { return *memory_; }

 private:
  CallCounters counters_;
  const Device device_;  // counts in counters_
  const std::shared_ptr<PassMemory> memory_;
  [[maybe_unused]] const id<MTLBuffer> choices_;  // retained here, as the command buffers do not retain it
  const RopeTables::ByLayer rope_tables_;
  const PassRows rows_;
  id<MTLCommandBuffer> last_;
  bool is_finished_ = false;
  std::exception_ptr failure_;
  MetalEncoder encoder_;  // the last member: its destructor waits for the GPU before that of the others
};

// A pass, and for each of its chunks the chunk of the current call; null if no longer requested.
struct MetalEngine::RequestedPass {
  std::shared_ptr<SentPass> pass;
  std::vector<Chunk*> chunks;
};

// A pass with the next token of a session, and perhaps of others, which the GPU started before the caller
// requested it.
struct MetalEngine::Ahead {
  std::shared_ptr<SentPass> pass;
  std::size_t chunk;  // index of the session's chunk in the pass
  int position;
  TokenId token;  // the chosen token that the pass starts from
  std::vector<PageId> pages;
  ChunkStates states;
};

}  // namespace metal_prefill::metal
