#if __METAL_VERSION__ < 400
#error "MetalPerformancePrimitives.h needs Metal 4.0"
#endif
#pragma metal_emulator include MetalPerformancePrimitives.h
