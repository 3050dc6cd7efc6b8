// States of recurrent layers, which summarize all tokens before a position.
//
// A slot of a pool holds the float32 states of all recurrent layers of a model at one position of a sequence.
// A pass reads one slot and writes others, and no slot is written twice. Forks, snapshots, and sessions that
// may return to the start of a call therefore only hold references, as they do to pages.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "../base/fork_handler.h"
#include "../model/model.h"
#include "pages.h"

namespace metal_prefill {

// Offsets of the layers' states in a slot, in float32 values.
struct StateLayout {
  explicit StateLayout(const Config& config);
  std::vector<std::size_t> first;  // offset of each layer's state
  std::size_t values = 0;          // values of a slot; 0: no layer has a state
  std::size_t bytes() const { return values * sizeof(float); }
};

// A reference to a slot, or to none: the state before the first token, which is zero.
class StateRef {
 public:
  StateRef() = default;
  // Takes over a reference of the caller.
  StateRef(PagePool& pool, PageId slot) : pool_(&pool), slot_(slot) {}
  StateRef(const StateRef& other) : pool_(other.pool_), slot_(other.slot_) {
    if (pool_) pool_->retain({&slot_, 1});
  }
  StateRef(StateRef&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), slot_(other.slot_) {}
  StateRef& operator=(StateRef other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~StateRef() {
    if (pool_) pool_->release({&slot_, 1});
  }

  explicit operator bool() const { return pool_ != nullptr; }
  PageId slot() const { return slot_; }
  bool operator==(const StateRef& other) const {
    return pool_ == other.pool_ && (!pool_ || slot_ == other.slot_);
  }

 private:
  PagePool* pool_ = nullptr;
  PageId slot_ = 0;
};

// The state before the token at `position`.
struct StatePoint {
  int position = 0;
  StateRef state;
};

// A state that a pass writes.
struct StateWrite {
  int tokens;  // it is written after this many tokens of the chunk
  StateRef state;
  bool keep;  // whether to keep it as a snapshot
};

// The states of one sequence in a pass.
struct ChunkStates {
  StateRef before;                 // before the first token
  std::vector<StateWrite> writes;  // in ascending order of tokens; an engine may replace the slots
  StateRef ahead;  // for the token after the chunk, if the engine may start on it (GreedyOutput::continues)
};

class SequenceStates;

// The slots of an engine, and the snapshots of its sessions. Safe to call from several threads.
class StatePool {
 public:
  // `page_bytes` is the size of K and V of kPagePositions positions.
  StatePool(PageStore& store, std::size_t limit, std::size_t page_bytes, MemoryBudget* budget);

  // Takes a slot. Throws as PagePool::take does.
  StateRef take() { return {slots_, slots_.take(1).front()}; }
  // Positions between the snapshots of a long sequence: as many as fill pages of the size of one snapshot, or
  // a fixed number if pages have no K and V.
  int interval() const { return interval_; }
  // Whether a pass writes a state after each draft. If states are too large for that, accepted drafts are
  // computed again.
  bool writes_each_draft() const { return slots_.page_bytes() <= kMostDraftBytes; }
  // Whether the state has other holders.
  bool is_shared(const StateRef& state) const { return slots_.is_shared(state.slot()); }
  // Releases the least recently used snapshot; returns false if there is none.
  bool drop_snapshot();
  // Called to free unneeded memory, as PagePool::reclaim.
  void set_reclaim(std::function<bool()> reclaim) { slots_.reclaim = std::move(reclaim); }

  std::size_t slot_bytes() const { return slots_.page_bytes(); }
  std::size_t bytes_in_use() const { return slots_.pages_in_use() * slots_.page_bytes(); }

 private:
  friend class SequenceStates;
  // States of this size after each of 16 drafts take less time and memory than a pass of a small model.
  static constexpr std::size_t kMostDraftBytes = std::size_t(256) << 10;
  static constexpr std::size_t kMostPages = std::size_t(1) << 20;  // maximum between snapshots
  // The state of Mamba2-130M has 19 MB, like this many pages of an attention model of the same size.
  static constexpr std::size_t kPagesWithoutAttention = 16;
  struct Snapshot {
    SequenceStates* owner;
    int position;
    StateRef state;
  };
  using Snapshots = std::list<Snapshot>;

  PagePool slots_;
  const int interval_;
  std::mutex mutex_;     // guards the snapshots of all sessions
  Snapshots snapshots_;  // the least recently used first
  const ForkHandler fork_handler_{[this] { mutex_.lock(); }, [this](bool) { mutex_.unlock(); }};
};

// The states of one session: the current one, and snapshots before it. The session's position may be after
// that of the current state. The tokens between the two are then computed again before others.
class SequenceStates {
 public:
  explicit SequenceStates(StatePool& pool) : pool_(pool) {}
  ~SequenceStates();
  SequenceStates(const SequenceStates&) = delete;
  SequenceStates& operator=(const SequenceStates&) = delete;

  StatePool& pool() { return pool_; }
  const StatePoint& current() const { return current_; }
  // Position of the current state after rewind(position).
  int nearest(int position) const;
  // Returns to the last known state at or before a position, and drops the snapshots after that position.
  void rewind(int position);
  // Rewinds, but to the state `point` of the same tokens.
  void replace(int position, StatePoint point);
  // Replaces the states by those of another session at or before `position`.
  void share(const SequenceStates& from, int position);
  // Selects the states that a pass writes: always the one after all `tokens`; if there is room, those at each
  // interval, at `marks` (positions) and, with drafts, after each token from `first_draft` on. plan() throws
  // as StatePool::take does.
  struct Wanted {
    int tokens;
    int first_draft;  // tokens of the chunk before its drafts; `tokens` if it has none
    bool keep_last;
    std::span<const int> marks;
  };
  ChunkStates plan(const Wanted& wanted) const;
  // Takes over the states of a finished pass up to its first `tokens` tokens.
  void advance(const ChunkStates& states, int tokens) noexcept;
  // The snapshots and the current state at or before `position`, without those at 0.
  std::vector<StatePoint> points(int position) const;
  // Bytes of the slots of the current state and of the snapshots.
  std::size_t bytes() const;

 private:
  friend class StatePool;
  // Maximum snapshots at ends of prompts rather than at intervals. The oldest are dropped.
  static constexpr std::size_t kMostEnds = 8;
  void keep(const StatePoint& point) noexcept;
  void drop_after(int position);
  void drop(std::map<int, StatePool::Snapshots::iterator>::iterator snapshot);

  StatePool& pool_;
  StatePoint current_;
  std::map<int, StatePool::Snapshots::iterator> snapshots_;  // by position; guarded by the pool's mutex
};

}  // namespace metal_prefill
