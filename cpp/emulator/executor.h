// What stands between the emulated Metal classes and the machine that runs the shaders.
//
// Shaders are compiled ahead of time. Each translation unit registers a ShaderLibrary: its source text (for lookups
// by newLibraryWithSource), its kernels and its function constants. An Executor allocates memory and runs the command
// lists that command buffers hand over; cpu/ runs kernels on fibers, cuda/ on an NVIDIA GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace metal_emulator {

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
};

enum class ConstantType : std::uint8_t { kBool, kChar, kUChar, kShort, kUShort, kInt, kUInt, kLong, kULong, kHalf, kFloat };

struct FunctionConstant {
  const char* name;
  int index;
  ConstantType type;
};

// A buffer or threadgroup argument of a kernel; built-in arguments (thread positions and the like) are not listed.
struct KernelArgument {
  enum class Kind : std::uint8_t { kBuffer, kThreadgroup };
  Kind kind;
  int index;
  const char* name;
  bool writable;             // device memory without const
  std::size_t element_bytes;  // of the pointed-to or referenced type
  std::size_t element_align;
  bool reference;            // a reference needs at least element_bytes
  int function_constant;     // index of the constant that must be true for the argument to exist; -1: always exists
};

struct Kernel {
  const char* name;
  const char* file;
  std::span<const KernelArgument> arguments;
  const void* entry;  // meaning belongs to the executor
};

struct ShaderLibrary {
  const char* name;            // file name of the .metal source
  std::string_view source;     // the exact text that newLibraryWithSource must be given
  std::span<const Kernel> kernels;
  std::span<const FunctionConstant> constants;
};

// Libraries linked into this binary, in no particular order.
void register_library(const ShaderLibrary* library);
std::span<const ShaderLibrary* const> registered_libraries();

// Values of function constants by index; sorted, at most one of an index.
struct ConstantValue {
  int index;
  ConstantType type;
  std::uint64_t bits;
};
using Specialization = std::vector<ConstantValue>;

// Memory that a buffer stands on.
class Allocation {
 public:
  virtual ~Allocation() = default;
  virtual void* host() = 0;  // null where the host cannot reach it
  std::size_t bytes = 0;
};

struct BoundBuffer {
  std::shared_ptr<Allocation> allocation;  // null: `bytes` holds the contents (setBytes), or nothing is bound
  std::size_t offset = 0;
  std::vector<std::byte> bytes;
};

struct DispatchCommand {
  const ShaderLibrary* library = nullptr;
  const Kernel* kernel = nullptr;
  const Specialization* constants = nullptr;
  Dim3 grid;          // threadgroups; with `threads` set, rounded up
  Dim3 group;         // threads per threadgroup
  Dim3 threads;       // dispatchThreads: exact grid in threads; 0,0,0 for dispatchThreadgroups
  std::vector<BoundBuffer> buffers;          // by index
  std::vector<std::size_t> threadgroup_bytes;  // by index
  int number = 0;     // in its command buffer, for messages
};

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
  enum class Kind : std::uint8_t { kDispatch, kCopy, kFill } kind;
  bool after_barrier = true;  // false: may overlap the commands since the last barrier (concurrent encoder)
  DispatchCommand dispatch;
  CopyCommand copy;
  FillCommand fill;
};

struct DispatchStatistics {
  std::uint64_t threads = 0, barriers = 0;
  std::vector<std::uint64_t> bytes_read, bytes_written;  // by buffer index; counted where the executor can
};

struct Completion {
  std::string error;  // empty: all went well
  double start_seconds = 0, end_seconds = 0;
  std::vector<DispatchStatistics> statistics;
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual std::string device_name() const = 0;
  virtual std::shared_ptr<Allocation> allocate(std::size_t bytes, bool host_visible) = 0;  // null: out of memory
  virtual std::shared_ptr<Allocation> wrap(void* memory, std::size_t bytes) = 0;          // no-copy buffers
  // Static threadgroup memory and thread limit of a specialized kernel; an empty error means that it can run.
  struct PipelineInfo {
    std::size_t static_threadgroup_bytes = 0;
    std::uint32_t max_threads = 1024;
    std::string error;
  };
  virtual PipelineInfo prepare(const ShaderLibrary& library, const Kernel& kernel, const Specialization& constants) = 0;
  // Runs the commands in order of submission, asynchronously; `done` is called once from any thread.
  virtual void submit(std::vector<Command> commands, std::function<void(Completion)> done) = 0;
};

std::unique_ptr<Executor> make_cpu_executor();

}  // namespace metal_emulator
