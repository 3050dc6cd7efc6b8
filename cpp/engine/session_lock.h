// The lock of a session, held by calls that compute with it or change it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace metal_prefill {

// A call would change a session that another call is using.
struct SessionBusyError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A lock that knows its owner and whose waiting can be interrupted. With a mutex, a progress callback that
// calls its own session would hang, and so would Ctrl-C while another thread computes.
class SessionLock {
 public:
  enum class Access { kChange, kRead };

  // Holds the lock; calls of other threads wait until it is destroyed.
  class Hold {
   public:
    // `call` names the call in messages. If this thread already holds the lock, the call comes from the
    // progress callback of another one: a call that only reads shares the lock, any other throws
    // SessionBusyError.
    Hold(SessionLock& lock, const char* call, Access access = Access::kChange)
        : lock_(access == Access::kRead && lock.mine() ? nullptr : &lock) {
      if (lock_) lock_->acquire(call);
    }
    ~Hold() {
      if (lock_) lock_->release();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    SessionLock* const lock_;
  };

  // Called around a fork() of the process. A lock that another thread holds is lost in the child.
  void before_fork() { mutex_.lock(); }
  void after_fork(bool child);
  bool lost() const { return lost_; }

 private:
  bool mine() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  void acquire(const char* call);  // also throws ForkError
  void release();

  std::mutex mutex_;
  std::condition_variable free_;
  std::atomic<std::thread::id> owner_{std::thread::id()};  // none if it is free
  const char* call_ = "";                                  // name of the owner's call
  bool lost_ = false;                                      // the owner was a thread of the parent process
};

}  // namespace metal_prefill
