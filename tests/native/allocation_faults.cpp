// Makes one allocation of the engines fail, for tests. The linker (`--wrap`) redirects the allocations of
// `_core` to the functions here, so the engines' sources need no hooks. Allocations inside the C++ library
// are not redirected.
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <new>

extern "C" int PyGILState_Check();

namespace {

// Allocations up to and including the one that fails; none fails at 0 or below.
std::atomic<long> countdown{0};
std::atomic<bool> with_gil{false};

bool fails() {
  if (countdown.load(std::memory_order_relaxed) <= 0) return false;
  if (PyGILState_Check() && !with_gil.load(std::memory_order_relaxed)) return false;
  return countdown.fetch_sub(1, std::memory_order_relaxed) == 1;
}

template <typename Allocate>
void* or_throw(Allocate allocate) {
  if (fails()) throw std::bad_alloc();
  return allocate();
}

}  // namespace

#define EXPORTED [[gnu::visibility("default"), gnu::used]]

extern "C" {

// Makes the nth allocation from now on fail, on any thread; 0: none. Allocations by a thread that holds the
// GIL count only on request: nanobind converts arguments and results with it, and ends the process if that
// fails.
EXPORTED void metal_prefill_fail_allocation(long nth, bool also_with_gil) {
  with_gil.store(also_with_gil, std::memory_order_relaxed);
  countdown.store(nth, std::memory_order_relaxed);
}
// Whether the failure is still pending.
EXPORTED bool metal_prefill_allocation_will_fail() {
  return countdown.load(std::memory_order_relaxed) > 0;
}

// In the linker's names, `operator new` is _Zn, w or a for arrays, the size, and further arguments.
void* __real__Znwm(std::size_t bytes);
void* __real__Znam(std::size_t bytes);
void* __real__ZnwmSt11align_val_t(std::size_t bytes, std::align_val_t alignment);
void* __real__ZnamSt11align_val_t(std::size_t bytes, std::align_val_t alignment);
void* __real__ZnwmRKSt9nothrow_t(std::size_t bytes, const std::nothrow_t& tag);
void* __real__ZnamRKSt9nothrow_t(std::size_t bytes, const std::nothrow_t& tag);
void* __real_mmap(void* address, std::size_t bytes, int protection, int flags, int descriptor, off_t offset);
int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);

void* __wrap__Znwm(std::size_t bytes) {
  return or_throw([&] { return __real__Znwm(bytes); });
}
void* __wrap__Znam(std::size_t bytes) {
  return or_throw([&] { return __real__Znam(bytes); });
}
void* __wrap__ZnwmSt11align_val_t(std::size_t bytes, std::align_val_t alignment) {
  return or_throw([&] { return __real__ZnwmSt11align_val_t(bytes, alignment); });
}
void* __wrap__ZnamSt11align_val_t(std::size_t bytes, std::align_val_t alignment) {
  return or_throw([&] { return __real__ZnamSt11align_val_t(bytes, alignment); });
}
void* __wrap__ZnwmRKSt9nothrow_t(std::size_t bytes, const std::nothrow_t& tag) {
  return fails() ? nullptr : __real__ZnwmRKSt9nothrow_t(bytes, tag);
}
void* __wrap__ZnamRKSt9nothrow_t(std::size_t bytes, const std::nothrow_t& tag) {
  return fails() ? nullptr : __real__ZnamRKSt9nothrow_t(bytes, tag);
}
void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int descriptor, off_t offset) {
  if (fails()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return __real_mmap(address, bytes, protection, flags, descriptor, offset);
}
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  return fails() ? ENOMEM : __real_posix_memalign(memory, alignment, bytes);
}
}
