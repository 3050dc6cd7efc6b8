// The cache of a session on the GPU.
#pragma once

#include "metal_engine.h"
#include "sent_passes.h"
#include "waits.h"

namespace metal_prefill::metal {

// The pages of a session, and the pass that was sent ahead for it.
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
  // The pass that computes the chunk, if it was sent ahead; otherwise null, and no pass is in flight. The
  // chunk's state is then the one that the pass writes.
  std::unique_ptr<Ahead> take_ahead(Chunk& chunk);
  // The GPU may still run it and write to a page that another session takes now: later passes and blits wait
  // for it (see SlotUse).
  void drop_ahead() {
    // A forked process has no GPU to wait for, so it drops the passes of its parent; nor has one whose GPU is
    // lost.
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
  // Where keys or values of a layer, and its state, are.
  std::vector<Slots::Range> ranges_of(int layer, bool values, int positions) const;
  Slots::Range range_of(const StateRef& state, int layer, const PaddedRows& rows) const;

  MetalEngine& metal_;
  std::unique_ptr<Ahead> ahead_;
};

}  // namespace metal_prefill::metal
