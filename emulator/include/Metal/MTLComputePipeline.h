#pragma once

#import <Metal/MTLBinaryArchive.h>
#import <Metal/MTLLibrary.h>
#import <Metal/MTLTypes.h>

NS_ASSUME_NONNULL_BEGIN

@interface MTLComputePipelineReflection : NSObject
@end

@interface MTLComputePipelineDescriptor : NSObject <NSCopying>
@property(nullable, readwrite, nonatomic, strong) id<MTLFunction> computeFunction;
@property(readwrite, nonatomic) NSUInteger maxTotalThreadsPerThreadgroup;  // 0: the device's maximum
@property(nullable, readwrite, nonatomic, copy) NSArray<id<MTLBinaryArchive>>* binaryArchives;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@end

NS_ASSUME_NONNULL_END
