// Runs the threads of one threadgroup at a time, each thread on a fiber.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../executor.h"
#include "abi.h"
#include "access.h"
#include "context.h"

namespace metal_emulator::cpu {

// One dispatch, resolved to addresses; shared by all host threads that run it.
struct Work {
  const abi::Kernel* kernel = nullptr;
  void* buffers[kMaxBuffers] = {};
  std::size_t threadgroup_bytes[kMaxThreadgroupArguments] = {};
  Dim3 grid, group;               // threadgroups; threads per threadgroup
  std::vector<Binding> bindings;  // for checked mode, sorted by address
  ExecutorOptions options;
  std::string label;  // names the dispatch in messages
};

// "file:line"
inline std::string text_of(abi::Place place) {
  return std::string(place.file) + ":" + std::to_string(place.line);
}

class ThreadgroupRunner {
 public:
  ThreadgroupRunner();
  ~ThreadgroupRunner();
  ThreadgroupRunner(const ThreadgroupRunner&) = delete;
  ThreadgroupRunner& operator=(const ThreadgroupRunner&) = delete;

  // Lets the calling host thread run threadgroups of this work until finish().
  void begin(const Work& work, std::uint64_t seed);
  // Runs a threadgroup. Returns an error, or an empty string if all threads have returned.
  std::string run(Dim3 position);
  void finish();

  std::uint64_t barriers() const { return barriers_; }
  std::uint64_t threads() const { return threads_run_; }
  AccessRecorder& accesses() { return accesses_; }

 private:
  struct Thread {  // with the operation at which it waits
    const abi::Operation* operation = nullptr;
    abi::Place place{"", 0};
    abi::u16 fiber = 0;
    abi::u16 simdgroup_barriers = 0;  // number of simdgroup barriers it has reached
  };
  struct Header;  // the Worker at the base of the region

  static ThreadgroupRunner& of(abi::Worker& worker);
  static void arrive(abi::Worker&, abi::Fiber&, const abi::Operation&, abi::Place);
  static void threadgroup_barrier(abi::Worker&, abi::Fiber&, abi::Place);
  static void simdgroup_barrier(abi::Worker&, abi::Fiber&, abi::Place);
  static void together(abi::Worker&, abi::Fiber&, const abi::Operation&, abi::u32 simdgroups, abi::Place);
  static void wrong_size(abi::Worker&, const char* what, int columns, int rows, int wanted_columns,
                         int wanted_rows, abi::Place);
  static void unwritten(abi::Worker&, const char* what, abi::Place);
  static void enter();
  static void missed_guard(const Allocation& missed, std::size_t overrun, bool write);
  static void report_access(void* runner, std::string message);

  void wait_for(abi::Fiber& fiber, const abi::Operation& operation, abi::Place place);
  void complete_for(abi::Fiber& last);  // called by the last of a simdgroup to arrive
  void wait_at_barrier(abi::Fiber& fiber, abi::Place place);
  void complete(abi::Simdgroup& simdgroup, abi::u32 lanes);
  static int run_queue(abi::Simdgroup& simdgroup);
  void release_barrier();
  void run_thread(abi::Fiber& fiber);
  void retire(abi::Fiber& fiber);  // after the fiber's thread has returned

  int pick(unsigned after);  // returns a thread that can run; -1 if there is none
  abi::Fiber* next_lane(abi::Fiber& self) const;
  void suspend(abi::Fiber& self);
  void suspend_for_any(abi::Fiber& self);
  void transfer(abi::Fiber& self, unsigned thread);
  void switch_to(abi::Fiber* from, abi::Fiber* to);
  abi::Fiber& bind_fiber(unsigned thread);
  void choose_order();
  std::uint64_t random();

  [[noreturn]] void fail(std::string message);
  [[noreturn]] void fail_waiting(std::string problem);
  [[noreturn]] void fail_divergent();
  std::string describe_simdgroup(unsigned simdgroup) const;
  std::string describe_product(unsigned group, int number) const;
  // Describes how simdgroups differ in the operations of the whole threadgroup; empty if they do not.
  std::string describe_divergence() const;

  void place_threadgroup_memory();
  void place_threads();
  void reset_fibers();
  void forget();

  Region region_;
  Header* header_;
  abi::Simdgroup* simdgroups_;
  std::unique_ptr<Thread[]> threads_;
  // Bit sets of free fibers, and of their nonzero words. A new thread takes the first free fiber, so that
  // adjacent threads have adjacent fibers.
  std::uint64_t free_fibers_[abi::kMaxThreads / 64];
  std::uint32_t free_words_;
  const Work* work_ = nullptr;
  std::byte* arena_ = nullptr;  // threadgroup memory, kArenaBytes

  Dim3 position_;                     // of the running threadgroup
  Dim3 placed_{0, 0, 0};              // the threadgroup size of positions_
  std::vector<abi::Vec3> positions_;  // of each thread in the threadgroup
  unsigned count_ = 0;                // threads of the threadgroup
  unsigned simdgroup_count_ = 0;
  unsigned returned_ = 0, at_barrier_ = 0;
  std::uint32_t ready_simdgroups_ = 0;
  std::uint64_t rng_ = 0;  // 0: in order
  // The simdgroup that runs as far as it can before others; if it equals simdgroup_count_, a random simdgroup
  // runs after each wait.
  unsigned first_ = 0;
  std::uint64_t barriers_ = 0, threads_run_ = 0;
  // Operations of the whole threadgroup that a simdgroup has executed: their number, hash, and last line.
  struct Together {
    unsigned count;
    std::uint64_t which;
    abi::Place place;
  };
  Together together_[abi::kMaxThreads / abi::kLanes];
  std::string error_;

  AccessRecorder accesses_;

  struct alignas(64) SyncPoint {  // an address that represents an order between fibers
    char byte;
  };
  // Successive barriers alternate between them: the first thread arrives at a barrier before the last has
  // left the previous one, and the two must not be ordered.
  SyncPoint sync_begin_, sync_end_, sync_barrier_[2], sync_simdgroup_[abi::kMaxThreads / abi::kLanes][2];

  void* host_stack_ = nullptr;
#if METAL_EMULATOR_ASAN
  void* host_fake_stack_ = nullptr;
  void* fake_stacks_[abi::kMaxThreads] = {};
  const void* host_bottom_ = nullptr;
  std::size_t host_bytes_ = 0;
#endif
#if METAL_EMULATOR_TSAN
  void* host_fiber_ = nullptr;
  void* tsan_fibers_[abi::kMaxThreads] = {};
#endif
};

}  // namespace metal_emulator::cpu
