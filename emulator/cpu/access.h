// Checked mode: shaders call the executor before each memory access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../executor.h"
#include "abi.h"

namespace metal_emulator::cpu {

// A buffer as bound for a kernel: from the bound offset to the end of the buffer.
struct Binding {
  std::uintptr_t begin = 0, end = 0;
  int index = 0;
  const char* name = "";
  bool writable = false;
  std::size_t offset = 0;  // offset of `begin` in its allocation
};

// Collects the bytes that the running kernel reads and writes, by binding. Each host thread has its own
// recorder; their ranges are merged.
class AccessRecorder {
 public:
  // Reports an invalid access and does not return.
  using Report = void (*)(void* context, std::string message);
  // Starts a dispatch. `bindings` are sorted by `begin`.
  void begin(const std::vector<Binding>& bindings, Report report, void* context);
  // Sets threadgroup memory to [begin, end). Only added variables may be accessed.
  void set_threadgroup_memory(std::uintptr_t begin, std::uintptr_t end);
  void add_threadgroup_variable(const char* name, std::uintptr_t begin, std::size_t bytes);
  void access(std::uintptr_t address, std::size_t bytes, bool write, const void* caller);
  // Adds the recorded ranges to `statistics` and clears them.
  void collect(DispatchStatistics& statistics);

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  struct Touched {
    // One bit per byte of a binding. Pages of large bindings mostly take memory only when they are written.
    std::unique_ptr<std::uint64_t[], Free> bits;
    std::size_t first = SIZE_MAX, last = 0;  // words outside [first, last] are zero
    std::uint64_t count = 0;                 // accessed bytes, counting repeated accesses

    void mark(std::size_t offset, std::size_t bytes);
    // Adds the marked ranges of a binding at an offset in its allocation to `all`.
    void add_to(std::vector<ByteRange>& all, std::size_t offset) const;
  };
  struct Variable {
    const char* name;
    std::uintptr_t begin, end;
  };

  const Binding* find(std::uintptr_t address, std::size_t bytes);
  bool is_meant_for_buffer(std::uintptr_t address) const;
  [[noreturn]] void report_outside(std::uintptr_t address, std::size_t bytes, bool write, const void* caller);

  const std::vector<Binding>* bindings_ = nullptr;
  // The binding that `find` last returned, and its end or the next one's beginning, whichever comes first.
  const Binding* last_ = nullptr;
  std::uintptr_t last_end_ = 0;
  std::vector<Touched> read_, written_;  // by index in bindings_
  std::vector<Variable> variables_;
  std::uintptr_t arena_begin_ = 0, arena_end_ = 0;
  Report report_ = nullptr;
  void* context_ = nullptr;
};

// The recorder of the threadgroup that a host thread runs. Stored after its Worker, so that kernels find it
// from their stack pointer, which is faster than a thread-local variable.
inline AccessRecorder*& recorder_of(abi::Worker& worker) {
  return *reinterpret_cast<AccessRecorder**>(&worker + 1);
}
void set_recorder(abi::Worker& worker, AccessRecorder* recorder);  // null: accesses are not recorded

// Returns "file:line" of an instruction if debug information and a symbolizer are available, otherwise the
// module and offset.
std::string source_location(const void* instruction);

}  // namespace metal_emulator::cpu
