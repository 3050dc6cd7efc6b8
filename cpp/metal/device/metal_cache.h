// The cache of a session on the GPU.
#pragma once

#include "metal_engine.h"
#include "sent_passes.h"
#include "waits.h"

namespace metal_prefill::metal {

// The pages of a session, and the pass that was started ahead of its request.
class MetalEngine::MetalCache final : public Cache {
 public:
  explicit MetalCache(MetalEngine& engine) : Cache(engine.memory_), metal_(engine) { ++metal_.sessions_; }
  ~MetalCache() override {
    drop_ahead();
    if (metal_.forked_ || gpu_is_lost()) return;
    if (--metal_.sessions_ == 0) metal_.pass_memory_.trim();
  }

  void reserve(int kept, int end, CallCounters& counters) override;
  void truncate(int positions) override {
    drop_ahead();
    Cache::truncate(positions);
  }
  void share(const Cache& from, int positions) override {
    drop_ahead();
    Cache::share(from, positions);
  }
  void adopt(std::vector<PageId> pages) override {
    drop_ahead();
    Cache::adopt(std::move(pages));
  }
  void read(int layer, bool values, int positions, std::byte* out) const override;
  void write(int layer, bool values, int positions, const std::byte* in) override;
  void read_state(const StateRef& state, int layer, float* out) const override;
  void write_state(const StateRef& state, int layer, const float* in) override;

  void keep_ahead(Ahead ahead) { ahead_ = std::make_unique<Ahead>(std::move(ahead)); }
  // Returns the pass that computes the chunk, if it was sent ahead, and sets the chunk's state to the one
  // that the pass writes. Otherwise returns null, and no pass is in flight.
  std::unique_ptr<Ahead> take_ahead(Chunk& chunk);
  // Drops the pass, which the GPU may still run and which may write to a page that another session now takes:
  // later passes and blits wait for it (see SlotUse).
  void drop_ahead() {
    // A forked process, or one whose GPU is lost, cannot wait for the GPU: it leaks the pass.
    if (ahead_ && (metal_.forked_ || gpu_is_lost())) {
      [[maybe_unused]] const Ahead* left = ahead_.release();
    }
    const AutoreleasePool pool;
    ahead_.reset();
  }

 private:
  struct PaddedRows {
    std::size_t count, bytes, padded_bytes;  // bytes of a row
  };
  PaddedRows heads_of(int layer, bool values, int positions) const;
  PaddedRows rows_of_state(int layer) const;
  // Locations of a layer's keys or values, and of its state.
  std::vector<Slots::Range> ranges_of(int layer, bool values, int positions) const;
  Slots::Range range_of(const StateRef& state, int layer, const PaddedRows& rows) const;

  MetalEngine& metal_;
  std::unique_ptr<Ahead> ahead_;
};

}  // namespace metal_prefill::metal
