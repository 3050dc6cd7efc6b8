// Compiled pipelines in a file.
#pragma once

#import <Foundation/Foundation.h>

NS_ASSUME_NONNULL_BEGIN

@class MTLComputePipelineDescriptor;

FOUNDATION_EXPORT NSErrorDomain const MTLBinaryArchiveDomain;

typedef NS_ERROR_ENUM(MTLBinaryArchiveDomain, MTLBinaryArchiveError){
    MTLBinaryArchiveErrorInvalidFile = 1,
    MTLBinaryArchiveErrorCompilationFailure = 3,
    MTLBinaryArchiveErrorInternalError = 4,
};

@interface MTLBinaryArchiveDescriptor : NSObject
@property(nullable, copy, nonatomic, readwrite) NSURL* url;  // nil creates an empty archive
@end

@protocol MTLBinaryArchive <NSObject>
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                            error:(NSError* _Nullable* _Nullable)error;
- (BOOL)serializeToURL:(NSURL*)url error:(NSError* _Nullable* _Nullable)error;
@end

NS_ASSUME_NONNULL_END
