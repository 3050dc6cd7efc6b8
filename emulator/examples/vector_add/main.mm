// Adds two vectors with Metal. The same file runs on a Mac's GPU and, off Apple, on the emulator.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <cstdlib>

static void fail(NSString* step, NSError* error) {
  NSLog(@"%@: %@", step, error ? error.localizedDescription : @"failed");
  std::exit(1);
}

static id<MTLBuffer> new_random_buffer(id<MTLDevice> device, NSUInteger count) {
  id<MTLBuffer> buffer = [device newBufferWithLength:count * sizeof(float)
                                             options:MTLResourceStorageModeShared];
  if (!buffer) fail(@"newBufferWithLength", nil);
  float* values = static_cast<float*>(buffer.contents);
  for (NSUInteger i = 0; i < count; i++)
    values[i] = static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX);
  return buffer;
}

int main() {
  @autoreleasepool {
    const NSUInteger count = 1 << 16;

    id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    if (!device) fail(@"MTLCreateSystemDefaultDevice", nil);

    // A kernel becomes a pipeline, which is compiled for the device, once.
    NSError* error = nil;
    id<MTLLibrary> library = [device newDefaultLibrary];
    id<MTLFunction> function = [library newFunctionWithName:@"add_vectors"];
    if (!function) fail(@"newFunctionWithName", nil);
    id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:function error:&error];
    if (!pipeline) fail(@"newComputePipelineState", error);

    id<MTLBuffer> a = new_random_buffer(device, count);
    id<MTLBuffer> b = new_random_buffer(device, count);
    id<MTLBuffer> sum = [device newBufferWithLength:count * sizeof(float)
                                            options:MTLResourceStorageModeShared];
    if (!sum) fail(@"newBufferWithLength", nil);

    // Commands are written into a command buffer, which the queue runs when it is committed.
    id<MTLCommandQueue> queue = [device newCommandQueue];
    id<MTLCommandBuffer> commands = [queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
    [encoder setComputePipelineState:pipeline];
    [encoder setBuffer:a offset:0 atIndex:0];
    [encoder setBuffer:b offset:0 atIndex:1];
    [encoder setBuffer:sum offset:0 atIndex:2];
    NSUInteger width =
        pipeline.maxTotalThreadsPerThreadgroup < count ? pipeline.maxTotalThreadsPerThreadgroup : count;
    [encoder dispatchThreads:MTLSizeMake(count, 1, 1) threadsPerThreadgroup:MTLSizeMake(width, 1, 1)];
    [encoder endEncoding];
    [commands commit];
    [commands waitUntilCompleted];
    if (commands.status != MTLCommandBufferStatusCompleted) fail(@"command buffer", commands.error);

    const float* x = static_cast<const float*>(a.contents);
    const float* y = static_cast<const float*>(b.contents);
    const float* z = static_cast<const float*>(sum.contents);
    for (NSUInteger i = 0; i < count; i++) {
      if (z[i] != x[i] + y[i])
        fail([NSString stringWithFormat:@"element %lu", static_cast<unsigned long>(i)], nil);
    }
    NSLog(@"%lu sums are right, computed on: %@", static_cast<unsigned long>(count), device.name);
  }
  return 0;
}
