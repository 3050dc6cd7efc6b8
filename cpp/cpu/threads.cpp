#include "threads.h"

#include <algorithm>
#include <string>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "../base/errors.h"

namespace metal_prefill::cpu {

namespace {

// Spins before a thread sleeps: about 50 µs, longer than the work between two barriers of a decode step and
// than a Python caller needs between two tokens, but short compared with a time slice of another process.
constexpr int kSpins = 2000;

// Spins before a thread takes items of others, 1 to 2 µs: items of equal length finish together, and
// examining the shares of others would slow them down.
constexpr int kPatience = 30;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::
                   : "memory");  // `yield` is a no-op on most cores; isb waits about as long as pause on x86
#endif
}

template <typename Condition>
void wait_until(const std::atomic<std::uint32_t>& value, Condition&& holds) {
  std::uint32_t seen = 0;
  for (int i = 0; i < kSpins; ++i) {
    seen = value.load(std::memory_order_acquire);
    if (holds(seen)) return;
    pause();
  }
  while (!holds(seen)) {
    value.wait(seen, std::memory_order_acquire);
    seen = value.load(std::memory_order_acquire);
  }
}

int available_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

// Tiles of attention need more stack than the 128 KiB that musl allocates for a thread; glibc allocates 8
// MiB, macOS 512 KiB. This changes the default of all threads that start later; musl never lowers it.
void raise_stack_size() {
#if defined(__linux__) && !defined(__GLIBC__)
  constexpr std::size_t kStackBytes = std::size_t(1) << 20;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
#endif
}

}  // namespace

// Share t is the items [items * t / n, items * (t + 1) / n).
Worker::ItemRange Worker::claim(int owner, int items) {
  constexpr int kRuns = 64;  // per share
  const int n = team_->size_;
  const auto first = std::uint32_t(std::int64_t(items) * owner / n);
  const auto end = std::uint32_t(std::int64_t(items) * (owner + 1) / n);
  const auto most = std::uint32_t(std::max(1, items / (kRuns * n)));
  std::atomic<std::uint64_t>& next = team_->shares_[std::size_t(owner)].next;
  std::uint64_t seen = next.load(std::memory_order_relaxed);
  for (;;) {
    const auto ahead = std::int32_t(std::uint32_t(seen >> 32) - phase_);
    if (ahead > 0) return {0, 0};  // the other threads have left this phase
    const std::uint32_t item = ahead == 0 ? std::uint32_t(seen) : first;
    if (item >= end) return {0, 0};
    const std::uint32_t after = std::min(item + most, end);
    if (next.compare_exchange_weak(seen, std::uint64_t(phase_) << 32 | after, std::memory_order_relaxed))
      return {int(item), int(after)};
  }
}

bool Worker::report(int done, int items) {
  if (done == 0) return is_over();
  if (done != items &&
      team_->finished_.fetch_add(std::uint32_t(done), std::memory_order_acq_rel) + std::uint32_t(done) !=
          std::uint32_t(items))
    return false;
  team_->finished_.store(0, std::memory_order_relaxed);
  team_->phase_.store(phase_, std::memory_order_release);
  team_->phase_.notify_all();
  return true;
}

bool Worker::is_over() const {
  return std::int32_t(team_->phase_.load(std::memory_order_acquire) - phase_) >= 0;
}

bool Worker::is_over_soon() const {
  for (int i = 0; i < kPatience; ++i) {
    if (is_over()) return true;
    pause();
  }
  return false;
}

void Worker::wait() const {
  wait_until(team_->phase_, [this](std::uint32_t over) { return std::int32_t(over - phase_) >= 0; });
}

Team::Team(int threads) : size_(threads > 0 ? threads : available_cores()), shares_(std::size_t(size_)) {
  launch();
}

Team::~Team() {
  stop();
}

void Team::launch() {
  core_ = -1;
  raise_stack_size();
  threads_.reserve(std::size_t(size_ - 1));
  try {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (const std::system_error& error) {
    const std::size_t started = threads_.size();
    stop();
    throw DeviceError("cannot start thread " + std::to_string(started + 1) + " of " + std::to_string(size_) +
                      ": " + error.what());
  } catch (...) {  // no memory; destroying a joinable thread would terminate the process
    stop();
    throw;
  }
  launched_ = true;
}

void Team::stop() {
  launched_ = false;
  if (forked_) {  // nothing to join, and destroying a joinable thread would terminate the process
    new std::vector<std::thread>(std::move(threads_));
    threads_.clear();
    forked_ = false;
    return;
  }
  stopping_.store(true, std::memory_order_relaxed);
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  stopping_.store(false, std::memory_order_relaxed);
}

// Linux may wake a thread on the waker's core even if others are idle: it does not look for idle cores if
// cores were recently busy. The thread then waits for the caller, which never waits for a thread outside the
// body: during calls of a few milliseconds it would never run.
void Team::keep_core() {
#ifdef __linux__
  const int core = sched_getcpu();
  if (core == core_ || size_ == 1) return;
  core_ = core;
  cpu_set_t others;
  if (core < 0 || sched_getaffinity(0, sizeof others, &others) != 0) return;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0) return;
  for (std::thread& thread : threads_) pthread_setaffinity_np(thread.native_handle(), sizeof others, &others);
#endif
}

void Team::start(Body body, void* argument) {
  if (forked_) stop();
  if (!launched_) launch();
  keep_core();
  body_ = body;
  argument_ = argument;
  first_phase_ = phase_.load(std::memory_order_relaxed);
  inside_.store(kOpen, std::memory_order_release);
  if (size_ > 1) {
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
  }
  Worker worker(this, 0, first_phase_);
  body(argument, worker);
  inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
  wait_until(inside_, [](std::uint32_t inside) {
    return inside == 0;
  });  // they still use the objects that body refers to
}

void Team::loop(int index) {
  std::uint32_t job = 0;
  for (;;) {
    wait_until(job_, [&](std::uint32_t current) { return current != job; });
    job = job_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    std::uint32_t inside = inside_.load(std::memory_order_relaxed);
    do {
      if (!(inside & kOpen)) break;
    } while (!inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire));
    if (!(inside & kOpen)) continue;  // too late for this call
    job = job_.load(
        std::memory_order_relaxed);  // may be a later call; a body entered twice finds its phases over
    Worker worker(this, index, first_phase_);
    body_(argument_, worker);
    if (inside_.fetch_sub(1, std::memory_order_release) == 1) inside_.notify_one();
  }
}

}  // namespace metal_prefill::cpu
