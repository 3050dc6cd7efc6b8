// Waits for the GPU and for Metal's compiler. They end if no answer arrives, or if the user interrupts them.
#pragma once

#import <Metal/Metal.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../base/errors.h"
#include "../../base/long_wait.h"

namespace metal_prefill::metal {

// Interval at which a wait checks whether it should end.
inline constexpr std::chrono::milliseconds kWaitStep(100);

// Seconds after which a command buffer counts as lost: METAL_PREFILL_PATIENCE, or 60. Those of passes take
// about a tenth of a second, and macOS ends one that takes some seconds.
double patience();

// Whether a user may interrupt a wait. The check takes the GIL, so the caller must not hold the lock of a
// pool of pages, or any other lock that a thread with the GIL waits for.
enum class Interrupts { kTaken, kIgnored };

// Waits until the command buffer has completed. Throws DeviceError after `patience()`, from when on the GPU
// counts as lost, or the error of raise_if_interrupted.
void wait_for(id<MTLCommandBuffer> commands, Interrupts interrupts);
// The same for destructors, without interruption and for a few seconds only.
void wait_briefly_for(id<MTLCommandBuffer> commands) noexcept;
// Whether a command buffer never completed. The GPU may still use its buffers, so engines must not be freed.
bool gpu_is_lost() noexcept;

// Starts `n` jobs on Metal's own threads and returns their results. A job receives its index and a function
// that it must call once with its result; it may throw instead. Throws the error of the last failed job,
// DeviceError if no job ends for a long time, or the error of raise_if_interrupted. Unfinished jobs continue
// in the last two cases.
template <typename Result, typename Start>
std::vector<Result> run_concurrently(std::size_t n, const Start& start) {
  struct Jobs {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Result> results;
    std::size_t left;
  };
  const auto jobs = std::make_shared<Jobs>();
  jobs->results.resize(n);
  jobs->left = n;
  const auto end = [](Jobs& of) {
    --of.left;
    of.changed.notify_all();
  };
  std::exception_ptr failure;
  for (std::size_t i = 0; i < n; ++i) {
    try {
      start(i, [jobs, i, end](Result result) {
        const std::scoped_lock lock(jobs->mutex);
        jobs->results[i] = std::move(result);
        end(*jobs);
      });
    } catch (...) {
      failure = std::current_exception();
      const std::scoped_lock lock(jobs->mutex);
      end(*jobs);
    }
  }
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> limit(5 * patience());  // compilations take longer than passes
  std::unique_lock lock(jobs->mutex);
  auto last_change = Clock::now();
  for (std::size_t left = jobs->left; jobs->left > 0;) {
    jobs->changed.wait_for(lock, kWaitStep);
    if (std::exchange(left, jobs->left) != jobs->left) last_change = Clock::now();
    if (jobs->left > 0 && Clock::now() - last_change > limit)
      throw DeviceError("Metal's compiler has not answered for " + std::to_string(int(limit.count())) +
                        " s; use device='cpu'");
    lock.unlock();
    raise_if_interrupted();
    lock.lock();
  }
  if (failure) std::rethrow_exception(failure);
  return std::move(jobs->results);
}

}  // namespace metal_prefill::metal
