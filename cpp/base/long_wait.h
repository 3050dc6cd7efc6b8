// Waits for background work, during which a thread may hold a lock that other threads need.
#pragma once

#include <functional>

namespace metal_prefill {

// Calls a function that waits. The Python module replaces it with one that releases the GIL while it waits.
inline void (*long_wait)(const std::function<void()>& wait) = [](const std::function<void()>& wait) {
  wait();
};

// Called ten times a second during long waits, by threads without a lock that a thread with the GIL waits
// for. The Python module replaces it with one that throws if the user has interrupted the program.
inline void (*raise_if_interrupted)() = [] {};

}  // namespace metal_prefill
