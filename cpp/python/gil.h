// Releases and acquires the GIL so that a thread survives the end of the interpreter.
//
// When Python exits while a daemon thread is inside a call, that thread must never request the GIL again.
// During finalization, CPython up to 3.13 answers with pthread_exit(), which unwinds the stack through
// destructors that must not throw or need the GIL; afterwards there is no interpreter. Both abort the
// process. Here such a thread stops instead, as in Python 3.14, while the process exits.
#pragma once

#include <Python.h>

#include <atomic>
#include <exception>
#include <thread>
#include <type_traits>

namespace metal_prefill {

[[noreturn]] void stop_this_thread() noexcept;

// Called by Python's atexit, before finalization: from then on no other thread requests the GIL through this
// header. Waits, without the GIL, for threads that are requesting it.
void interpreter_exits();

// Whether another thread has called it, so that a thread that has the GIL must not release it.
bool interpreter_exits_elsewhere() noexcept;

// While one exists, finalization does not begin: it waits until this thread has the GIL. After a call of
// interpreter_exits(), the constructor returns only in the thread that made it.
class AskingForGil {
 public:
  AskingForGil() noexcept;
  ~AskingForGil();
  AskingForGil(const AskingForGil&) = delete;
  AskingForGil& operator=(const AskingForGil&) = delete;
};

// Whether this thread has released the GIL through this header. (PyGILState_Check is not in the stable ABI.)
inline thread_local bool gil_is_released = false;

// Whether this thread has the GIL. A thread that has it must not stop: the exiting thread waits for it.
inline bool has_gil() {
  return !gil_is_released && PyGILState_GetThisThreadState();
}

// Replaces nanobind's gil_scoped_release, also as a call guard.
class GilRelease {
 public:
  GilRelease() : thread_(PyEval_SaveThread()) { gil_is_released = true; }
  ~GilRelease() {
    const AskingForGil asking;
    PyEval_RestoreThread(thread_);
    gil_is_released = false;
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const thread_;
};

template <typename F>
auto without_gil(F&& f) {
  const GilRelease release;
  return f();
}

// Calls f() with the GIL. It may run Python code, and throw exceptions derived from std::exception.
template <typename F>
auto with_gil(F&& f) {
  const bool was_released = gil_is_released;
  const PyGILState_STATE state = [] {
    if (has_gil()) return PyGILState_Ensure();
    const AskingForGil asking;
    return PyGILState_Ensure();
  }();
  gil_is_released = false;
  const auto release = [&] {
    PyGILState_Release(state);
    gil_is_released = was_released;
  };
  try {
    if constexpr (std::is_void_v<decltype(f())>) {
      f();
      release();
    } else {
      auto value = f();
      release();
      return value;
    }
  } catch (const std::exception&) {
    release();
    throw;
  } catch (...) {  // the interpreter ended this thread by pthread_exit() inside of Python code
    stop_this_thread();
  }
}

}  // namespace metal_prefill
