// A persistent team of threads that runs a function on all of its members at once.
//
// Within it, `for_each` divides work: every thread begins with its own contiguous share of the items. It then
// takes items from other shares, unless these are almost done. All threads thus finish together even if one
// is slower, and memory is read in order. An item has the same result on any thread.
//
// A phase (one for_each) ends when its items are done, not when all threads have arrived: a preempted thread
// delays the others only while it has an item, and skips the phases that it missed.
//
// A forked process has none of the threads: its next run starts them anew.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#include "../base/fork_handler.h"

namespace metal_prefill::cpu {

class Team;

// One thread's view of the team, valid inside Team::run.
class Worker {
 public:
  int index() const { return index_; }
  int count() const;

  // This thread alone, which computes all items of a phase itself. For use within an item of the team.
  Worker alone() const { return {nullptr, index_, phase_}; }

  // Calls body(i) once for each i in [0, items) over the whole team and returns when all are done. All
  // threads must make the same calls in the same order.
  template <typename F>
  void for_each(int items, F&& body) {
    if (!team_) {
      for (int item = 0; item < items; ++item) body(item);
      return;
    }
    ++phase_;
    if (items == 0) return;  // the next phase that has items counts for this one too
    for (int distance = 0; distance < count(); ++distance) {
      const int owner = (index_ + distance) % count();
      int done = 0;
      for (ItemRange run = claim(owner, items); run.first < run.end; run = claim(owner, items)) {
        for (int item = run.first; item < run.end; ++item) body(item);
        done += run.end - run.first;
      }
      if (report(done, items) || (distance == 0 && is_over_soon())) return;
    }
    wait();
  }

 private:
  friend class Team;
  Worker(Team* team, int index, std::uint32_t phase) : team_(team), index_(index), phase_(phase) {}
  struct ItemRange {
    int first, end;
  };
  // Claims the next items of a thread's share: a 64th of the share, at least one. Empty if none is left.
  ItemRange claim(int owner, int items);
  // Adds items that this thread has done; returns whether all are done.
  bool report(int done, int items);
  bool is_over() const;
  bool is_over_soon() const;
  void wait() const;

  Team* const team_;  // null: alone
  const int index_;
  std::uint32_t phase_;
};

class Team {
 public:
  // 0 selects one thread per core that this process may use. Throws DeviceError if a thread cannot be
  // started.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs body(worker) on this thread and on all idle threads of the team, and returns when all have left the
  // body. One call at a time. The body must not throw.
  template <typename F>
  void run(F&& body) {
    start([](void* f, Worker& worker) { (*static_cast<std::remove_reference_t<F>*>(f))(worker); }, &body);
  }

 private:
  friend class Worker;
  using Body = void (*)(void*, Worker&);
  static constexpr std::uint32_t kOpen = 1u << 31;

  // Next item of a thread's share, tagged with the phase, so that others can take items of a late thread.
  struct alignas(128) Share {
    std::atomic<std::uint64_t> next{0};  // phase << 32 | item
  };

  void start(Body body, void* argument);
  void loop(int index);
  // Keeps the other threads off the core of the caller.
  void keep_core();
  void launch();
  void stop();

  const int size_;
  std::vector<Share> shares_;
  alignas(128) std::atomic<std::uint32_t> phase_{0};     // the last one that is over
  alignas(128) std::atomic<std::uint32_t> finished_{0};  // items of the current phase
  alignas(128) std::atomic<std::uint32_t> job_{0};       // calls of run so far
  alignas(128) std::atomic<std::uint32_t> inside_{
      0};  // threads in the body, without the caller; kOpen: more may enter
  Body body_ = nullptr;
  void* argument_ = nullptr;
  std::uint32_t first_phase_ = 0;       // the last phase that was over when the body began
  std::atomic<bool> stopping_ = false;  // a thread that woke for an earlier job may read it while it is set
  std::vector<std::thread> threads_;
  bool launched_ = false;
  int core_ = -1;  // core of the last caller
  // Whether threads_ are those of the parent process. Written in the child only, which has no other threads,
  // as threads of the parent read it.
  bool forked_ = false;
  const ForkHandler fork_handler_{[] {},
                                  [this](bool child) {
                                    if (child) forked_ = true;
                                  }};
};

inline int Worker::count() const {
  return team_ ? team_->size_ : 1;
}

}  // namespace metal_prefill::cpu
