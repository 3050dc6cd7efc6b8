// The Objective-C classes that implement Metal's protocols. As every token is encoded, encoders read members
// of other objects instead of sending messages to them.
#pragma once

#import <Metal/Metal.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "encoded.h"
#include "foundation.h"
#include "state.h"

extern "C" {
Class object_getClass(id object);
bool metal_emulator_retain_if_alive(void* object);
}

namespace metal_emulator {

std::string device_name();
std::string checksum_of(std::string_view text);
NSError* make_error(NSErrorDomain domain, NSInteger code, const std::string& message);
// Sets the error of a call if the caller requests it, and returns the call's result.
inline std::nullptr_t fail(NSError** error, NSErrorDomain domain, NSInteger code,
                           const std::string& message) {
  if (error) *error = make_error(domain, code, message);
  return nil;
}
// Returns the object that implements a protocol. Throws ValidationError if it is not the emulator's.
template <typename T>
T* checked_cast(id object, const char* call) {
  static const Class exact = [T class];
  if (object && object_getClass(object) == exact) return static_cast<T*>(object);
  if (![object isKindOfClass:[T class]])
    throw ValidationError(std::string(call) + ": nil or a foreign object");
  return static_cast<T*>(object);
}
// Throws ValidationError after endEncoding.
inline void require_open(bool ended, const char* call) {
  if (ended) throw ValidationError(std::string(call) + ": the encoder has ended encoding");
}

}  // namespace metal_emulator

@interface EmulatorDevice : NSObject <MTLDevice>
@end

@interface EmulatorFence : NSObject <MTLFence>
@end

@interface EmulatorBuffer : NSObject <MTLBuffer> {
 @package
  std::shared_ptr<metal_emulator::Allocation> _memory;
}
- (instancetype)initWithMemory:(std::shared_ptr<metal_emulator::Allocation>)memory
                       options:(MTLResourceOptions)options
                   deallocator:(void (^)(void* pointer, NSUInteger length))deallocator;
@end

@interface EmulatorLibrary : NSObject <MTLLibrary>
- (instancetype)initWithLibrary:(const metal_emulator::ShaderLibrary&)library
                         macros:(std::set<std::string>)macros;
@end

@interface EmulatorFunction : NSObject <MTLFunction>
- (instancetype)initWithLibrary:(const metal_emulator::ShaderLibrary&)library
                         kernel:(const metal_emulator::Kernel&)kernel;
// Throws std::runtime_error if the kernel cannot run.
- (std::shared_ptr<const metal_emulator::Pipeline>)prepare;
// One line that identifies the code on this device.
- (std::string)identity;
@end

@interface EmulatorComputePipeline : NSObject <MTLComputePipelineState> {
 @package
  std::shared_ptr<const metal_emulator::Pipeline> _pipeline;
  NSUInteger _maxThreads;
}
- (instancetype)initWithPipeline:(std::shared_ptr<const metal_emulator::Pipeline>)pipeline
                      maxThreads:(NSUInteger)maxThreads;
@end

@interface EmulatorBinaryArchive : NSObject <MTLBinaryArchive>
// Reads the contents of a file. Returns the reason if it cannot be read, else an empty string.
- (std::string)load:(const std::string&)path;
- (BOOL)has:(const std::string&)identity;
@end

@interface EmulatorResidencySet : NSObject <MTLResidencySet>
// Called by a command buffer: the memory becomes resident again if its residency had lapsed.
- (void)use;
@end

@class EmulatorCommandBuffer;

@interface EmulatorCommandQueue : NSObject <MTLCommandQueue>
- (void)submit:(EmulatorCommandBuffer*)commandBuffer;
// Returns the number of earlier command buffers that the host has not seen completed.
- (std::size_t)committed:(EmulatorCommandBuffer*)commandBuffer;
// Marks it and earlier ones as seen completed by the host. Returns false if they already were.
- (BOOL)observe:(EmulatorCommandBuffer*)commandBuffer;
- (void)commandBufferFinished;
- (void)commandBufferDropped;  // deallocated without a commit
@end

@interface EmulatorCommandBuffer : NSObject <MTLCommandBuffer>
- (instancetype)initWithQueue:(EmulatorCommandQueue*)queue retainedReferences:(BOOL)retained;
- (BOOL)retainedReferences;
- (void)submit;
// Called by encoders.
- (void)encode:(metal_emulator::Command)command;
- (void)waitForFence:(id<MTLFence>)fence;
- (void)updateFence:(id<MTLFence>)fence;
- (int)nextDispatch;
- (void)retainUntilCompleted:(id)object;
- (void)encoderEnded:(BOOL)properly;
@end

@interface EmulatorEncoder : NSObject <MTLCommandEncoder> {
 @protected
  EmulatorCommandBuffer* _commandBuffer;
  BOOL _ended;
}
- (instancetype)initWithCommandBuffer:(EmulatorCommandBuffer*)commandBuffer;
- (void)updateFence:(id<MTLFence>)fence;
- (void)waitForFence:(id<MTLFence>)fence;
@end

@interface EmulatorComputeEncoder : EmulatorEncoder <MTLComputeCommandEncoder>
- (instancetype)initWithCommandBuffer:(EmulatorCommandBuffer*)commandBuffer
                         dispatchType:(MTLDispatchType)type;
@end

@interface EmulatorBlitEncoder : EmulatorEncoder <MTLBlitCommandEncoder>
@end
