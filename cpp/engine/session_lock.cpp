#include "session_lock.h"

#include <chrono>
#include <new>
#include <string>

#include "../base/fork_handler.h"
#include "../base/long_wait.h"

namespace metal_prefill {

void SessionLock::acquire(const char* call) {
  if (mine())
    throw SessionBusyError(std::string(call) +
                           " would change the session inside the progress callback of its " + call_ +
                           "; call it after that, or use a session of its own");
  if (lost_)
    throw ForkError(std::string(call) +
                    ": this process was forked while another thread was in the session's " + call_ +
                    "; the session cannot be used here, open the model again");
  std::unique_lock lock(mutex_);
  while (owner_.load(std::memory_order_relaxed) != std::thread::id()) {
    if (free_.wait_for(lock, std::chrono::milliseconds(100)) == std::cv_status::no_timeout) continue;
    lock.unlock();
    raise_if_interrupted();
    lock.lock();
  }
  call_ = call;
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

void SessionLock::release() {
  {
    const std::scoped_lock lock(mutex_);
    owner_.store(std::thread::id(), std::memory_order_relaxed);
  }
  free_.notify_one();
}

void SessionLock::after_fork(bool child) {
  if (child) {
    const std::thread::id owner = owner_.load(std::memory_order_relaxed);
    lost_ = lost_ || (owner != std::thread::id() && owner != std::this_thread::get_id());
    new (&free_) std::condition_variable;  // the old one may count threads that do not exist here
  }
  mutex_.unlock();
}

}  // namespace metal_prefill
