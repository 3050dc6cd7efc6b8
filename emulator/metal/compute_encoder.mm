#include <algorithm>
#include <array>
#include <cstring>

#include "classes.h"
#include "hazards.h"
#include "validation.h"

using namespace metal_emulator;

namespace {

constexpr std::size_t kMaxSetBytes = 4096;
constexpr std::size_t kThreadgroupLengthUnit = 16;

Dim3 to_dim3(MTLSize size) {
  return {static_cast<std::uint32_t>(size.width), static_cast<std::uint32_t>(size.height),
          static_cast<std::uint32_t>(size.depth)};
}

void check_index(const char* call, NSUInteger index, int limit) {
  if (index < static_cast<NSUInteger>(limit)) return;
  throw ValidationError(std::string(call) + ": index " + std::to_string(index) + " is not below " +
                        std::to_string(limit));
}

// Stores the data of setBytes in memory with a guarded end, like any buffer, for checked mode.
void guard_bytes(BoundBuffer& bound) {
  if (bound.bytes.empty()) return;
  auto memory = State::get().executor().allocate(bound.bytes.size(), true);
  if (!memory || !memory->host()) return;
  std::memcpy(memory->host(), bound.bytes.data(), bound.bytes.size());
  bound = {std::move(memory), 0, {}};
}

}  // namespace

@implementation EmulatorComputeEncoder {
  MTLDispatchType _dispatchType;
  EmulatorComputePipeline* _pipeline;
  std::array<BoundBuffer, kMaxBuffers> _bindings;
  std::array<id, kMaxBuffers> _objects;  // the bound buffers, retained when used
  std::array<std::size_t, kMaxThreadgroupArguments> _threadgroupLengths;
  HazardTracker _hazards;
  BOOL _barrier;  // whether a barrier was encoded since the last dispatch, or nothing was dispatched yet
  BOOL _retains;  // whether the command buffer retains its buffers
}

- (instancetype)initWithCommandBuffer:(EmulatorCommandBuffer*)commandBuffer
                         dispatchType:(MTLDispatchType)type {
  if ((self = [super initWithCommandBuffer:commandBuffer])) {
    _dispatchType = type;
    _barrier = YES;
    _retains = commandBuffer.retainedReferences;
  }
  return self;
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  require_open(_ended, "setComputePipelineState");
  _pipeline = checked_cast<EmulatorComputePipeline>(pipeline, "setComputePipelineState");
}

- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  require_open(_ended, "setBytes");
  check_index("setBytes", index, kMaxBuffers);
  if (!bytes || length == 0) throw ValidationError("setBytes: no bytes at index " + std::to_string(index));
  if (length > kMaxSetBytes) {
    throw ValidationError("setBytes: " + std::to_string(length) + " bytes at index " + std::to_string(index) +
                          " exceed the limit of " + std::to_string(kMaxSetBytes));
  }
  const auto* first = static_cast<const std::byte*>(bytes);
  BoundBuffer& binding = _bindings[index];
  binding.allocation = nullptr;
  binding.offset = 0;
  binding.bytes.assign(first, first + length);  // reuses the memory from earlier dispatches
  _objects[index] = nil;
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  require_open(_ended, "setBuffer");
  check_index("setBuffer", index, kMaxBuffers);
  if (!buffer) {
    _bindings[index] = {};
    _objects[index] = nil;
    return;
  }
  const auto& memory = checked_cast<EmulatorBuffer>(buffer, "setBuffer")->_memory;
  if (offset >= memory->bytes) {
    throw ValidationError("setBuffer: offset " + std::to_string(offset) + " at index " +
                          std::to_string(index) + " lies outside the buffer of " +
                          std::to_string(memory->bytes) + " bytes");
  }
  BoundBuffer& binding = _bindings[index];
  if (binding.allocation != memory) binding.allocation = memory;
  binding.offset = offset;
  binding.bytes.clear();
  _objects[index] = _retains ? buffer : nil;
}

