// The thread on which an executor completes command buffers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "executor.h"

namespace metal_emulator {

// Completes submissions in order. The thread starts with the first submission; the destructor waits for the
// last one. A Submission has a member `done`, which is called with the result.
template <typename Submission>
class SubmissionQueue {
 public:
  explicit SubmissionQueue(std::function<Completion(Submission&)> complete)
      : complete_(std::move(complete)) {}

  void push(Submission submission) {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
    waiting_.push_back(std::move(submission));
    wake_.notify_one();
  }

 private:
  void serve(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (wake_.wait(lock, stop, [&] { return !waiting_.empty(); })) {
      Submission submission = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      Completion completion = complete_(submission);
      auto done = std::move(submission.done);
      submission = {};  // releases buffers before the caller is notified
      done(std::move(completion));
      done = nullptr;
      lock.lock();
    }
  }

  const std::function<Completion(Submission&)> complete_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::deque<Submission> waiting_;
  std::jthread thread_;
};

}  // namespace metal_emulator
