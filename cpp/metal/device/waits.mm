#include "waits.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <system_error>
#include <thread>

#include "device.h"

namespace metal_prefill::metal {

namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kBriefly(10);

std::atomic<bool> is_lost{false};

// A thread that waits for command buffers, one at a time, on behalf of callers that may give up.
struct Waiter {
  std::mutex mutex;
  std::condition_variable changed;
  id<MTLCommandBuffer> commands;  // null once it has completed
  bool is_left = false;           // the caller gave up: the thread ends after this wait

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return commands != nil || is_left; });
      if (is_left) return;
      {
        const AutoreleasePool pool;
        id<MTLCommandBuffer> current = commands;
        lock.unlock();
        [current waitUntilCompleted];
      }
      lock.lock();
      commands = nil;
      changed.notify_all();
    }
  }
  // Returns whether the command buffer completed within the limit. `look` may throw.
  bool wait(id<MTLCommandBuffer> for_them, Seconds limit, void (*look)()) {
    const auto begin = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex);
    commands = for_them;
    changed.notify_all();
    while (!changed.wait_for(lock, kWaitStep, [this] { return commands == nil; })) {
      if (std::chrono::steady_clock::now() - begin > limit) return false;
      lock.unlock();
      look();
      lock.lock();
    }
    return true;
  }
  void leave() {
    const std::scoped_lock lock(mutex);
    is_left = true;
    changed.notify_all();
  }
};

// Idle waiters, which live until the process ends.
class Waiters {
 public:
  static Waiters& instance() {
    static auto& waiters = *new Waiters;
    return waiters;
  }
  // Null if no thread can be started.
  std::shared_ptr<Waiter> take() {
    const std::scoped_lock lock(mutex_);
    if (!idle_.empty()) {
      std::shared_ptr<Waiter> waiter = std::move(idle_.back());
      idle_.pop_back();
      return waiter;
    }
    auto waiter = std::make_shared<Waiter>();
    try {
      std::thread([waiter] { waiter->serve(); }).detach();
    } catch (const std::system_error&) {
      return nullptr;
    }
    return waiter;
  }
  void put_back(std::shared_ptr<Waiter> waiter) {
    const std::scoped_lock lock(mutex_);
    idle_.push_back(std::move(waiter));
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Waiter>> idle_;
};

// Returns whether the command buffer completed within `limit`; otherwise the GPU is lost. `look` may throw.
bool has_completed(id<MTLCommandBuffer> commands, Seconds limit, void (*look)()) {
  if (!commands) return true;
  if (is_lost) return false;
  const std::shared_ptr<Waiter> waiter = Waiters::instance().take();
  if (!waiter) {
    [commands waitUntilCompleted];
    return true;
  }
  try {
    if (waiter->wait(commands, limit, look)) {
      Waiters::instance().put_back(waiter);
      return true;
    }
    is_lost = true;
  } catch (...) {
    waiter->leave();
    throw;
  }
  waiter->leave();
  return false;
}

}  // namespace

double patience() {
  const char* text = std::getenv("METAL_PREFILL_PATIENCE");
  const double seconds = text ? std::atof(text) : 0;
  return seconds > 0 ? seconds : 60;
}

void wait_for(id<MTLCommandBuffer> commands, Interrupts interrupts) {
  if (gpu_is_lost())
    throw DeviceError("an earlier command buffer never completed: this process does not use the GPU again");
  const bool taken = interrupts == Interrupts::kTaken;
  if (!has_completed(commands, Seconds(patience()), taken ? raise_if_interrupted : [] {}))
    throw DeviceError("the GPU did not finish " + std::string(commands.label.UTF8String) + " within " +
                      std::to_string(int(patience())) + " s");
}

void wait_briefly_for(id<MTLCommandBuffer> commands) noexcept {
  has_completed(commands, std::min(Seconds(patience()), kBriefly), [] {});
}

bool gpu_is_lost() noexcept {
  return is_lost;
}

}  // namespace metal_prefill::metal
