#include "gil.h"

#include <pthread.h>

#include <chrono>

namespace metal_prefill {

namespace {

std::atomic<int> asking_threads{0};
std::atomic<bool> exiting{false};
std::atomic<std::thread::id> exiting_thread{};

// The waiting threads do not exist in a forked process.
const int registered = pthread_atfork(nullptr, nullptr, [] { asking_threads.store(0); });

}  // namespace

void stop_this_thread() noexcept {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

bool interpreter_exits_elsewhere() noexcept {
  return exiting.load() && exiting_thread.load() != std::this_thread::get_id();
}

AskingForGil::AskingForGil() noexcept {
  asking_threads.fetch_add(1);
  if (!interpreter_exits_elsewhere()) return;
  asking_threads.fetch_sub(1);
  stop_this_thread();
}

AskingForGil::~AskingForGil() {
  asking_threads.fetch_sub(1);
}

void interpreter_exits() {
  exiting_thread.store(std::this_thread::get_id());
  exiting.store(true);
  PyThreadState* const thread = PyEval_SaveThread();
  while (asking_threads.load() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  PyEval_RestoreThread(thread);
}

}  // namespace metal_prefill
