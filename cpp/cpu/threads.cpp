#include "threads.h"

#include <algorithm>
#include <string>
#include <system_error>

#ifdef __linux__
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include "../engine.h"

namespace metal_prefill::cpu {

namespace {

// Spins before a thread sleeps: about 50 µs, longer than the work between two barriers of a decode step and
// than a Python caller needs between two tokens, and short against a time slice that another process may have
// taken.
constexpr int kSpins = 2000;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::
                   : "memory");  // `yield` is a no-op on most cores; isb waits about as long as pause on x86
#endif
}

// Waits until `value` differs from `old`.
void wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

int available_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

}  // namespace

void Worker::barrier() {
  const std::uint32_t epoch = epoch_++;
  if (team_.size_ == 1) return;
  if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == std::uint32_t(team_.size_)) {
    team_.arrived_.store(0, std::memory_order_relaxed);
    team_.epoch_.store(epoch + 1, std::memory_order_release);
    team_.epoch_.notify_all();
  } else {
    wait_for_change(team_.epoch_, epoch);
  }
}

void Worker::begin() {
  ++phase_;
  victim_ = 0;
}

// The share of thread t is [items * t / n, items * (t + 1) / n).
int Worker::claim(int items) {
  const int n = team_.size_;
  for (; victim_ < n; ++victim_) {
    const int owner = (index_ + victim_) % n;
    const auto first = std::uint32_t(std::int64_t(items) * owner / n);
    const auto end = std::uint32_t(std::int64_t(items) * (owner + 1) / n);
    std::atomic<std::uint64_t>& next = team_.shares_[std::size_t(owner)].next;
    std::uint64_t seen = next.load(std::memory_order_relaxed);
    for (;;) {
      const bool current = std::uint32_t(seen >> 32) == phase_;
      const std::uint32_t item = current ? std::uint32_t(seen) : first;
      if (item >= end) break;
      if (next.compare_exchange_weak(seen, std::uint64_t(phase_) << 32 | (item + 1),
                                     std::memory_order_relaxed))
        return int(item);
    }
  }
  return -1;
}

Team::Team(int threads) : size_(threads > 0 ? threads : available_cores()), shares_(std::size_t(size_)) {
  threads_.reserve(std::size_t(size_ - 1));
  try {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { loop(i); });
  } catch (const std::system_error& error) {
    stop();
    throw DeviceError("cannot start thread " + std::to_string(threads_.size() + 1) + " of " +
                      std::to_string(size_) + ": " + error.what());
  }
}

Team::~Team() {
  stop();
}

void Team::stop() {
  stopping_ = true;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::start(Body body, void* argument) {
  body_ = body;
  argument_ = argument;
  job_.fetch_add(1, std::memory_order_release);
  if (size_ > 1) job_.notify_all();
  Worker worker(*this, 0);
  worker.phase_ = phase_;
  worker.epoch_ = epoch_.load(std::memory_order_relaxed);
  body(argument, worker);
  worker.barrier();  // the others still use what body refers to
  phase_ = worker.phase_;
}

void Team::loop(int index) {
  std::uint32_t job = 0;
  for (;;) {
    wait_for_change(job_, job);
    ++job;
    if (stopping_) return;
    Worker worker(*this, index);
    worker.phase_ = phase_;
    worker.epoch_ = epoch_.load(std::memory_order_relaxed);
    body_(argument_, worker);
    worker.barrier();
  }
}

}  // namespace metal_prefill::cpu
