#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "waits.h"

extern "C" void* objc_autoreleasePoolPush(void);
extern "C" void objc_autoreleasePoolPop(void* pool);

namespace metal_prefill::metal {

namespace {

// Metal need not track hazards: concurrent command buffers share only memory that none of them writes, and
// the encoder sets the barriers within each.
constexpr MTLResourceOptions kUntracked = MTLResourceHazardTrackingModeUntracked;
constexpr std::size_t kStagingBytes = std::size_t(8) << 20;

// The driver reads this variable when the device is created. With 1, the GPU may take longer to switch
// between programs before macOS ends the work, as long dispatches require.
constexpr const char* kRelaxedTimeout = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT";

// MTLCreateSystemDefaultDevice finds nothing in a program without a window server session.
id<MTLDevice> find_device() {
  constexpr int kUnlessSet = 0;
  setenv(kRelaxedTimeout, "1", kUnlessSet);
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  return device ? device : MTLCopyAllDevices().firstObject;
}

// Metal's compiler and the GPU are unavailable to a forked process whose parent has used them.
void require_unforked() {
  static const pid_t first = getpid();
  if (getpid() != first)
    throw DeviceError(
        "this process was forked from one that uses the GPU, which macOS gives to no forked process; start "
        "processes by 'spawn', or use device='cpu'");
}

// The families that the GPU reports. Numeric, as older headers lack the names of newer families.
std::string families_of(id<MTLDevice> device) {
  constexpr int kNewest = 20;  // Apple's families, with room for future ones
  std::string families;
  const auto add = [&](const std::string& name, long value) {
    if ([device supportsFamily:MTLGPUFamily(value)]) families += (families.empty() ? "" : ", ") + name;
  };
  for (int n = 1; n <= kNewest; ++n) add("Apple" + std::to_string(n), 1000 + n);
  add("Mac2", 2002);
  add("Metal3", 5001);
  add("Metal4", 5002);
  return families.empty() ? "none" : families;
}

// Lets the driver compile on all processors; by default it uses fewer threads.
void compile_concurrently(id<MTLDevice> device) {
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 130300
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunguarded-availability-new"
  if ([(NSObject*)device respondsToSelector:@selector(setShouldMaximizeConcurrentCompilation:)])
    device.shouldMaximizeConcurrentCompilation = YES;
#pragma clang diagnostic pop
#endif
}

// Why the command buffer failed.
std::string failure_of(id<MTLCommandBuffer> commands) {
  NSError* error = commands.error;
  std::string failure = describe(error);
  if (error.code == MTLCommandBufferErrorTimeout) {
    const char* relaxed = std::getenv(kRelaxedTimeout);
    failure += "; macOS ends work that takes too long (" + std::string(kRelaxedTimeout) + " is '" +
               (relaxed ? relaxed : "") + "'; '1' allows more)";
  }
  return failure;
}

// Returns the row of the family. Other GPUs, such as that of a virtual machine on macOS, get the most
// conservative row. The self-test at first contact finds out whether they can run the kernels.
Tuning tuning_of(id<MTLDevice> device) {
  static_assert(MTLGPUFamilyApple7 == 1007);
  for (const Tuning& tuning : kTunings)
    if ([device supportsFamily:MTLGPUFamily(1000 + tuning.family)]) return tuning;
  // On Intel Macs' GPUs with their own memory, barriers do not order dispatches of a concurrent encoder.
  if (device.hasUnifiedMemory) return kTunings.back();
  throw DeviceError("the GPU '" + std::string(device.name.UTF8String) + "' of the families " +
                    families_of(device) +
                    " is not supported: it has memory of its own. Apple Silicon (M1 or later) is needed; use "
                    "device='cpu'");
}

}  // namespace

AutoreleasePool::AutoreleasePool() : pool_(objc_autoreleasePoolPush()) {}

AutoreleasePool::~AutoreleasePool() {
  objc_autoreleasePoolPop(pool_);
}

NSString* to_ns(const std::string& text) {
  return [NSString stringWithUTF8String:text.c_str()];
}

std::string describe(NSError* error) {
  return error ? error.localizedDescription.UTF8String : "no reason given";
}

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value && std::strcmp(value, "0") != 0;
}

bool debug_requested() {
  return is_set("GPU_DEBUG");
}

