#include <cstring>

#include "classes.h"
#include "hazards.h"

using namespace metal_emulator;

namespace {

Dim3 to_dim3(MTLSize size) {
  return {static_cast<std::uint32_t>(size.width), static_cast<std::uint32_t>(size.height),
          static_cast<std::uint32_t>(size.depth)};
}

void check_index(const char* call, NSUInteger index, int limit) {
  if (index < static_cast<NSUInteger>(limit)) return;
  throw ValidationError(std::string(call) + ": index " + std::to_string(index) + " is not below " +
                        std::to_string(limit));
}

void check_offset(const char* call, const BufferState& buffer, NSUInteger offset, NSUInteger index) {
  if (offset < buffer.info.length) return;
  throw ValidationError(std::string(call) + ": offset " + std::to_string(offset) + " at index " +
                        std::to_string(index) + " lies outside the buffer of " +
                        std::to_string(buffer.info.length) + " bytes");
}

// In checked mode, bytes are stored in memory with a guarded end, like any buffer.
BoundBuffer bound_buffer(const Binding& binding, bool checked) {
  if (binding.buffer) return {binding.buffer->allocation, binding.offset, {}};
  if (!checked) return {nullptr, 0, binding.bytes};
  auto memory = State::get().executor().allocate(binding.bytes.size(), true);
  if (!memory || !memory->host()) return {nullptr, 0, binding.bytes};
  std::memcpy(memory->host(), binding.bytes.data(), binding.bytes.size());
  return {std::move(memory), 0, {}};
}

}  // namespace

@implementation EmulatorComputeEncoder {
  MTLDispatchType _dispatchType;
  EmulatorComputePipeline* _pipeline;
  Bindings _bindings;
  std::array<id, kMaxBuffers> _objects;  // the bound buffers, retained when used
  ThreadgroupLengths _threadgroupLengths;
  std::unique_ptr<HazardTracker> _hazards;
  BOOL _barrier;  // whether a barrier was encoded since the last dispatch, or nothing was dispatched yet
  BOOL _retains;  // whether the command buffer retains its buffers
}

- (instancetype)initWithCommandBuffer:(EmulatorCommandBuffer*)commandBuffer
                         dispatchType:(MTLDispatchType)type {
  if ((self = [super initWithCommandBuffer:commandBuffer])) {
    _dispatchType = type;
    _barrier = YES;
    _retains = commandBuffer.retainedReferences;
    _hazards = std::make_unique<HazardTracker>(HazardTracker::Known::kBound);
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
  Binding& binding = _bindings[index];
  binding.buffer = nullptr;
  binding.offset = 0;
  binding.is_bytes = true;
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
  const auto& state = checked_cast<EmulatorBuffer>(buffer, "setBuffer")->_state;
  check_offset("setBuffer", *state, offset, index);
  Binding& binding = _bindings[index];
  if (binding.buffer != state) binding.buffer = state;
  binding.offset = offset;
  binding.is_bytes = false;
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
  const Pipeline& pipeline = *state->_pipeline;
  const int number = commandBuffer.nextDispatch;
  check_geometry(pipeline, number, {grid.width, grid.height, grid.depth},
                 {group.width, group.height, group.depth});
  if (group.width * group.height * group.depth > state->_maxThreads) {
    throw ValidationError(describe(pipeline, number) + ": the threadgroup exceeds the pipeline's " +
                          "maxTotalThreadsPerThreadgroup of " + std::to_string(state->_maxThreads));
  }
  check_buffers(pipeline, number, _bindings);
  check_threadgroup_memory(pipeline, number, _threadgroupLengths);

  const bool checked = options().checked;
  if (_dispatchType == MTLDispatchTypeConcurrent && !checked && State::get().validates())
    [self trackHazards:number];

  Command command;
  command.after_barrier = _barrier || _dispatchType == MTLDispatchTypeSerial;
  DispatchCommand& dispatch = command.dispatch;
  dispatch.pipeline = state->_pipeline;
  dispatch.grid = to_dim3(grid);
  dispatch.group = to_dim3(group);
  dispatch.number = number;
  dispatch.buffers.reserve(pipeline.kernel->arguments.size());
  std::vector<EncodedBinding> encoded;
  const bool described = commandBuffer.describesBindings;
  if (described) encoded.reserve(pipeline.kernel->arguments.size());
  for (const KernelArgument& argument : pipeline.kernel->arguments) {
    const auto index = static_cast<std::size_t>(argument.index);
    if (argument.space == KernelArgument::Space::kThreadgroup) {
      if (dispatch.threadgroup_bytes.size() <= index) dispatch.threadgroup_bytes.resize(index + 1);
      dispatch.threadgroup_bytes[index] = _threadgroupLengths[index];
      continue;
    }
    if (dispatch.buffers.size() <= index) dispatch.buffers.resize(index + 1);
    const Binding& binding = _bindings[index];
    dispatch.buffers[index] = bound_buffer(binding, checked);
    if (described)
      encoded.push_back({argument.index, argument.name, binding.buffer, binding.offset, argument.writable});
    if (_objects[index]) [commandBuffer retainUntilCompleted:_objects[index]];
  }
  if (_retains) [commandBuffer retainUntilCompleted:_pipeline];
  [commandBuffer encode:std::move(command) bindings:std::move(encoded)];
  _barrier = NO;
}

- (void)trackHazards:(int)number {
  const Pipeline& pipeline = *_pipeline->_pipeline;
  std::vector<Access> accesses;
  for (const KernelArgument& argument : pipeline.kernel->arguments) {
    if (argument.space == KernelArgument::Space::kThreadgroup) continue;
    const Binding& binding = _bindings[static_cast<std::size_t>(argument.index)];
    if (!binding.buffer) continue;
    accesses.push_back({binding.buffer->allocation.get(),
                        {binding.offset, binding.buffer->info.length},
                        argument.writable,
                        describe(pipeline, number, argument)});
  }
  if (const auto conflict = _hazards->find_conflict(accesses, kNoBarrier)) {
    throw ValidationError(*conflict);
  }
  _hazards->add(std::move(accesses));
}

- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  require_open(_ended, "memoryBarrierWithScope");
  if (!(scope & MTLBarrierScopeBuffers)) return;
  _barrier = YES;
  _hazards->barrier();
}
@end
