// Objects that survive fork(): the child has all memory of the process, but only the thread that forked.
#pragma once

#include <functional>
#include <stdexcept>

namespace metal_prefill {

// A lock or object that the call needs was in use by another thread when this process was forked.
struct ForkError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While one exists, its functions run around each fork() of the process. It must be the last member of the
// object that it protects, so that it exists only while all others do.
class ForkHandler {
 public:
  // `before` takes the locks that other threads hold only briefly, so that the data they guard is consistent
  // in the child; `after` releases them, in parent and child. The youngest handler takes its locks first: an
  // object that uses another under its own lock is created after it. Neither may throw, nor create or destroy
  // a ForkHandler.
  ForkHandler(std::function<void()> before, std::function<void(bool child)> after);
  ~ForkHandler();
  ForkHandler(const ForkHandler&) = delete;
  ForkHandler& operator=(const ForkHandler&) = delete;

 private:
  friend struct ForkHandlers;
  const std::function<void()> before_;
  const std::function<void(bool)> after_;
};

}  // namespace metal_prefill
