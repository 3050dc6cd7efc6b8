// A persistent team of threads that runs a function on all of its members at once.
//
// Inside, work is divided by `for_each`: every thread begins with its own contiguous share of the items and,
// once that is done, takes single items from the shares of others. So both finish together though one may be
// slower, and memory is walked in order. Which thread computes an item never changes its value.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace metal_prefill::cpu {

class Team;

// One thread's view of the team, valid inside Team::run.
class Worker {
 public:
  int index() const { return index_; }
  int count() const;

  // Calls body(i) once for each i in [0, items) over the whole team and returns when all are done. All
  // threads must make the same calls in the same order.
  template <typename F>
  void for_each(int items, F&& body) {
    int item;
    begin();
    while ((item = claim(items)) >= 0) body(item);
    barrier();
  }

  // As for_each for work that is too short to share: one thread does it.
  template <typename F>
  void once(F&& body) {
    if (index_ == 0) body();
    barrier();
  }

  void barrier();

 private:
  friend class Team;
  Worker(Team& team, int index) : team_(team), index_(index) {}
  void begin();
  int claim(int items);

  Team& team_;
  const int index_;
  std::uint32_t phase_ = 0;
  std::uint32_t epoch_ = 0;  // of the barrier
  int victim_ = 0;           // whose share is being worked on
};

class Team {
 public:
  // 0 stands for one thread per core that this process may use. Throws DeviceError when a thread cannot be
  // started.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs body(worker) on every thread, this one included, and returns when all have returned. One call at a
  // time. The body must not throw.
  template <typename F>
  void run(F&& body) {
    start([](void* f, Worker& worker) { (*static_cast<std::remove_reference_t<F>*>(f))(worker); }, &body);
  }

 private:
  friend class Worker;
  using Body = void (*)(void*, Worker&);

  // Next item of a thread's share, tagged with the phase: a thread that has not arrived yet can be stolen
  // from.
  struct alignas(128) Share {
    std::atomic<std::uint64_t> next{0};  // phase << 32 | item
  };

  void start(Body body, void* argument);
  void loop(int index);
  void stop();

  const int size_;
  std::vector<Share> shares_;
  alignas(128) std::atomic<std::uint32_t> arrived_{0};
  alignas(128) std::atomic<std::uint32_t> epoch_{0};
  alignas(128) std::atomic<std::uint32_t> job_{0};  // counts calls of start; odd sizes do not matter
  Body body_ = nullptr;
  void* argument_ = nullptr;
  std::uint32_t phase_ = 0;  // carried from job to job, so that tags never repeat soon
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

inline int Worker::count() const {
  return team_.size_;
}

}  // namespace metal_prefill::cpu
