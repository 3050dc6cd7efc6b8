#include "residency.h"

namespace metal_prefill::metal {

// The SDK that brought residency sets. What the system has is asked when the program runs.
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
#pragma clang diagnostic ignored "-Wunguarded-availability-new"

namespace {

id<MTLResidencySet> make_set(id<MTLDevice> device) {
  if (![(NSObject*)device respondsToSelector:@selector(newResidencySetWithDescriptor:error:)]) return nil;
  NSError* error = nil;
  return [device newResidencySetWithDescriptor:[[MTLResidencySetDescriptor alloc] init] error:&error];
}

}  // namespace

Residency::Residency(id<MTLDevice> device, id<MTLCommandQueue> queue)
    : device_(device), queue_(queue), set_(make_set(device)) {
  if (set_) [queue_ addResidencySet:set_];
}

Residency::~Residency() {
  if (!set_) return;
  [queue_ removeResidencySet:set_];
  if (bytes() > 0) [(id<MTLResidencySet>)set_ endResidency];
}

// Beyond the recommended size other programs would lose their memory: those buffers come and go as without.
void Residency::add(id<MTLBuffer> buffer) {
  if (!set_ || bytes() + buffer.length > device_.recommendedMaxWorkingSetSize) return;
  [(id<MTLResidencySet>)set_ addAllocation:buffer];
  commit();
}

void Residency::remove(id<MTLBuffer> buffer) {
  if (!set_ || !buffer) return;
  [(id<MTLResidencySet>)set_ removeAllocation:buffer];
  commit();
}

void Residency::commit() {
  id<MTLResidencySet> set = set_;
  [set commit];
  [set requestResidency];
  bytes_.store(set.allocatedSize, std::memory_order_relaxed);
}

#else

Residency::Residency(id<MTLDevice> device, id<MTLCommandQueue> queue) : device_(device), queue_(queue) {}
Residency::~Residency() {}
void Residency::add(id<MTLBuffer>) {}
void Residency::remove(id<MTLBuffer>) {}
void Residency::commit() {}

#endif

}  // namespace metal_prefill::metal
