// The state of the emulator: its executor, its counts, and the faults that tests request. The functions of
// emulator.h read and change it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "emulator.h"

namespace metal_emulator {

// A fault that occurs once, in one of the next calls.
template <typename Details>
struct PlannedFault {
  int calls = 0;  // until the one that fails; 0: none fails
  Details details{};

  std::optional<Details> next() { return calls > 0 && --calls == 0 ? std::optional(details) : std::nullopt; }
};

struct CommandBufferFault {
  std::string message;
  int dispatches = 0;
};

class State {
 public:
  static State& get();

  Executor& executor() { return *executor_; }
  // Whether to check for misuse that a Mac detects only with its validation layer, or not at all: unordered
  // commands that access the same memory, and changes to buffers that a command buffer does not track.
  bool validates() const { return validates_; }

  // Null if there is no memory, or if a test requested a failure.
  std::shared_ptr<Allocation> allocate(std::size_t length, StorageMode mode);
  std::shared_ptr<Allocation> wrap(void* memory, std::size_t length);

  void count(std::uint64_t Counters::* counter, std::uint64_t times = 1);

  // Marks work that runs on other threads. wait_idle returns at once on a thread that does such work.
  void begin_work();
  void end_work();
  void wait_idle();
  // Runs `task` as work on one of a few threads.
  void run_in_background(std::function<void()> task);

  std::unique_ptr<Executor> executor_;
  bool validates_ = true;

  // The mutex guards everything below, and the labels of buffers: see `locked`.
  std::mutex mutex_;
  ExecutorOptions options_;
  DeviceLimits limits_;
  std::vector<std::shared_ptr<Allocation>> buffers_;
  std::size_t resident_bytes_ = 0;
  PlannedFault<bool> allocation_fault_;
  PlannedFault<CommandBufferFault> command_buffer_fault_;
  PlannedFault<std::string> commit_refusal_;
  bool loses_residency_ = false;
  Counters counters_;
  std::vector<std::string> violations_;
  std::vector<LibraryRecord> compiled_;
  std::deque<CommandBufferRecord> history_;
  std::size_t history_depth_ = 0;

  std::condition_variable idle_;
  int work_ = 0;

  std::condition_variable background_wake_;
  std::deque<std::function<void()>> background_tasks_;
  unsigned background_threads_ = 0;

 private:
  State();
  std::shared_ptr<Allocation> keep(std::shared_ptr<Allocation> buffer);
  void serve_background();
};

// Calls `use` with the locked state.
template <typename Use>
auto locked(const Use& use) {
  State& state = State::get();
  std::lock_guard lock(state.mutex_);
  return use(state);
}

// Marks the calling thread as doing the emulator's work while in scope.
struct WorkerScope {
  static inline thread_local int depth = 0;

  WorkerScope() { depth++; }
  ~WorkerScope() { depth--; }
  WorkerScope(const WorkerScope&) = delete;
  WorkerScope& operator=(const WorkerScope&) = delete;
};

}  // namespace metal_emulator