- (void)setBuffers:(const id<MTLBuffer>[])buffers
           offsets:(const NSUInteger[])offsets
         withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; i++) {
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
  }
}

- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  require_open(_ended, "setThreadgroupMemoryLength");
  check_index("setThreadgroupMemoryLength", index, kMaxThreadgroupArguments);
  if (length % kThreadgroupLengthUnit != 0) {
    throw ValidationError("setThreadgroupMemoryLength: " + std::to_string(length) + " at index " +
                          std::to_string(index) + " is not a multiple of 16 bytes");
  }
  if (length > kMaxThreadgroupBytes) {
    throw ValidationError("setThreadgroupMemoryLength: " + std::to_string(length) + " bytes at index " +
                          std::to_string(index) + " exceed the limit of " +
                          std::to_string(kMaxThreadgroupBytes));
  }
  _threadgroupLengths[index] = length;
}

- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)group {
  require_open(_ended, "dispatchThreadgroups");
  if (!_pipeline) throw ValidationError("dispatchThreadgroups: no compute pipeline state is set");
  __unsafe_unretained EmulatorCommandBuffer* const commandBuffer = _commandBuffer;
  __unsafe_unretained EmulatorComputePipeline* const state = _pipeline;
  const auto& arguments = state->_pipeline->kernel->arguments;

  Command command;
  command.after_barrier = _barrier || _dispatchType == MTLDispatchTypeSerial;
  DispatchCommand& dispatch = command.dispatch;
  dispatch.pipeline = state->_pipeline;
  dispatch.number = commandBuffer.nextDispatch;
  check_geometry(dispatch, {grid.width, grid.height, grid.depth}, {group.width, group.height, group.depth});
  dispatch.grid = to_dim3(grid);
  dispatch.group = to_dim3(group);
  if (dispatch.group.volume() > state->_maxThreads) {
    throw ValidationError(describe(dispatch) + ": the threadgroup exceeds the pipeline's " +
                          "maxTotalThreadsPerThreadgroup of " + std::to_string(state->_maxThreads));
  }
  dispatch.buffers.reserve(arguments.size());
  for (const KernelArgument& argument : arguments) {
    const auto index = static_cast<std::size_t>(argument.index);
    if (argument.space == KernelArgument::Space::kThreadgroup) {
      if (dispatch.threadgroup_bytes.size() <= index) dispatch.threadgroup_bytes.resize(index + 1);
      dispatch.threadgroup_bytes[index] = _threadgroupLengths[index];
    } else {
      if (dispatch.buffers.size() <= index) dispatch.buffers.resize(index + 1);
      dispatch.buffers[index] = _bindings[index];
    }
  }
  check_buffers(dispatch);
  check_threadgroup_memory(dispatch);
  const bool checked = options().checked;
  if (_dispatchType == MTLDispatchTypeConcurrent && !checked && State::get().validates()) {
    std::vector<Access> accesses = find_bound(command);
    if (const auto conflict = _hazards.find_conflict(accesses, kNoBarrier)) throw ValidationError(*conflict);
    _hazards.add(std::move(accesses));
  }

  if (checked) std::for_each(dispatch.buffers.begin(), dispatch.buffers.end(), guard_bytes);
  for (const KernelArgument& argument : arguments) {
    if (argument.space == KernelArgument::Space::kThreadgroup) continue;
    if (id buffer = _objects[static_cast<std::size_t>(argument.index)])
      [commandBuffer retainUntilCompleted:buffer];
  }
  if (_retains) [commandBuffer retainUntilCompleted:_pipeline];
  [commandBuffer encode:std::move(command)];
  _barrier = NO;
}

- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  require_open(_ended, "memoryBarrierWithScope");
  if (!(scope & MTLBarrierScopeBuffers)) return;
  _barrier = YES;
  _hazards.barrier();
}
@end
