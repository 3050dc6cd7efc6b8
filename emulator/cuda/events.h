// A pool of driver events with times.
#pragma once

#include <mutex>
#include <vector>

#include "driver.h"

namespace metal_emulator::cuda {

class Events {
 public:
  Event take() {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      Event event = nullptr;
      METAL_EMULATOR_CALL(cuEventCreate, &event, kWithTime);
      return event;
    }
    Event event = idle_.back();
    idle_.pop_back();
    return event;
  }
  void put_back(Event event) {
    std::lock_guard lock(mutex_);
    idle_.push_back(event);
  }

 private:
  std::mutex mutex_;
  std::vector<Event> idle_;
};

inline double seconds_between(Event start, Event end) {
  float milliseconds = 0;
  METAL_EMULATOR_CALL(cuEventElapsedTime, &milliseconds, start, end);
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace metal_emulator::cuda
