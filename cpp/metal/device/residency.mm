#include "residency.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "../../cache/pages.h"

namespace metal_prefill::metal {

// The SDK that introduced residency sets. Whether the system supports them is tested at run time.
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
#pragma clang diagnostic ignored "-Wunguarded-availability-new"

namespace {

// Half of the time after which macOS 26 releases memory that was not requested again.
constexpr std::chrono::milliseconds kInterval(500);

constexpr std::size_t kMostSets = 32;      // maximum of a queue
constexpr std::size_t kSetsOfDevice = 20;  // sets of equal size that fill the working set

// Bytes in the sets of all Residency objects of this process.
std::atomic<std::size_t> of_process{0};

// Maximum bytes of the process. With more, macOS would evict the memory of other programs.
std::size_t most_of_process(id<MTLDevice> device) {
  return std::min<std::size_t>(device.recommendedMaxWorkingSetSize, half_of_the_memory() / 10 * 13);
}

}  // namespace

Residency::Residency(const Device& device, double kept_seconds, bool is_wanted)
    : device_(device.mtl()),
      queue_(device.queue()),
      is_wanted_(is_wanted && device.is_native() &&
                 [(NSObject*)device.mtl() respondsToSelector:@selector(newResidencySetWithDescriptor:
                                                                                               error:)]),
      kept_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kept_seconds))) {}

Residency::~Residency() {
  if (thread_.joinable()) {
    {
      const std::scoped_lock lock(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  for (const Set& set : sets_) {
    [queue_ removeResidencySet:set.set];
    [(id<MTLResidencySet>)set.set endResidency];
  }
  of_process -= bytes();
}

Residency::Set* Residency::set_with_room(std::size_t bytes) {
  const std::size_t most = device_.recommendedMaxWorkingSetSize / kSetsOfDevice;
  for (Set& set : sets_)
    if (set.bytes + bytes <= most) return &set;
  if (sets_.size() < kMostSets) {
    MTLResidencySetDescriptor* descriptor = [[MTLResidencySetDescriptor alloc] init];
    NSError* error = nil;
    if (id<MTLResidencySet> set = [device_ newResidencySetWithDescriptor:descriptor error:&error]) {
      [queue_ addResidencySet:set];
      return &sets_.emplace_back(Set{set});
    }
  }
  const auto smallest = std::min_element(sets_.begin(), sets_.end(),
                                         [](const Set& a, const Set& b) { return a.bytes < b.bytes; });
  return smallest == sets_.end() ? nullptr : &*smallest;
}

// Memory beyond the limit is not added, and macOS manages it as usual.
void Residency::add(id<MTLBuffer> buffer) {
  const std::size_t length = buffer.length;
  if (!is_wanted_) return;
  const std::scoped_lock lock(set_mutex_);
  if (of_process.fetch_add(length) + length <= most_of_process(device_)) {
    if (Set* set = set_with_room(length)) {
      [(id<MTLResidencySet>)set->set addAllocation:buffer];
      set->bytes += length;
      bytes_ += length;
      commit(*set);
      return;
    }
  }
  of_process -= length;
}

void Residency::remove(id<MTLBuffer> buffer) {
  if (!buffer) return;
  const std::scoped_lock lock(set_mutex_);
  for (Set& set : sets_) {
    if (![(id<MTLResidencySet>)set.set containsAllocation:buffer]) continue;
    [(id<MTLResidencySet>)set.set removeAllocation:buffer];
    set.bytes -= buffer.length;
    bytes_ -= buffer.length;
    of_process -= buffer.length;
    commit(set);
  }
}

void Residency::commit(const Set& changed) {
  [(id<MTLResidencySet>)changed.set commit];
  [(id<MTLResidencySet>)changed.set requestResidency];
}

void Residency::used() {
  if (bytes() == 0) return;
  const std::scoped_lock lock(mutex_);
  const bool asleep = Clock::now() - std::exchange(last_use_, Clock::now()) >= kept_;
  if (thread_.joinable()) {
    if (asleep) changed_.notify_one();
    return;
  }
  try {
    thread_ = std::thread([this] { keep(); });
  } catch (const std::system_error&) {  // no thread: macOS may evict the memory while the engine is idle
  }
}

void Residency::request() {
  const AutoreleasePool pool;
  const std::scoped_lock lock(set_mutex_);
  for (const Set& set : sets_) [(id<MTLResidencySet>)set.set requestResidency];
}

void Residency::keep() {
  std::unique_lock lock(mutex_);
  const auto in_use = [this] { return Clock::now() - last_use_ < kept_; };
  while (!ends_) {
    if (in_use()) {
      lock.unlock();  // the request may take long, and passes must not wait for it
      request();
      lock.lock();
      changed_.wait_for(lock, kInterval, [this] { return ends_; });
    } else {
      changed_.wait(lock, [&] { return ends_ || in_use(); });
    }
  }
}

#else

Residency::Residency(const Device& device, double, bool)
    : device_(device.mtl()), queue_(device.queue()), is_wanted_(false), kept_{} {}
Residency::~Residency() {}
void Residency::add(id<MTLBuffer>) {}
void Residency::remove(id<MTLBuffer>) {}
void Residency::used() {}
Residency::Set* Residency::set_with_room(std::size_t) {
  return nullptr;
}
void Residency::commit(const Set&) {}
void Residency::request() {}
void Residency::keep() {}

#endif

}  // namespace metal_prefill::metal