Device::Device() : device_((require_unforked(), find_device())), debug_(debug_requested()) {
  if (!device_) throw DeviceError("no Metal device was found; use device='cpu'");
  native_ = [device_ supportsFamily:MTLGPUFamilyApple7] && name().find("Paravirtual") == std::string::npos;
  queue_ = [device_ newCommandQueue];
  fence_ = [device_ newFence];
  if (!queue_ || !fence_)
    throw DeviceError("the Metal device '" + name() + "' gave no command queue or no fence");
  tuning_ = tuned_for(tuning_of(device_), name());
}

Device Device::of_engine(const MetalOptions& options) {
  Device device;
  if (device.native_) compile_concurrently(device.device_);
  if (device.tuning_.matmul_tensor) device.no_matmul_tensor_ = options.no_matmul_tensor;
  device.tuning_ = tuned_by(options, device.tuning_);
  return device;
}

Device Device::counting(CallCounters& counters) const {
  Device counted = *this;
  counted.counters_ = &counters;
  return counted;
}

std::string Device::name() const {
  return device_.name.UTF8String;
}

id<MTLBuffer> Device::allocate(const std::string& label, std::size_t bytes, Access access) const {
  const auto fail = [&](const std::string& why) {
    throw DeviceError("cannot allocate " + std::to_string(bytes) + " bytes on the GPU for '" + label +
                      "': " + why);
  };
  if (bytes > device_.maxBufferLength)
    fail("a buffer holds at most " + std::to_string(device_.maxBufferLength));
  const bool shared = access == Access::kHost || debug_;
  id<MTLBuffer> buffer = [device_ newBufferWithLength:bytes
                                              options:kUntracked | (shared ? MTLResourceStorageModeShared
                                                                           : MTLResourceStorageModePrivate)];
  if (!buffer) fail("out of memory");
  buffer.label = to_ns(label);
  if (counters_) ++counters_->allocations;
  return buffer;
}

std::string Device::families() const {
  return families_of(device_);
}

id<MTLCommandBuffer> Device::command_buffer(const std::string& label, References references) const {
  id<MTLCommandBuffer> commands = references == References::kRetained
                                      ? [queue_ commandBuffer]
                                      : [queue_ commandBufferWithUnretainedReferences];
  if (!commands) throw DeviceError("the GPU gave no command buffer for " + label);
  commands.label = to_ns(label);
  return commands;
}

void Device::commit(id<MTLCommandBuffer> commands) const {
  [commands commit];
  if (counters_) ++counters_->command_buffers;
}

void Device::wait(id<MTLCommandBuffer> commands) const {
  wait_for(commands, Interrupts::kIgnored);
  check(commands);
}

void Device::check(id<MTLCommandBuffer> commands) const {
  if (commands.status != MTLCommandBufferStatusCompleted)
    throw DeviceError("the GPU failed in " + std::string(commands.label.UTF8String) + ": " +
                      failure_of(commands));
  if (counters_) counters_->gpu_seconds += commands.GPUEndTime - commands.GPUStartTime;
}

void Device::run(id<MTLCommandBuffer> commands) const {
  commit(commands);
  wait(commands);
}

void Device::transfer(std::span<const Piece> pieces, const void* from, void* to) const {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  if (total == 0) return;
  id<MTLBuffer> staging = allocate("staging", std::min(total, kStagingBytes), Access::kHost);
  auto piece = pieces.begin();
  std::size_t in_piece = 0;
  for (std::size_t done = 0; done < total; done += kStagingBytes) {
    const std::size_t size = std::min(total - done, kStagingBytes);
    if (from) std::memcpy(staging.contents, static_cast<const std::byte*>(from) + done, size);
    id<MTLCommandBuffer> commands = command_buffer(from ? "an upload" : "a download", References::kRetained);
    id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
    for (std::size_t staged = 0; staged < size;) {
      const std::size_t bytes = std::min(size - staged, piece->bytes - in_piece);
      __unsafe_unretained const id<MTLBuffer> buffer = piece->buffer;
      const std::size_t offset = piece->offset + in_piece;
      [blit copyFromBuffer:from ? staging : buffer
               sourceOffset:from ? staged : offset
                   toBuffer:from ? buffer : staging
          destinationOffset:from ? offset : staged
                       size:bytes];
      staged += bytes;
      in_piece += bytes;
      if (in_piece == piece->bytes) {
        ++piece;
        in_piece = 0;
      }
    }
    [blit endEncoding];
    run(commands);
    if (to) std::memcpy(static_cast<std::byte*>(to) + done, staging.contents, size);
  }
}

}  // namespace metal_prefill::metal
