// Whose turn it is to compute with a session, or to change it.
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

// A lock that knows its owner and can stop waiting. A mutex would do neither: a progress callback that calls
// its own session would hang, and so would Ctrl-C while another thread computes.
class Turn {
 public:
  // Calls of other threads wait until this one ends.
  class Hold {
   public:
    // `call` is a string literal: the name of the call in messages. Throws SessionBusyError if this thread
    // holds the turn already, which means that the call comes from the progress callback of another.
    Hold(Turn& turn, const char* call) : turn_(turn) { turn.take(call); }
    ~Hold() { turn_.give_back(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Turn& turn_;
  };

  // The same for a call that only reads the cache: in a progress callback it shares the turn of its thread.
  class Share {
   public:
    Share(Turn& turn, const char* call) : turn_(turn.mine() ? nullptr : &turn) {
      if (turn_) turn_->take(call);
    }
    ~Share() {
      if (turn_) turn_->give_back();
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

   private:
    Turn* const turn_;
  };

  // Around a fork() of the process. A turn that another thread has then is lost in the child.
  void before_fork() { mutex_.lock(); }
  void after_fork(bool child);
  bool lost() const { return lost_; }

  // A thread that waits for its turn calls this ten times a second. What it throws ends the wait.
  static inline std::atomic<void (*)()> while_waiting{nullptr};

 private:
  bool mine() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  void take(const char* call);  // also throws ForkError
  void give_back();

  std::mutex mutex_;
  std::condition_variable free_;
  std::atomic<std::thread::id> owner_{std::thread::id()};  // none: nobody has the turn
  const char* call_ = "";                                  // the owner's
  bool lost_ = false;  // the owner is a thread of the process that forked this one
};

}  // namespace metal_prefill
