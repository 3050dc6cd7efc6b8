#include "fork_handler.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace metal_prefill {

// All handlers of the process, the oldest first.
struct ForkHandlers {
  std::mutex mutex;
  std::vector<ForkHandler*> all;

  static ForkHandlers& instance() {
    static ForkHandlers* const handlers = [] {
      auto* const made = new ForkHandlers;  // never destroyed: threads may fork until the process has ended
      pthread_atfork([] { instance().before(); }, [] { instance().after(false); },
                     [] { instance().after(true); });
      return made;
    }();
    return *handlers;
  }

  void before() {
    mutex.lock();
    for (auto handler = all.rbegin(); handler != all.rend(); ++handler) (*handler)->before_();
  }
  void after(bool child) {
    for (ForkHandler* handler : all) handler->after_(child);
    mutex.unlock();
  }
};

ForkHandler::ForkHandler(std::function<void()> before, std::function<void(bool)> after)
    : before_(std::move(before)), after_(std::move(after)) {
  ForkHandlers& handlers = ForkHandlers::instance();
  const std::scoped_lock lock(handlers.mutex);
  handlers.all.push_back(this);
}

ForkHandler::~ForkHandler() {
  ForkHandlers& handlers = ForkHandlers::instance();
  const std::scoped_lock lock(handlers.mutex);
  handlers.all.erase(std::find(handlers.all.begin(), handlers.all.end(), this));
}

}  // namespace metal_prefill
