// The GPU: device, queue, buffers by storage mode, and command buffers that report their errors.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <cstdint>
#include <span>
#include <string>

#include "../../engine/engine.h"
#include "../plan/tuning.h"
#include "../plan/view.h"

namespace metal_prefill::metal {

// An autorelease pool that is drained when the scope ends. Unlike @autoreleasepool it is also drained when a
// C++ exception leaves the scope.
class AutoreleasePool {
 public:
  AutoreleasePool();
  ~AutoreleasePool();
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  void* pool_;
};

NSString* to_ns(const std::string& text);
std::string describe(NSError* error);

// Access to a buffer besides that of the GPU.
enum class Access {
  kGpu,   // only the GPU: Private, or Shared when debugging
  kHost,  // the host: Shared
};

// Whether a command buffer keeps the buffers that it uses. Metal does that for each dispatch, which costs
// time.
enum class References { kRetained, kUnretained };

// True when the environment variable is set to anything but 0.
bool is_set(const char* variable);
// True when METAL_PREFILL_DEBUG or GPU_DEBUG is set: every buffer can then be read on the host.
bool debug_requested();

class Device {
 public:
  // Throws DeviceError without a GPU of Apple's seventh family or later, or one that passes the trial.
  Device();
  // The same for an engine: matrix units are used if the GPU has them and they pass a trial, which compiles
  // kernels. From here on the GPU's driver compiles on any number of threads.
  static Device of_engine(const MetalOptions& options);

  // The same device, with its allocations and commands counted in `counters`, which must outlive it.
  Device counting(CallCounters& counters) const;

  id<MTLDevice> mtl() const { return device_; }
  id<MTLCommandQueue> queue() const { return queue_; }
  const Tuning& tuning() const { return tuning_; }
  // Whether the GPU is of Apple's seventh family or later and not paravirtualized by macOS. Other GPUs are
  // not given no-copy buffers, from which they read stale data, binary archives, on which they abort,
  // residency sets, on which Metal's debug layer asserts, or a request for concurrent compilation.
  bool is_native() const { return native_; }
  std::string name() const;
  std::string families() const;  // such as Apple7, Metal3
  // Why a GPU does not use its matrix units; empty if it uses them, or has none.
  const std::string& no_matmul_tensor() const { return no_matmul_tensor_; }

  // Throws DeviceError naming the buffer and its size.
  id<MTLBuffer> allocate(const std::string& label, std::size_t bytes, Access access) const;

  // Unless it keeps the buffers that it uses, the caller does until it has completed.
  id<MTLCommandBuffer> command_buffer(const std::string& label, References references) const;
  // Orders encoders of different command buffers, which Metal does not for untracked buffers.
  id<MTLFence> fence() const { return fence_; }
  void commit(id<MTLCommandBuffer> commands) const;
  // Throws DeviceError with the label and Metal's message when the GPU failed.
  void wait(id<MTLCommandBuffer> commands) const;
  void check(id<MTLCommandBuffer> commands) const;  // the same for one that has completed
  void run(id<MTLCommandBuffer> commands) const;    // commits and waits
  void count_dispatch() const {
    if (counters_) ++counters_->dispatches;
  }

  // Copies between consecutive pieces on the host and pieces of any buffers.
  struct Piece {
    __unsafe_unretained id<MTLBuffer> buffer;
    std::size_t offset, bytes;
  };
  void upload(std::span<const Piece> to, const void* from) const { transfer(to, from, nullptr); }
  void download(std::span<const Piece> from, void* to) const { transfer(from, nullptr, to); }

 private:
  void transfer(std::span<const Piece> pieces, const void* from, void* to) const;

  id<MTLDevice> device_;
  id<MTLCommandQueue> queue_;
  id<MTLFence> fence_;
  bool debug_;
  bool native_ = false;
  Tuning tuning_;
  std::string no_matmul_tensor_;
  CallCounters* counters_ = nullptr;  // null: nothing is counted
};

// The buffer of a view that was made from one. The pointer is valid as long as the buffer's owner.
inline id<MTLBuffer> buffer_of(const View& view) {
  return (__bridge id<MTLBuffer>)view.buffer;
}
inline View view_of(id<MTLBuffer> buffer, BufferName name, std::size_t offset = 0) {
  return {(__bridge void*)buffer, offset, name};
}

}  // namespace metal_prefill::metal
