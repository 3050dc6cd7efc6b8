// Memory that stays resident for the GPU: macOS 15 and later.
#pragma once

#import <Metal/MTLResource.h>

NS_ASSUME_NONNULL_BEGIN

__attribute__((availability(macos, introduced = 15.0)))
@interface MTLResidencySetDescriptor : NSObject
@end

__attribute__((availability(macos, introduced = 15.0)))
@protocol MTLResidencySet<NSObject>
- (void)requestResidency;
- (void)endResidency;
- (void)addAllocation:(id<MTLAllocation>)allocation;
- (void)removeAllocation:(id<MTLAllocation>)allocation;
- (BOOL)containsAllocation:(id<MTLAllocation>)anAllocation;
- (void)commit;  // applies earlier additions and removals
@end

NS_ASSUME_NONNULL_END
