#include "turn.h"

#include <chrono>
#include <string>

namespace metal_prefill {

void Turn::take(const char* call) {
  if (mine())
    throw SessionBusyError(std::string(call) +
                           " would change the session inside the progress callback of its " + call_ +
                           "; call it after that, or use a session of its own");
  std::unique_lock lock(mutex_);
  while (owner_.load(std::memory_order_relaxed) != std::thread::id()) {
    if (free_.wait_for(lock, std::chrono::milliseconds(100)) == std::cv_status::no_timeout) continue;
    if (void (*check)() = while_waiting.load(std::memory_order_relaxed)) {
      lock.unlock();
      check();
      lock.lock();
    }
  }
  call_ = call;
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

void Turn::give_back() {
  {
    const std::scoped_lock lock(mutex_);
    owner_.store(std::thread::id(), std::memory_order_relaxed);
  }
  free_.notify_one();
}

}  // namespace metal_prefill
