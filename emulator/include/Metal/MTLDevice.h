#pragma once

#import <Metal/MTLCommandQueue.h>
#import <Metal/MTLLibrary.h>

NS_ASSUME_NONNULL_BEGIN

typedef NS_ENUM(NSInteger, MTLGPUFamily) {
  MTLGPUFamilyApple1 = 1001,
  MTLGPUFamilyApple7 = 1007,
  MTLGPUFamilyApple9 = 1009,
  MTLGPUFamilyMac2 = 2002,
  MTLGPUFamilyMetal3 = 5001,
};

typedef NS_OPTIONS(NSUInteger, MTLPipelineOption) {
  MTLPipelineOptionNone = 0,
  MTLPipelineOptionFailOnBinaryArchiveMiss = 1 << 2,
};

typedef void (^MTLNewLibraryCompletionHandler)(id<MTLLibrary> _Nullable library, NSError* _Nullable error);

@class MTLBinaryArchiveDescriptor;
@class MTLResidencySetDescriptor;
@protocol MTLBinaryArchive;
@protocol MTLResidencySet;

@protocol MTLDevice <NSObject>
@property(readonly) NSString* name;
@property(readonly) uint64_t registryID;
@property(readonly) BOOL hasUnifiedMemory;
@property(readonly) uint64_t recommendedMaxWorkingSetSize;
@property(readonly) NSUInteger maxBufferLength;
@property BOOL shouldMaximizeConcurrentCompilation __attribute__((availability(macos, introduced=13.3)));
- (BOOL)supportsFamily:(MTLGPUFamily)gpuFamily;

- (nullable id<MTLCommandQueue>)newCommandQueue;

- (nullable id<MTLFence>)newFence;
- (nullable id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (nullable id<MTLBuffer>)newBufferWithBytes:(const void*)pointer
                                      length:(NSUInteger)length
                                     options:(MTLResourceOptions)options;
- (nullable id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                            length:(NSUInteger)length
                                           options:(MTLResourceOptions)options
                                       deallocator:
                                           (void (^_Nullable)(void* pointer, NSUInteger length))deallocator;

- (nullable id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError* _Nullable* _Nullable)error;
- (void)newLibraryWithSource:(NSString*)source
                     options:(nullable MTLCompileOptions*)options
           completionHandler:(MTLNewLibraryCompletionHandler)completionHandler;

- (void)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                      options:(MTLPipelineOption)options
                            completionHandler:
                                (void (^)(id<MTLComputePipelineState> _Nullable computePipelineState,
                                          MTLComputePipelineReflection* _Nullable reflection,
                                          NSError* _Nullable error))completionHandler;
- (nullable id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor
                                                          error:(NSError* _Nullable* _Nullable)error;
- (nullable id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)desc
                                                        error:(NSError* _Nullable* _Nullable)error
    __attribute__((availability(macos, introduced = 15.0)));
@end

FOUNDATION_EXPORT id<MTLDevice> _Nullable MTLCreateSystemDefaultDevice(void) NS_RETURNS_RETAINED;
FOUNDATION_EXPORT NSArray<id<MTLDevice>>* MTLCopyAllDevices(void) NS_RETURNS_RETAINED;

NS_ASSUME_NONNULL_END
