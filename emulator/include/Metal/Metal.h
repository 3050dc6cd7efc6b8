// The compute part of Metal, with Apple's names, types, values and nullability.
#pragma once

#import <Metal/MTLBinaryArchive.h>
#import <Metal/MTLBuffer.h>
#import <Metal/MTLCommandEncoder.h>
#import <Metal/MTLCommandQueue.h>
#import <Metal/MTLComputePipeline.h>
#import <Metal/MTLDevice.h>
#import <Metal/MTLFence.h>
#import <Metal/MTLLibrary.h>
#import <Metal/MTLResidencySet.h>
#import <Metal/MTLResource.h>
#import <Metal/MTLTypes.h>
