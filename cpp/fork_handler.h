// Objects that survive fork(): the child has all memory of the process, and of its threads only the one that
// forked.
#pragma once

#include <functional>
#include <stdexcept>

namespace metal_prefill {

// A lock or object that the call needs was in use by another thread when this process was forked.
struct ForkError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While one exists, its functions run around each fork() of the process. A member of what it looks after: the
// last one, so that it is there only while all others are.
class ForkHandler {
 public:
  // `before` takes the locks that others hold for moments only, so that what they guard is whole in the
  // child; `after` gives them back, in parent and child. The youngest handler takes its locks first: what
  // uses a thing under a lock of its own is made after it. Neither may throw, nor make or destroy a
  // ForkHandler.
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
