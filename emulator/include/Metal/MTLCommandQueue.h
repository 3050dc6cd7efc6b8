// Queues, command buffers and events.
#pragma once

#import <Metal/MTLCommandEncoder.h>
#import <Metal/MTLResidencySet.h>

NS_ASSUME_NONNULL_BEGIN

@protocol MTLCommandQueue
, MTLCommandBuffer;

typedef NS_ENUM(NSUInteger, MTLCommandBufferStatus) {
  MTLCommandBufferStatusNotEnqueued = 0,
  MTLCommandBufferStatusCommitted = 2,
  MTLCommandBufferStatusCompleted = 4,
  MTLCommandBufferStatusError = 5,
};

FOUNDATION_EXPORT NSErrorDomain const MTLCommandBufferErrorDomain;

typedef NS_ERROR_ENUM(MTLCommandBufferErrorDomain, MTLCommandBufferError){
    MTLCommandBufferErrorInternal = 1,
    MTLCommandBufferErrorTimeout = 2,
};

@protocol MTLCommandBuffer <NSObject>
@property(nullable, copy, atomic) NSString* label;
@property(readonly) CFTimeInterval GPUStartTime;
@property(readonly) CFTimeInterval GPUEndTime;
@property(readonly) MTLCommandBufferStatus status;
@property(nullable, readonly) NSError* error;
- (void)commit;
- (void)waitUntilCompleted;
- (nullable id<MTLBlitCommandEncoder>)blitCommandEncoder;
- (nullable id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (nullable id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)dispatchType;
@end

@protocol MTLCommandQueue <NSObject>
- (nullable id<MTLCommandBuffer>)commandBuffer;
- (nullable id<MTLCommandBuffer>)commandBufferWithUnretainedReferences;
- (void)addResidencySet:(id<MTLResidencySet>)residencySet
    __attribute__((availability(macos, introduced = 15.0)));
- (void)removeResidencySet:(id<MTLResidencySet>)residencySet
    __attribute__((availability(macos, introduced = 15.0)));
@end

NS_ASSUME_NONNULL_END
