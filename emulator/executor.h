// The interface between the emulated Metal classes and the machine that runs the shaders.
//
// Shaders are compiled ahead of time. Each translation unit registers a ShaderLibrary: its source text (for
// lookups by newLibraryWithSource) and its kernels. An Executor allocates memory and runs the command lists
// of command buffers; cpu/ runs kernels on fibers, cuda/ on an NVIDIA GPU.
//
// The Metal classes check everything that is known when a command is encoded: that bindings are present, of
// the right kind, long enough and aligned, and the sizes of grids and threadgroups. An executor checks the
// rest when the command runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/abi.h"

namespace metal_emulator {

// The only object of a type. Never destroyed, since other objects may use it while the process exits.
template <typename T>
T& the_only() {
  static T* const instance = new T;
  return *instance;
}

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

inline constexpr int kMaxBuffers = 31;  // per kernel, as in Metal
inline constexpr int kMaxThreadgroupArguments = 31;
inline constexpr std::size_t kMaxThreadgroupBytes = 32768;
using abi::kMaxThreads;
inline constexpr std::uint32_t kSimdWidth = abi::kLanes;

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
  bool operator==(const Dim3&) const = default;
  std::uint64_t volume() const { return std::uint64_t{x} * y * z; }
};

using Kernel = abi::Kernel;
using KernelArgument = abi::Argument;
using ShaderLibrary = abi::Library;

inline std::string_view source_of(const ShaderLibrary& library) {
  return {library.source.data(), library.source.size()};
}

// Libraries linked into this binary, in no particular order.
std::vector<const ShaderLibrary*> registered_libraries();
// The library that was compiled from the same source with checks; null if there is none.
const ShaderLibrary* checked_variant(const ShaderLibrary& library);

// A kernel that is ready to run. Executors may derive from it.
struct Pipeline {
  virtual ~Pipeline() = default;
  const ShaderLibrary* library = nullptr;
  const Kernel* kernel = nullptr;
  std::size_t static_threadgroup_bytes = 0;
  std::uint32_t max_threads = kMaxThreads;
};

enum class StorageMode : std::uint8_t { kShared = 0, kPrivate = 2 };

// A buffer: its memory, and its state in the Metal classes. Separate from the Objective-C object, which may
// be freed while command buffers that use the memory run.
class Allocation {
 public:
  virtual ~Allocation() = default;
  virtual void* host() = 0;               // null if the host cannot access it
  virtual bool intact() { return true; }  // false: a write past the end was detected
  // Returns another mapping of the host's memory, numbered from 1, which lives as long as the allocation;
  // null if its pages cannot be mapped twice.
  virtual void* view(std::size_t) { return nullptr; }
  std::size_t bytes = 0;
  std::uint64_t device_address = 0;  // if the executor's device has separate memory

  std::string label;
  StorageMode storage_mode = StorageMode::kShared;
  bool untracked = false;              // MTLHazardTrackingModeUntracked
  void* caller_memory = nullptr;       // of a no-copy buffer
  std::atomic<bool> released = false;  // the object is deallocated
};

// Allocates host memory with a guarded end: an access past it faults (or is reported by AddressSanitizer),
// and intact() checks the bytes between the end and the next alignment boundary. Filled with `fill`. If
// `shared`, it has views, and its pages are shared with forked processes unless they are filled with 0xff.
// Null if out of memory.
std::shared_ptr<Allocation> allocate_guarded(std::size_t bytes, std::uint8_t fill, bool shared);
// Wraps the caller's memory. With `guarded`, host() is a second view of the same pages, followed by a guard,
// if the kernel supports it (shared mappings); otherwise the memory itself.
std::shared_ptr<Allocation> wrap_memory(void* memory, std::size_t bytes, bool guarded);

// Called on the thread and stack of a kernel in place of an instruction that accessed a guard of
// allocate_guarded or wrap_memory. `overrun` counts bytes from the allocation's end. Must not return.
using GuardHandler = void (*)(const Allocation& missed, std::size_t overrun, bool write);
// Sets the handler of the calling thread while it runs kernels; null otherwise.
void set_guard_handler(GuardHandler handler);

// A buffer from an offset on, or the data of setBytes, or nothing.
struct BoundBuffer {
  std::shared_ptr<Allocation> allocation;
  std::size_t offset = 0;
  std::vector<std::byte> bytes;  // of setBytes

