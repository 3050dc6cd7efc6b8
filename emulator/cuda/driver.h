// NVIDIA's driver API, loaded at run time: neither building nor running needs a toolkit. Names and values
// follow the driver's documentation.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace metal_emulator::cuda {

using Result = int;  // CUresult
using Address = unsigned long long;
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using ModuleHandle = struct ModuleHandleTag*;
using Function = struct FunctionHandle*;
using GraphHandle = struct GraphHandleTag*;
using GraphNode = struct GraphNodeHandle*;
using GraphExec = struct GraphExecHandle*;

inline constexpr int kMaxThreadsPerBlock = 0;  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
inline constexpr int kCapabilityMajor = 75;    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kCapabilityMinor = 76;    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
inline constexpr int kJitErrorLog = 5;         // CU_JIT_ERROR_LOG_BUFFER
inline constexpr int kJitErrorLogBytes = 6;    // CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
inline constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kWithTime = 0;       // CU_EVENT_DEFAULT
inline constexpr unsigned kWithoutTime = 2;    // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kMapped = 2;         // CU_MEMHOSTREGISTER_DEVICEMAP
inline constexpr int kSerialization = 6;       // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  union {
    char bytes[64];
    int value;
  };
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

struct KernelNode {  // CUDA_KERNEL_NODE_PARAMS_v2
  Function function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** parameters;
  void** extra = nullptr;
  void* kernel = nullptr;
  Context context = nullptr;
};
static_assert(sizeof(KernelNode) == 72);

inline constexpr unsigned char kWhenLaunched = 1;  // CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
inline constexpr unsigned char kProgrammatic = 1;  // CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC

struct GraphEdge {  // CUgraphEdgeData
  unsigned char from_port = 0, to_port = 0, type = 0;
  unsigned char reserved[5] = {};
};
static_assert(sizeof(GraphEdge) == 8);

// Every function: name and parameters.
#define METAL_EMULATOR_DRIVER_FUNCTIONS(X)                                                     \
  X(cuInit, unsigned flags)                                                                    \
  X(cuGetErrorName, Result result, const char** name)                                          \
  X(cuGetErrorString, Result result, const char** text)                                        \
  X(cuDeviceGet, int* device, int ordinal)                                                     \
  X(cuDeviceGetName, char* name, int length, int device)                                       \
  X(cuDeviceGetAttribute, int* value, int attribute, int device)                               \
  X(cuDevicePrimaryCtxRetain, Context* context, int device)                                    \
  X(cuCtxSetCurrent, Context context)                                                          \
  X(cuMemAlloc_v2, Address* address, std::size_t bytes)                                        \
  X(cuMemFree_v2, Address address)                                                             \
  X(cuMemAllocAsync, Address* address, std::size_t bytes, Stream stream)                       \
  X(cuMemFreeAsync, Address address, Stream stream)                                            \
  X(cuMemHostRegister_v2, void* memory, std::size_t bytes, unsigned flags)                     \
  X(cuMemHostUnregister, void* memory)                                                         \
  X(cuMemHostGetDevicePointer_v2, Address* address, void* memory, unsigned flags)              \
  X(cuMemcpyHtoD_v2, Address to, const void* from, std::size_t bytes)                          \
  X(cuMemcpyHtoDAsync_v2, Address to, const void* from, std::size_t bytes, Stream stream)      \
  X(cuMemcpyAsync, Address to, Address from, std::size_t bytes, Stream stream)                 \
  X(cuMemsetD8_v2, Address to, unsigned char value, std::size_t bytes)                         \
  X(cuMemsetD8Async, Address to, unsigned char value, std::size_t bytes, Stream stream)        \
  X(cuStreamCreate, Stream* stream, unsigned flags)                                            \
  X(cuStreamSynchronize, Stream stream)                                                        \
  X(cuStreamWaitEvent, Stream stream, Event event, unsigned flags)                             \
  X(cuEventCreate, Event* event, unsigned flags)                                               \
  X(cuEventRecord, Event event, Stream stream)                                                 \
  X(cuEventSynchronize, Event event)                                                           \
  X(cuEventElapsedTime, float* milliseconds, Event start, Event end)                           \
  X(cuModuleLoadDataEx, ModuleHandle* module, const void* image, unsigned count, int* options, \
    void** values)                                                                             \
  X(cuModuleGetFunction, Function* function, ModuleHandle module, const char* name)            \
  X(cuFuncGetAttribute, int* value, int attribute, Function function)                          \
  X(cuLaunchKernelEx, const LaunchConfig* config, Function function, void** parameters, void** extra)

// Functions of version 545 and later; null in earlier ones.
#define METAL_EMULATOR_DRIVER_GRAPH_FUNCTIONS(X)                                                           \
  X(cuGraphCreate, GraphHandle* graph, unsigned flags)                                                     \
  X(cuGraphDestroy, GraphHandle graph)                                                                     \
  X(cuGraphAddKernelNode_v2, GraphNode* node, GraphHandle graph, const GraphNode* dependencies,            \
    std::size_t count, const KernelNode* parameters)                                                       \
  X(cuGraphAddDependencies_v2, GraphHandle graph, const GraphNode* from, const GraphNode* to,              \
    const GraphEdge* edges, std::size_t count)                                                             \
  X(cuGraphInstantiateWithFlags, GraphExec* executable, GraphHandle graph, unsigned long long flags)       \
  X(cuGraphExecKernelNodeSetParams_v2, GraphExec executable, GraphNode node, const KernelNode* parameters) \
  X(cuGraphExecDestroy, GraphExec executable)                                                              \
  X(cuGraphLaunch, GraphExec executable, Stream stream)

struct Driver {
#define METAL_EMULATOR_DRIVER_MEMBER(name, ...) Result (*name)(__VA_ARGS__);
  METAL_EMULATOR_DRIVER_FUNCTIONS(METAL_EMULATOR_DRIVER_MEMBER)
  METAL_EMULATOR_DRIVER_GRAPH_FUNCTIONS(METAL_EMULATOR_DRIVER_MEMBER)
#undef METAL_EMULATOR_DRIVER_MEMBER
  bool has_graphs = false;

  // Returns the driver. Throws std::runtime_error if there is none, or if it is too old.
  static const Driver& get();
};

// The driver's description of a result.
std::string describe(Result result);
// Throws std::runtime_error with the call's name unless the result is success.
void check(Result result, const char* call);
#define METAL_EMULATOR_CALL(function, ...) \
  ::metal_emulator::cuda::check(::metal_emulator::cuda::Driver::get().function(__VA_ARGS__), #function)

}  // namespace metal_emulator::cuda
