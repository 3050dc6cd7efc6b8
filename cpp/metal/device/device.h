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

// The host's access to a buffer. The GPU has access to all.
enum class Access {
  kGpu,   // none: Private, or Shared when debugging
  kHost,  // reads and writes: Shared
};

// Whether a command buffer retains its buffers. Metal does so at each dispatch, which takes time.
enum class References { kRetained, kUnretained };

// True when the environment variable is set to anything but 0.
bool is_set(const char* variable);
// True when GPU_DEBUG is set: every buffer can then be read on the host.
bool debug_requested();

class Device {
 public:
  // Throws DeviceError if the GPU has memory of its own.
  Device();
  // The device of an engine. From then on the GPU's driver compiles on any number of threads.
  static Device of_engine(const MetalOptions& options);

  // Returns the same device, which counts allocations and commands in `counters` and must not outlive it.
  Device counting(CallCounters& counters) const;

  id<MTLDevice> mtl() const { return device_; }
  id<MTLCommandQueue> queue() const { return queue_; }
  const Tuning& tuning() const { return tuning_; }
  // Whether the GPU is of Apple's seventh family or later and not paravirtualized by macOS. Other GPUs get no
  // no-copy buffers, from which they read stale data, no binary archives, on which they abort, no residency
  // sets, on which Metal's debug layer asserts, and no request for concurrent compilation.
  bool is_native() const { return native_; }
  std::string name() const;
  std::string families() const;  // such as Apple7, Metal3
  // Why a GPU does not use its matrix units; empty if it uses them, or has none.
  const std::string& no_matmul_tensor() const { return no_matmul_tensor_; }

  // Throws DeviceError naming the buffer and its size.
  id<MTLBuffer> allocate(const std::string& label, std::size_t bytes, Access access) const;

  // With kUnretained, the caller keeps the buffers until the command buffer has completed.
  id<MTLCommandBuffer> command_buffer(const std::string& label, References references) const;
  // Orders encoders of different command buffers, which Metal does not do for untracked buffers.
  id<MTLFence> fence() const { return fence_; }
  void commit(id<MTLCommandBuffer> commands) const;
  // Throws DeviceError with the label and Metal's message if the GPU failed.
  void wait(id<MTLCommandBuffer> commands) const;
  void check(id<MTLCommandBuffer> commands) const;  // the same for a completed one
  void run(id<MTLCommandBuffer> commands) const;    // commits and waits
  void count_dispatch() const {
    if (counters_) ++counters_->dispatches;
  }

  // Copies between contiguous memory of the host and pieces of any buffers.
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

// The buffer of a view made by view_of(). The pointer is valid as long as the buffer's owner.
inline id<MTLBuffer> buffer_of(const View& view) {
  return (__bridge id<MTLBuffer>)view.buffer;
}
inline View view_of(id<MTLBuffer> buffer, BufferName name, std::size_t offset = 0) {
  return {(__bridge void*)buffer, offset, name};
}

}  // namespace metal_prefill::metal