  std::size_t length() const { return allocation ? allocation->bytes - offset : bytes.size(); }
};

struct DispatchCommand {
  std::shared_ptr<const Pipeline> pipeline;
  Dim3 grid;                                   // threadgroups
  Dim3 group;                                  // threads per threadgroup
  std::vector<BoundBuffer> buffers;            // by index, without those that the kernel has no argument for
  std::vector<std::size_t> threadgroup_bytes;  // by index
  int number = 0;                              // index in its command buffer, for messages
};

// Formats "kernel 'name', dispatch 3" for messages.
inline std::string describe(const DispatchCommand& command) {
  return std::string("kernel '") + command.pipeline->kernel->name + "', dispatch " +
         std::to_string(command.number);
}

struct CopyCommand {
  BoundBuffer from, to;
  std::size_t bytes = 0;
};

struct FillCommand {
  BoundBuffer to;
  std::size_t bytes = 0;
  std::uint8_t value = 0;
};

struct Command {
  enum class Kind : std::uint8_t { kDispatch, kCopy, kFill };
  Kind kind = Kind::kDispatch;
  bool after_barrier = true;  // false: may overlap the commands since the last barrier (concurrent encoder)
  DispatchCommand dispatch;
  CopyCommand copy;
  FillCommand fill;
};

// Bytes [begin, end) of a binding, counted from the start of its allocation (from the first byte for
// setBytes).
struct ByteRange {
  std::uint64_t begin, end;
};

struct BindingStatistics {
  std::uint64_t bytes_read = 0, bytes_written = 0;  // counted for every thread
  std::vector<ByteRange> read, written;             // sorted and disjoint
};

struct DispatchStatistics {
  std::uint64_t threads = 0, barriers = 0;
  double seconds = 0;                       // on the device, in timed mode
  std::vector<BindingStatistics> bindings;  // by buffer index, in checked mode

  const BindingStatistics& of(int index) const {
    static const BindingStatistics none;
    const auto position = static_cast<std::size_t>(index);
    return position < bindings.size() ? bindings[position] : none;
  }
};

// Seconds of std::chrono::steady_clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Completion {
  std::string error;                           // empty on success; names kernel, dispatch number and binding
  double start_seconds = 0, end_seconds = 0;   // in time of now()
  std::vector<DispatchStatistics> statistics;  // one per dispatch that ran
};

// The two elements of a simdgroup_matrix that a lane holds. Metal's specification leaves this to the GPU.
enum class MatrixLayout : std::uint8_t {
  kApple,        // adjacent in a row, as on Apple's GPUs
  kConsecutive,  // adjacent in a row, in order of the lanes
  kShifted,      // as kConsecutive, starting at the last lane: a row's lanes differ in many bits
  kColumns,      // adjacent in a column
};

struct ExecutorOptions {
  unsigned workers = 0;      // host threads that run threadgroups; 0: one per core
  std::uint64_t seed = 0;    // shuffles the order of threads; 0: in order
  bool checked = false;      // records which bytes each dispatch accesses
  bool fast_errors = false;  // fast::exp and fast::exp2 have the largest error that Metal allows
  MatrixLayout matrix_layout = MatrixLayout::kApple;  // of the CPU executor
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual std::string device_name() const = 0;
  // Time that a thread waiting for commands should poll before it sleeps, since waking up takes long.
  virtual std::chrono::microseconds polling_time() const { return {}; }
  // Takes effect with the next submit.
  virtual void configure(const ExecutorOptions& options) = 0;
  // Null if out of memory. Zeroed if visible to the host, as by Metal; otherwise 0xff (NaN as a float).
  virtual std::shared_ptr<Allocation> allocate(std::size_t bytes, bool host_visible) = 0;
  virtual std::shared_ptr<Allocation> wrap(void* memory, std::size_t bytes) = 0;  // no-copy buffers
  // Throws std::runtime_error if the kernel cannot run.
  virtual std::shared_ptr<const Pipeline> prepare(const ShaderLibrary& library, const Kernel& kernel) = 0;
  // Runs the commands asynchronously, in order of submission. Calls `done` once, on any thread.
  virtual void submit(std::vector<Command> commands, std::function<void(Completion)> done) = 0;
};

std::unique_ptr<Executor> make_cpu_executor();
// Throws std::runtime_error if there is no NVIDIA GPU, or the build has no code for one.
std::unique_ptr<Executor> make_cuda_executor();

}  // namespace metal_emulator
