// The state of the emulator: its executor, its counts, and the faults that tests request. The functions of
// emulator.h read and change it.
#pragma once

#include <atomic>
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

// The state of a buffer, separate from its Objective-C object: command buffers keep it while they run, even
// if the object is freed.
struct BufferState {
  std::shared_ptr<Allocation> allocation;
  BufferInfo info;
  bool untracked = false;              // MTLHazardTrackingModeUntracked
  void* caller_memory = nullptr;       // of a no-copy buffer
  std::atomic<bool> released = false;  // the object is deallocated
};

// Counts down calls to the one that fails; 0: none fails.
struct Countdown {
  int calls = 0;
  bool ends() { return calls > 0 && --calls == 0; }
};

struct CommandBufferFault {
  std::string message;
  long code = 0;
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
  std::shared_ptr<BufferState> allocate(std::size_t length, StorageMode mode);
  std::shared_ptr<BufferState> wrap(void* memory, std::size_t length, StorageMode mode);
  void release(const std::shared_ptr<BufferState>& buffer);
  void set_label(BufferState& buffer, const std::string& label);
  std::string label(const BufferState& buffer);
  void change_resident_bytes(std::size_t before, std::size_t after);

  bool loses_residency() { return loses_residency_.exchange(false); }
  std::optional<CommandBufferFault> next_command_buffer_fault();
  std::optional<std::string> next_commit_refusal();

  void count(std::uint64_t Counters::* counter, std::uint64_t times = 1);

  void add_library(LibraryRecord record);

  void add_violation(const std::string& message);

  bool keeps_history();
  void add_record(CommandBufferRecord record);

  // Marks work that runs on other threads. wait_idle returns at once on a thread that does such work.
  void begin_work();
  void end_work();
  void wait_idle();
  // Runs `task` as work on one of a few threads.
  void run_in_background(std::function<void()> task);

  // Used by the functions of emulator.h.
  std::mutex mutex_;
  std::unique_ptr<Executor> executor_;
  bool validates_ = true;
  ExecutorOptions options_;
  DeviceLimits limits_;
  std::vector<std::shared_ptr<BufferState>> buffers_;
  std::size_t resident_bytes_ = 0;
  Countdown until_allocation_fault_, until_command_buffer_fault_, until_commit_refusal_;
  CommandBufferFault command_buffer_fault_;
  std::string commit_refusal_;
  std::atomic<bool> loses_residency_ = false;
  Counters counters_;
  std::vector<std::string> violations_;
  std::deque<LibraryRecord> compiled_;
  std::deque<CommandBufferRecord> history_;
  std::size_t history_depth_ = 0;

  std::condition_variable idle_;
  int work_ = 0;

  std::condition_variable background_wake_;
  std::deque<std::function<void()>> background_tasks_;
  unsigned background_threads_ = 0;

 private:
  State();
  std::shared_ptr<BufferState> keep(std::shared_ptr<Allocation> allocation, BufferInfo info);
  bool allocation_fails();
  void serve_background();
};

// Marks the calling thread as doing the emulator's work while in scope.
class WorkerScope {
 public:
  WorkerScope();
  ~WorkerScope();
  WorkerScope(const WorkerScope&) = delete;
  WorkerScope& operator=(const WorkerScope&) = delete;
};

}  // namespace metal_emulator
