#include "threadgroup.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <new>

namespace metal_emulator::cpu {

using abi::u32;

struct ThreadgroupRunner::Header {
  abi::Worker worker;
  AccessRecorder* recorder;  // recorder_of(worker)
  ThreadgroupRunner* runner;
  void* buffers[kMaxBuffers];  // buffers of the work
  void* threadgroup_arguments[kMaxThreadgroupArguments];
  abi::Invocation invocation;  // of the thread that is starting
  abi::Simdgroup simdgroups[abi::kMaxThreads / abi::kLanes];
  abi::MatrixQueue queues[abi::kMaxThreads / abi::kLanes];
};

namespace {

constexpr std::size_t kArenaBytes = 1 << 20;  // including gaps between variables
constexpr std::size_t kArgumentGap = 128;     // between threadgroup arguments
constexpr u32 kNoPreference = 31;
constexpr const char* kDeadlock = "deadlock: not all threads reach the same operation";

// Row-major index of a lane's first or second element in a simdgroup_matrix.
constexpr unsigned matrix_place(MatrixLayout layout, unsigned lane, unsigned element) {
  switch (layout) {
    case MatrixLayout::kApple:
      break;
    case MatrixLayout::kConsecutive:
      return lane * 2 + element;
    case MatrixLayout::kShifted:
      return (lane + 1) % 32 * 2 + element;
    case MatrixLayout::kColumns:
      return lane / 8 * 16 + lane % 8 + element * 8;
  }
  const unsigned row = (lane >> 2 & 4) + (lane >> 1 & 3), column = (lane >> 1 & 4) + (lane & 1) * 2;
  return row * 8 + column + element;
}

// Tells ThreadSanitizer that past accesses of one fiber precede later ones of another.
void acquire([[maybe_unused]] char& point) {
#if METAL_EMULATOR_TSAN
  __tsan_acquire(&point);
#endif
}
void release([[maybe_unused]] char& point) {
#if METAL_EMULATOR_TSAN
  __tsan_release(&point);
#endif
}

}  // namespace

ThreadgroupRunner::ThreadgroupRunner()
    : header_(new(region_.base()) Header{}),
      simdgroups_(header_->simdgroups),
      threads_(new Thread[abi::kMaxThreads]()),
      arena_(map_memory(nullptr, kArenaBytes)) {
  static_assert(offsetof(Header, recorder) == sizeof(abi::Worker));
  header_->runner = this;
  abi::Worker& worker = header_->worker;
  worker.arrive = &arrive;
  worker.threadgroup_barrier = &threadgroup_barrier;
  worker.simdgroup_barrier = &simdgroup_barrier;
  worker.together = &together;
  worker.wrong_size = &wrong_size;
  worker.unwritten = &unwritten;
  worker.threadgroup_memory = reinterpret_cast<abi::u8*>(arena_);
  for (unsigned i = 0; i < abi::kMaxThreads / abi::kLanes; i++) simdgroups_[i].queue = &header_->queues[i];
  header_->invocation.buffers = header_->buffers;
  header_->invocation.threadgroup = header_->threadgroup_arguments;
  reset_fibers();
}

ThreadgroupRunner::~ThreadgroupRunner() {
  forget();
  munmap(arena_, kArenaBytes);
}

ThreadgroupRunner& ThreadgroupRunner::of(abi::Worker& worker) {
  return *reinterpret_cast<Header&>(worker).runner;
}

void ThreadgroupRunner::reset_fibers() {
  for (abi::Fiber& fiber : header_->worker.fibers) fiber.stack_pointer = nullptr;
  std::fill(std::begin(free_fibers_), std::end(free_fibers_), ~std::uint64_t{0});
  free_words_ = (1u << std::size(free_fibers_)) - 1;
}

// Destroys the sanitizer's fibers: suspended threads never end, so that the next threadgroup could not start
// on them.
void ThreadgroupRunner::forget() {
#if METAL_EMULATOR_TSAN
  for (void*& fiber : tsan_fibers_) {
    if (fiber) __tsan_destroy_fiber(fiber);
    fiber = nullptr;
  }
  region_.forget();
  map_memory(arena_, kArenaBytes);
#endif
}

void ThreadgroupRunner::begin(const Work& work, std::uint64_t seed) {
  work_ = &work;
  rng_ = work.options.seed ? (seed + 1) * 0x9e3779b97f4a7c15ull | 1 : 0;
  header_->worker.fast_errors = work.options.fast_errors;
  for (unsigned lane = 0; lane < abi::kLanes; lane++)
    for (unsigned element = 0; element < 2; element++)
      header_->worker.matrix_places[lane][element] =
          static_cast<abi::u8>(matrix_place(work.options.matrix_layout, lane, element));
  barriers_ = threads_run_ = 0;
  error_.clear();
  std::copy(std::begin(work.buffers), std::end(work.buffers), header_->buffers);
  set_guard_handler(&missed_guard);
  if (work.options.checked) {
    accesses_.begin(work.bindings, &report_access, this);
    set_recorder(header_->worker, &accesses_);
  }
#if METAL_EMULATOR_TSAN
  host_fiber_ = __tsan_get_current_fiber();
#endif
}

void ThreadgroupRunner::finish() {
  set_guard_handler(nullptr);
  set_recorder(header_->worker, nullptr);
}

// Places the variables that the kernel declares first, then its threadgroup arguments. Fills all memory with
// 0xff, a NaN in every floating-point type, since Metal does not initialize it.
void ThreadgroupRunner::place_threadgroup_memory() {
  const abi::ThreadgroupLayout& layout = *work_->kernel->layout;
  std::size_t end = layout.bytes;
#if METAL_EMULATOR_ASAN
  ASAN_UNPOISON_MEMORY_REGION(arena_, kArenaBytes);
#endif
  for (int i = 0; i < kMaxThreadgroupArguments; i++) {
    header_->threadgroup_arguments[i] = nullptr;
    if (work_->threadgroup_bytes[i] == 0) continue;
    const std::size_t offset = round_up(end, kArgumentGap) + kArgumentGap;
    header_->threadgroup_arguments[i] = arena_ + offset;
    end = offset + work_->threadgroup_bytes[i];
  }
  std::memset(arena_, 0xff, end);
#if METAL_EMULATOR_ASAN
  ASAN_POISON_MEMORY_REGION(arena_, kArenaBytes);
  for (u32 i = 0; i < layout.count; i++) {
    ASAN_UNPOISON_MEMORY_REGION(arena_ + layout.variables[i].offset, layout.variables[i].bytes);
  }
  for (int i = 0; i < kMaxThreadgroupArguments; i++) {
    if (header_->threadgroup_arguments[i]) {
      ASAN_UNPOISON_MEMORY_REGION(header_->threadgroup_arguments[i], work_->threadgroup_bytes[i]);
    }
  }
#endif
  if (!work_->options.checked) return;
  const auto address = reinterpret_cast<std::uintptr_t>(arena_);
  accesses_.set_threadgroup_memory(address, address + kArenaBytes);
  for (u32 i = 0; i < layout.count; i++) {
    accesses_.add_threadgroup_variable(layout.variables[i].name, address + layout.variables[i].offset,
                                       layout.variables[i].bytes);
  }
  for (const abi::Argument& argument : work_->kernel->arguments) {
    if (argument.space == abi::Argument::Space::kThreadgroup &&
        header_->threadgroup_arguments[argument.index]) {
      accesses_.add_threadgroup_variable(
          argument.name, reinterpret_cast<std::uintptr_t>(header_->threadgroup_arguments[argument.index]),
          work_->threadgroup_bytes[argument.index]);
    }
  }
}

// Sets the built-in arguments that all threads of the threadgroup share, and the position of each thread.
void ThreadgroupRunner::place_threads() {
  const Dim3 grid = work_->grid, size = work_->group;
  abi::Invocation& invocation = header_->invocation;
  invocation.threads_per_grid = {grid.x * size.x, grid.y * size.y, grid.z * size.z};
  invocation.threadgroup_position_in_grid = {position_.x, position_.y, position_.z};
  invocation.threadgroups_per_grid = {grid.x, grid.y, grid.z};
  invocation.threads_per_threadgroup = {size.x, size.y, size.z};
  if (size == placed_) return;
  placed_ = size;
  positions_.clear();
  for (u32 z = 0; z < size.z; z++) {
    for (u32 y = 0; y < size.y; y++) {
      for (u32 x = 0; x < size.x; x++) positions_.push_back({x, y, z});
    }
  }
}

std::string ThreadgroupRunner::run(Dim3 position) {
  position_ = position;
  count_ = work_->group.x * work_->group.y * work_->group.z;
  simdgroup_count_ = (count_ + abi::kLanes - 1) / abi::kLanes;
  returned_ = at_barrier_ = 0;
  ready_simdgroups_ = simdgroup_count_ == 32 ? ~0u : (1u << simdgroup_count_) - 1;
  for (unsigned i = 0; i < simdgroup_count_; i++) {
    abi::Simdgroup& simdgroup = simdgroups_[i];
    const unsigned lanes = count_ - i * abi::kLanes;
    simdgroup.active = simdgroup.ready = simdgroup.fresh = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    simdgroup.waiting = 0;
    together_[i] = {};
  }
  place_threadgroup_memory();
  place_threads();
#if METAL_EMULATOR_TSAN
  reset_fibers();  // a separate fiber per thread, so that the sanitizer sees no accidental order
  // All are created here: the sanitizer would order a fiber after all earlier actions of its creator. Later
  // threadgroups reuse them, and begin after the end of this one.
  for (unsigned i = 0; i < count_; i++) {
    if (!tsan_fibers_[i]) tsan_fibers_[i] = __tsan_create_fiber(0);
    threads_[i].simdgroup_barriers = 0;
  }
#endif
  release(sync_begin_.byte);
  threads_run_ += count_;
  choose_order();
  const int first = pick(kNoPreference);
  switch_to(nullptr, &bind_fiber(static_cast<unsigned>(first)));
  acquire(sync_end_.byte);
  for (unsigned i = 0; i < simdgroup_count_ && error_.empty(); i++) {
    if (const int product = run_queue(simdgroups_[i]); product >= 0) error_ = describe_product(i, product);
  }
  if (error_.empty()) error_ = describe_divergence();
  if (!error_.empty()) {  // suspended threads are abandoned
    reset_fibers();
    for (auto& queue : header_->queues) queue = {};
    forget();
  }
  return error_;
}

abi::Fiber& ThreadgroupRunner::bind_fiber(unsigned thread) {
  abi::Simdgroup& simdgroup = simdgroups_[thread / abi::kLanes];
  const u32 bit = 1u << thread % abi::kLanes;
  if (!(simdgroup.fresh & bit)) return header_->worker.fibers[threads_[thread].fiber];
  simdgroup.fresh &= ~bit;
  const auto word = static_cast<unsigned>(std::countr_zero(free_words_));
  const auto index =
      static_cast<abi::u16>(word * 64 + static_cast<unsigned>(std::countr_zero(free_fibers_[word])));
  free_fibers_[word] &= free_fibers_[word] - 1;
  if (!free_fibers_[word]) free_words_ &= ~(1u << word);
  abi::Fiber& fiber = header_->worker.fibers[index];
  if (!fiber.stack_pointer) {
    fiber.stack_pointer = region_.prepare(index, &enter);
#if METAL_EMULATOR_ASAN
    fake_stacks_[index] = nullptr;
    ASAN_UNPOISON_MEMORY_REGION(region_.stack(index), Region::kUsableBytes);
#endif
  }
  fiber.thread = thread;
  threads_[thread].fiber = index;
  return fiber;
}

// Null selects the host's own stack.
void ThreadgroupRunner::switch_to(abi::Fiber* from, abi::Fiber* to) {
  void** save = from ? &from->stack_pointer : &host_stack_;
  void* target = to ? to->stack_pointer : host_stack_;
#if METAL_EMULATOR_TSAN
  __tsan_switch_to_fiber(to ? tsan_fibers_[to - header_->worker.fibers] : host_fiber_,
                         __tsan_switch_to_fiber_no_sync);
#endif
#if METAL_EMULATOR_ASAN
  void** fake = from ? &fake_stacks_[from - header_->worker.fibers] : &host_fake_stack_;
  if (to) {
    const auto index = static_cast<unsigned>(to - header_->worker.fibers);
    __sanitizer_start_switch_fiber(fake, region_.stack(index), Region::kUsableBytes);
  } else {
    __sanitizer_start_switch_fiber(fake, host_bottom_, host_bytes_);
  }
#endif
  metal_emulator_switch(save, target);
#if METAL_EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(*fake, nullptr, nullptr);
#endif
}

void ThreadgroupRunner::enter() {
  ThreadgroupRunner& runner = of(abi::current_worker());
#if METAL_EMULATOR_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!runner.host_bottom_) runner.host_bottom_ = bottom, runner.host_bytes_ = bytes;
#endif
  abi::Fiber& fiber = abi::current_fiber();
  for (;;) {
    runner.run_thread(fiber);
    runner.retire(fiber);  // returns when there is another thread to run
  }
}

void ThreadgroupRunner::run_thread(abi::Fiber& fiber) {
  const unsigned index = fiber.thread;
  fiber.simdgroup = &simdgroups_[index / abi::kLanes];
  fiber.lane = index % abi::kLanes;
  abi::Invocation& invocation = header_->invocation;  // the kernel reads it before its first statement
  const abi::Vec3 in_group = positions_[index];
  const Dim3 size = work_->group;
  invocation.thread_position_in_grid = {position_.x * size.x + in_group.x, position_.y * size.y + in_group.y,
                                        position_.z * size.z + in_group.z};
  invocation.thread_index_in_threadgroup = index;
  acquire(sync_begin_.byte);
  work_->kernel->call(invocation);
  release(sync_end_.byte);
}

void ThreadgroupRunner::retire(abi::Fiber& fiber) {
  const unsigned group = fiber.thread / abi::kLanes;
  abi::Simdgroup& simdgroup = *fiber.simdgroup;
  const u32 bit = 1u << fiber.lane;
  simdgroup.active &= ~bit;
  simdgroup.ready &= ~bit;
  returned_++;
  if (at_barrier_ > 0) fail_waiting("a thread returned while others wait at a threadgroup_barrier");
  // A returned lane is inactive: the others no longer wait for it.
  if (simdgroup.waiting && simdgroup.waiting == simdgroup.active) complete(simdgroup, simdgroup.waiting);
#if !METAL_EMULATOR_TSAN
  const auto index = static_cast<unsigned>(&fiber - header_->worker.fibers);
  free_fibers_[index / 64] |= std::uint64_t{1} << index % 64;
  free_words_ |= 1u << index / 64;
#endif
  if (abi::Fiber* adjacent = next_lane(fiber)) return switch_to(&fiber, adjacent);
  if (!simdgroup.ready) ready_simdgroups_ &= ~(1u << group);
  const int next = pick(fiber.thread);
  if (next < 0 && returned_ < count_) fail_waiting(kDeadlock);
  abi::Fiber* chosen = next < 0 ? nullptr : &bind_fiber(static_cast<unsigned>(next));
  // If this fiber is the first free one, a new thread starts on it. After the last thread of a threadgroup, a
  // later threadgroup reuses it.
  if (chosen != &fiber) switch_to(&fiber, chosen);
}

std::uint64_t ThreadgroupRunner::random() {
  rng_ ^= rng_ << 13;
  rng_ ^= rng_ >> 7;
  rng_ ^= rng_ << 17;
  return rng_ >> 16;
}

namespace {

// Returns the lowest member above `after`, or else the lowest.
unsigned next_member(u32 members, unsigned after) {
  const u32 above = after >= 31 ? 0 : members & (~0u << (after + 1));
  return static_cast<unsigned>(std::countr_zero(above ? above : members));
}

}  // namespace

// Chooses how threads are shuffled until the next barrier. If all simdgroups alternated, none would get far
// enough ahead of the others to reveal a missing barrier.
void ThreadgroupRunner::choose_order() {
  if (rng_) first_ = static_cast<unsigned>(random() % (simdgroup_count_ + 1));
}

int ThreadgroupRunner::pick(unsigned after) {
  if (!ready_simdgroups_) return -1;
  unsigned group = after / abi::kLanes;
  if (rng_) {
    const auto any_of = [this](u32 members) {
      for (auto skipped = random() % static_cast<unsigned>(std::popcount(members)); skipped > 0; --skipped)
        members &= members - 1;
      return static_cast<unsigned>(std::countr_zero(members));
    };
    if (first_ == simdgroup_count_) {
      group = any_of(ready_simdgroups_);
    } else {
      group = ready_simdgroups_ >> first_ & 1 ? first_ : next_member(ready_simdgroups_, first_);
    }
    return static_cast<int>(group * abi::kLanes + any_of(simdgroups_[group].ready));
  }
  if (!(ready_simdgroups_ >> group & 1)) group = next_member(ready_simdgroups_, group);
  return static_cast<int>(group * abi::kLanes + next_member(simdgroups_[group].ready, after % abi::kLanes));
}

// Returns the next lane's fiber if that lane is ready on the adjacent fiber, as usual; otherwise null.
// Branches, which processors predict, take less time here than loads.
inline abi::Fiber* ThreadgroupRunner::next_lane(abi::Fiber& self) const {
  const u32 next = 2u << self.lane;  // 0 for the last lane
  const bool adjacent = !rng_ && self.simdgroup->ready & ~self.simdgroup->fresh & next &&
                        threads_[self.thread + 1].fiber == &self + 1 - header_->worker.fibers;
  return adjacent ? &self + 1 : nullptr;
}

inline void ThreadgroupRunner::suspend(abi::Fiber& self) {
  if (abi::Fiber* adjacent = next_lane(self)) return switch_to(&self, adjacent);
  suspend_for_any(self);
}

[[gnu::noinline]] void ThreadgroupRunner::suspend_for_any(abi::Fiber& self) {
  if (!self.simdgroup->ready) ready_simdgroups_ &= ~(1u << (self.thread / abi::kLanes));
  const int next = pick(self.thread);
  if (next < 0) fail_waiting(kDeadlock);
  transfer(self, static_cast<unsigned>(next));
}

void ThreadgroupRunner::transfer(abi::Fiber& self, unsigned thread) {
  if (thread == self.thread) return;
  switch_to(&self, &bind_fiber(thread));
}

void ThreadgroupRunner::arrive(abi::Worker& worker, abi::Fiber& fiber, const abi::Operation& operation,
                               abi::Place place) {
  of(worker).wait_for(fiber, operation, place);
}

void ThreadgroupRunner::wait_for(abi::Fiber& fiber, const abi::Operation& operation, abi::Place place) {
  abi::Simdgroup& simdgroup = *fiber.simdgroup;
  Thread& self = threads_[fiber.thread];
  self.operation = &operation;
  self.place = place;
  const u32 bit = 1u << fiber.lane;
  const u32 peers = simdgroup.waiting;
  simdgroup.waiting |= bit;
  simdgroup.ready &= ~bit;
  if (peers) {
    const Thread& peer = threads_[(fiber.thread & ~31u) + static_cast<u32>(std::countr_zero(peers))];
    if (peer.operation != &operation || peer.place.line != place.line) fail_divergent();
  }
  if (simdgroup.waiting != simdgroup.active) return suspend(fiber);
  complete_for(fiber);
}

[[gnu::noinline]] void ThreadgroupRunner::complete_for(abi::Fiber& last) {
  complete(*last.simdgroup, last.simdgroup->waiting);
  if (rng_ && (random() & 3) == 0) transfer(last, static_cast<unsigned>(pick(last.thread)));
}

[[gnu::noinline]] void ThreadgroupRunner::fail_divergent() {
  fail_waiting("divergence: lanes of a simdgroup execute different operations");
}

// Computes the matrix products that lanes have requested. Lanes that request different products have taken
// different branches, which is an error.
int ThreadgroupRunner::run_queue(abi::Simdgroup& simdgroup) {
  abi::MatrixQueue& queue = *simdgroup.queue;
  return queue.products[0].lanes ? queue.run(queue) : -1;
}

void ThreadgroupRunner::complete(abi::Simdgroup& simdgroup, u32 lanes) {
  const auto group = static_cast<unsigned>(&simdgroup - simdgroups_);
  if (const int product = run_queue(simdgroup); product >= 0) fail(describe_product(group, product));
  const Thread& any = threads_[group * abi::kLanes + static_cast<u32>(std::countr_zero(lanes))];
  const int culprit = any.operation->execute ? any.operation->execute(simdgroup, lanes) : -1;
  if (culprit >= 0) {
    fail(text_of(any.place) + ": " + any.operation->name + ": lane " + std::to_string(culprit) +
         " of simdgroup " + std::to_string(group) +
         " takes part with a lane that is out of range, has returned or does not take part (argument " +
         std::to_string(simdgroup.argument[culprit]) + ")");
  }
  simdgroup.waiting &= ~lanes;
  simdgroup.ready |= lanes;
  ready_simdgroups_ |= 1u << group;
}

void ThreadgroupRunner::simdgroup_barrier(abi::Worker& worker, abi::Fiber& fiber, abi::Place place) {
  static constexpr abi::Operation kBarrier{"simdgroup_barrier", nullptr};
  ThreadgroupRunner& runner = of(worker);
  const unsigned turn = runner.threads_[fiber.thread].simdgroup_barriers++ % 2;
  char& point = runner.sync_simdgroup_[fiber.thread / abi::kLanes][turn].byte;
  release(point);
  runner.wait_for(fiber, kBarrier, place);
  acquire(point);
}

void ThreadgroupRunner::together(abi::Worker& worker, abi::Fiber& fiber, const abi::Operation& operation,
                                 u32 simdgroups, abi::Place place) {
  ThreadgroupRunner& runner = of(worker);
  if (simdgroups != runner.simdgroup_count_)
    runner.fail(text_of(place) + ": " + operation.name + " is for " + std::to_string(simdgroups) +
                " simdgroups; the threadgroup has " + std::to_string(runner.simdgroup_count_));
  runner.wait_for(fiber, operation, place);
  if (fiber.lane != 0) return;
  Together& own = runner.together_[fiber.thread / abi::kLanes];
  own = {own.count + 1, own.which * 31 + reinterpret_cast<std::uintptr_t>(&operation) + place.line, place};
}

void ThreadgroupRunner::wrong_size(abi::Worker& worker, const char* what, int columns, int rows,
                                   int wanted_columns, int wanted_rows, abi::Place place) {
  of(worker).fail(text_of(place) + ": " + what + " has " + std::to_string(rows) + " rows of " +
                  std::to_string(columns) + " elements, not " + std::to_string(wanted_rows) + " of " +
                  std::to_string(wanted_columns));
}

void ThreadgroupRunner::unwritten(abi::Worker& worker, const char* what, abi::Place place) {
  of(worker).fail(text_of(place) + ": " + what + " has elements that were never written");
}

void ThreadgroupRunner::threadgroup_barrier(abi::Worker& worker, abi::Fiber& fiber, abi::Place place) {
  ThreadgroupRunner& runner = of(worker);
  char& point = runner.sync_barrier_[runner.barriers_ % 2].byte;
  release(point);
  runner.wait_at_barrier(fiber, place);
  acquire(point);
}

void ThreadgroupRunner::wait_at_barrier(abi::Fiber& fiber, abi::Place place) {
  Thread& self = threads_[fiber.thread];
  self.operation = nullptr;
  self.place = place;
  fiber.simdgroup->ready &= ~(1u << fiber.lane);
  at_barrier_++;
  if (returned_ > 0) fail_waiting("threadgroup_barrier: other threads have returned before it");
  if (at_barrier_ < count_) return suspend(fiber);
  for (unsigned i = 0; i < count_; i++) {
    if (threads_[i].place.line != place.line)
      fail_waiting("divergence: threads wait at different threadgroup_barriers");
  }
  release_barrier();
  if (rng_) transfer(fiber, static_cast<unsigned>(pick(fiber.thread)));
}

void ThreadgroupRunner::release_barrier() {
  for (unsigned i = 0; i < simdgroup_count_; i++) {
    abi::Simdgroup& simdgroup = simdgroups_[i];
    if (const int product = run_queue(simdgroup); product >= 0) fail(describe_product(i, product));
    simdgroup.ready = simdgroup.active & ~simdgroup.waiting;
    if (simdgroup.ready) ready_simdgroups_ |= 1u << i;
  }
  if (std::string divergence = describe_divergence(); !divergence.empty()) fail(std::move(divergence));
  at_barrier_ = 0;
  barriers_++;
  choose_order();
}

}  // namespace metal_emulator::cpu
