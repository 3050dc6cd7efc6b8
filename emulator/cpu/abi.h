// Shared by compiled shaders and the CPU executor. Only plain types: headers of the standard library would
// add global functions to the overload sets of a shader.
//
// The executor runs each thread of a threadgroup on a fiber. All fibers of a host thread have their stacks in
// one region that is aligned to its size and begins with a Worker. So a shader finds its Worker, Fiber and
// Simdgroup from its stack pointer, without thread-local storage or calls.
#pragma once

// METAL_EMULATOR_ASAN and METAL_EMULATOR_TSAN are 1 in builds with AddressSanitizer or ThreadSanitizer;
// shaders and executor must agree.
namespace metal_emulator::abi {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;
static_assert(sizeof(u64) == 8, "an LP64 system");

inline constexpr u32 kLanes = 32;         // threads per simdgroup
inline constexpr u32 kMaxThreads = 1024;  // per threadgroup
#if METAL_EMULATOR_ASAN || METAL_EMULATOR_TSAN
inline constexpr u64 kStackShift = 18;  // sanitizers pad every variable
#else
inline constexpr u64 kStackShift = 16;
#endif
inline constexpr u64 kStackBytes = u64{1} << kStackShift;
inline constexpr u64 kRegionBytes = 2 * kMaxThreads * kStackBytes;  // Worker, then stacks in the upper half

struct Vec3 {
  u32 x, y, z;
};

// The values from which a thread's built-in arguments are computed.
struct Invocation {
  void* const* buffers;      // by index
  void* const* threadgroup;  // by index
  Vec3 thread_position_in_grid, threads_per_grid;
  Vec3 threadgroup_position_in_grid, threadgroups_per_grid;
  Vec3 threads_per_threadgroup;
  u32 thread_index_in_threadgroup;
};

// A line of a shader's source.
struct Place {
  const char* file;
  u32 line;
};

struct Simdgroup;

// An operation of the threads of a simdgroup. When all have arrived, `execute` computes the outputs of the
// given lanes from their inputs. It returns -1, or a lane whose argument is out of range.
struct Operation {
  const char* name;
  int (*execute)(Simdgroup& simdgroup, u32 lanes);
};

// A matrix product that some or all lanes of a simdgroup have requested. Lanes do not wait for it: they
// continue, and the product is computed before any of them waits for anything or reads its result.
struct alignas(64) MatrixProduct {
  float a[64], b[64], c[64];  // operands, row-major; c is used if `addend` is negative
  void* targets[kLanes];      // per lane, the simdgroup_matrix for the result; null: no longer needed
  int addend;                 // queued product that is added; -1: c
  u32 line;
  const char* file;
  u32 lanes;   // lanes that have requested it
  u8 differs;  // whether lanes requested different products
};
struct MatrixQueue {
  static constexpr u32 kCapacity = 32;
  MatrixProduct products[kCapacity];
  u8 count[kLanes];  // per lane, the number of requested products
  // Computes all products and empties the queue. Returns -1, or the index of a product that not all lanes
  // have requested.
  int (*run)(MatrixQueue& queue);
};

// Exchange area of 32 threads. Inputs are read when the last thread arrives, and outputs before a thread
// arrives at the next operation, so that one of each suffices.
struct alignas(64) Simdgroup {
  u64 in[kLanes][2];
  u64 out[kLanes][2];
  u32 argument[kLanes];
  MatrixQueue* queue;
  // Sets of lanes. A lane is active until it returns. Active lanes that are not ready wait: for an operation
  // (`waiting`) or at a threadgroup barrier.
  u32 active, ready, fresh, waiting;
};

// A stack and the thread that runs on it.
struct alignas(64) Fiber {
  void* stack_pointer;  // while suspended
  Simdgroup* simdgroup;
  u32 thread;  // index in the threadgroup
  u32 lane;
};

// At the base of each region. The executor that runs the shader provides the functions.
struct Worker {
  // Waits for the other threads, then runs the operation.
  void (*arrive)(Worker& worker, Fiber& fiber, const Operation& operation, Place place);
  void (*threadgroup_barrier)(Worker& worker, Fiber& fiber, Place place);
  void (*simdgroup_barrier)(Worker& worker, Fiber& fiber, Place place);
  // Executes an operation of all threads of the threadgroup, which has `simdgroups` simdgroups. Waits for the
  // simdgroup; the next barrier, or the end, checks that all simdgroups have executed the same ones.
  void (*together)(Worker& worker, Fiber& fiber, const Operation& operation, u32 simdgroups, Place place);
  // Reports errors of tensor operations and ends the threadgroup.
  void (*wrong_size)(Worker& worker, const char* what, int columns, int rows, int wanted_columns,
                     int wanted_rows, Place place);
  void (*unwritten)(Worker& worker, const char* what, Place place);
  u8* threadgroup_memory;       // for the variables that the running kernel declares
  u32 fast_errors;              // 1: fast functions have the largest allowed errors
  u8 matrix_places[kLanes][2];  // per lane, row-major indices of its two elements of a simdgroup_matrix
  Fiber fibers[kMaxThreads];
};

inline __attribute__((always_inline)) u64 stack_pointer() {
  u64 value;
#if defined(__x86_64__)
  asm("movq %%rsp, %0" : "=r"(value));
#elif defined(__aarch64__)
  asm("mov %0, sp" : "=r"(value));
#else
#error "the fiber executor knows x86-64 and AArch64"
#endif
  return value;
}
inline __attribute__((always_inline)) Worker& current_worker() {
  return *reinterpret_cast<Worker*>(stack_pointer() & ~(kRegionBytes - 1));
}
inline __attribute__((always_inline)) Fiber& current_fiber() {
  const u64 stack = stack_pointer();
  Worker& worker = *reinterpret_cast<Worker*>(stack & ~(kRegionBytes - 1));
  return worker.fibers[(stack >> kStackShift) & (kMaxThreads - 1)];
}

// Threadgroup variables of one kernel. Each receives the next aligned offset when the program starts.
struct ThreadgroupLayout {
  static constexpr u32 kMaxVariables = 64;
  static constexpr u32 kAlignment = 64;
  struct Variable {
    const char* name;
    u64 offset, bytes;
  };
  Variable variables[kMaxVariables];
  u32 count;
  u64 bytes;     // end offset of the last variable
  u64 declared;  // sum of the variables' sizes, each rounded up to 16 bytes

