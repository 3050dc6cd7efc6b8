#include "residency.h"

#include <system_error>
#include <utility>

namespace metal_prefill::metal {

// The SDK that introduced residency sets. Whether the system supports them is tested at run time.
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
#pragma clang diagnostic ignored "-Wunguarded-availability-new"

namespace {

// Half of the time after which macOS 26 releases memory that was not requested again.
constexpr std::chrono::milliseconds kInterval(500);

id<MTLResidencySet> make_set(const Device& device) {
  if (!device.is_native()) return nil;
  if (![(NSObject*)device.mtl() respondsToSelector:@selector(newResidencySetWithDescriptor:error:)])
    return nil;
  NSError* error = nil;
  return [device.mtl() newResidencySetWithDescriptor:[[MTLResidencySetDescriptor alloc] init] error:&error];
}

}  // namespace

Residency::Residency(const Device& device, double kept_seconds)
    : device_(device.mtl()),
      queue_(device.queue()),
      set_(make_set(device)),
      kept_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kept_seconds))) {
  if (set_) [queue_ addResidencySet:set_];
}

Residency::~Residency() {
  if (thread_.joinable()) {
    {
      const std::scoped_lock lock(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  if (!set_) return;
  [queue_ removeResidencySet:set_];
  if (bytes() > 0) [(id<MTLResidencySet>)set_ endResidency];
}

// Beyond the recommended size other programs would lose their memory: those buffers are managed as usual.
void Residency::add(id<MTLBuffer> buffer) {
  if (!set_ || bytes() + buffer.length > device_.recommendedMaxWorkingSetSize) return;
  const std::scoped_lock lock(set_mutex_);
  [(id<MTLResidencySet>)set_ addAllocation:buffer];
  commit();
}

void Residency::remove(id<MTLBuffer> buffer) {
  if (!set_ || !buffer) return;
  const std::scoped_lock lock(set_mutex_);
  [(id<MTLResidencySet>)set_ removeAllocation:buffer];
  commit();
}

void Residency::commit() {
  id<MTLResidencySet> set = set_;
  [set commit];
  [set requestResidency];
  bytes_.store(set.allocatedSize, std::memory_order_relaxed);
}

void Residency::used() {
  if (!set_) return;
  const std::scoped_lock lock(mutex_);
  const bool asleep = Clock::now() - std::exchange(last_use_, Clock::now()) >= kept_;
  if (thread_.joinable()) {
    if (asleep) changed_.notify_one();
    return;
  }
  try {
    thread_ = std::thread([this] { keep(); });
  } catch (const std::system_error&) {  // no thread: macOS may release the memory in a pause
  }
}

void Residency::request() {
  const AutoreleasePool pool;
  const std::scoped_lock lock(set_mutex_);
  [(id<MTLResidencySet>)set_ requestResidency];
}

void Residency::keep() {
  std::unique_lock lock(mutex_);
  const auto in_use = [this] { return Clock::now() - last_use_ < kept_; };
  while (!ends_) {
    if (in_use()) {
      lock.unlock();  // the request may take long, and passes need not wait for it here
      request();
      lock.lock();
      changed_.wait_for(lock, kInterval, [this] { return ends_; });
    } else {
      changed_.wait(lock, [&] { return ends_ || in_use(); });
    }
  }
}

#else

Residency::Residency(const Device& device, double) : device_(device.mtl()), queue_(device.queue()), kept_{} {}
Residency::~Residency() {}
void Residency::add(id<MTLBuffer>) {}
void Residency::remove(id<MTLBuffer>) {}
void Residency::used() {}
void Residency::commit() {}
void Residency::request() {}
void Residency::keep() {}

#endif

}  // namespace metal_prefill::metal
