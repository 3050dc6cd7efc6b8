// Work that Metal performs on its own threads and reports through a block.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "../../engine/engine.h"

namespace metal_prefill::metal {

// Starts `n` asynchronous jobs and waits for all of them. A job receives its index and must call `done` once,
// with an error message or an empty one; it must not throw. Throws DeviceError with the first message.
template <typename Start>
void run_concurrently(std::size_t n, const Start& start) {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t left = n;
  std::string first_error;
  const auto done = [&](const std::string& error) {
    const std::scoped_lock lock(mutex);
    if (first_error.empty()) first_error = error;
    --left;
    changed.notify_all();
  };
  for (std::size_t i = 0; i < n; ++i) {
    try {
      start(i, done);
    } catch (const std::exception& error) {
      done(error.what());
    }
  }
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return left == 0; });
  if (!first_error.empty()) throw DeviceError(first_error);
}

}  // namespace metal_prefill::metal
