// Waiting for work in the background, where a thread may hold something that other threads need.
#pragma once

#include <functional>

namespace metal_prefill {

// Calls a function that waits. The Python module replaces it by one that releases the GIL meanwhile.
inline void (*long_wait)(const std::function<void()>& wait) = [](const std::function<void()>& wait) {
  wait();
};

// Called ten times a second by long waits of threads that hold nothing that a thread with the GIL waits for.
// The Python module replaces it by one that throws if the user has interrupted the program.
inline void (*raise_if_interrupted)() = [] {};

}  // namespace metal_prefill