  u64 add(const char* name, u64 size) {
    if (count == kMaxVariables) __builtin_trap();
    const u64 offset =
        (bytes + kAlignment - 1) / kAlignment * kAlignment + (count ? kAlignment : 0);  // leaves a gap
    variables[count++] = {name, offset, size};
    bytes = offset + size;
    declared += (size + 15) / 16 * 16;
    return offset;
  }
};

// A constant array.
template <class T>
struct Span {
  const T* first;
  u64 count;

  constexpr const T* data() const { return first; }
  constexpr u64 size() const { return count; }
  constexpr const T* begin() const { return first; }
  constexpr const T* end() const { return first + count; }
};

// A buffer or threadgroup argument of a kernel. Built-in arguments, such as thread positions, are not listed.
struct Argument {
  enum class Space : u8 { kDevice, kConstant, kThreadgroup };
  Space space;
  int index;
  const char* name;
  bool writable;      // device memory without const
  u64 element_bytes;  // of the pointed-to or referenced type
  u64 element_align;
  bool reference;  // references need at least element_bytes
};

struct Kernel {
  const char* name;
  Span<Argument> arguments;
  u32 max_threads;  // 0: no limit in the source
  void (*call)(const Invocation& invocation);
  const ThreadgroupLayout* layout;
  const char* selected_by;  // macro that restores the kernel if the guard omits kernels; null: always present
};

struct Library {
  const char* name;   // file name of the .metal source
  Span<char> source;  // the exact text for newLibraryWithSource
  Span<Kernel> kernels;
  bool checked;  // every memory access calls the executor
  // Macros that the options of newLibraryWithSource may define as 1: the guard omits kernels, a selector
  // restores those that it selects.
  const char* guard;  // null if there is none
  Span<const char*> selectors;
  u32 metal_version;  // value of __METAL_VERSION__ that it was compiled with: 300 is Metal 3.0
};

}  // namespace metal_emulator::abi

// Called by compiled shaders before main.
extern "C" __attribute__((visibility("hidden"))) void metal_emulator_register(
    const metal_emulator::abi::Library* library);
