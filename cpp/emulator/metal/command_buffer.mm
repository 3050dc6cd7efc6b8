#include <chrono>
#include <condition_variable>
#include <mutex>
#include <unordered_set>

#include "classes.h"
#include "hazards.h"

using metal_emulator::Access;
using metal_emulator::Allocation;
using metal_emulator::AutoreleasePool;
using metal_emulator::BindingRecord;
using metal_emulator::BufferState;
using metal_emulator::Command;
using metal_emulator::CommandBufferFault;
using metal_emulator::CommandBufferRecord;
using metal_emulator::Completion;
using metal_emulator::DispatchRecord;
using metal_emulator::DispatchStatistics;
using metal_emulator::HazardTracker;
using metal_emulator::State;
using metal_emulator::to_string;
using metal_emulator::ValidationError;

NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string describe(const Command& command, const EncodedBinding& binding) {
  std::string text;
  switch (command.kind) {
    case Command::Kind::kDispatch:
      text = describe(*command.dispatch.pipeline, command.dispatch.number) + ", buffer(" +
             std::to_string(binding.index) + ") '" + binding.name + "'";
      break;
    case Command::Kind::kCopy:
      text = std::string("copyFromBuffer, ") + binding.name;
      break;
    case Command::Kind::kFill:
      text = std::string("fillBuffer, ") + binding.name;
      break;
  }
  if (binding.buffer) {
    if (const std::string label = State::get().label(*binding.buffer); !label.empty())
      text += " = \"" + label + "\"";
  }
  return text;
}

// Commands as they were encoded, without what only the executor needs.
struct Encoded {
  std::vector<Command> commands;
  std::vector<std::vector<EncodedBinding>> bindings;  // of each command
  std::vector<EncodedBarrier> barriers;
};

void apply_barriers(const Encoded& encoded, std::size_t command, std::size_t& next, HazardTracker& tracker) {
  for (; next < encoded.barriers.size() && encoded.barriers[next].before_command <= command; next++) {
    const EncodedBarrier& barrier = encoded.barriers[next];
    if (barrier.all) {
      tracker.barrier();
    } else {
      tracker.barrier(barrier.memory);
    }
  }
}

std::vector<Access> touched(const Command& command, const std::vector<EncodedBinding>& bindings,
                            const DispatchStatistics& statistics) {
  std::vector<Access> accesses;
  for (const EncodedBinding& binding : bindings) {
    if (!binding.buffer) continue;
    const auto add = [&](const auto& by_index, bool write) {
      const auto index = static_cast<std::size_t>(binding.index);
      if (index >= by_index.size()) return;
      for (const auto& range : by_index[index]) {
        accesses.push_back({binding.buffer->allocation.get(), range, write, describe(command, binding)});
      }
    };
    add(statistics.read, false);
    add(statistics.written, true);
  }
  return accesses;
}

// Conflicts between dispatches by the bytes that they touched; empty when there is none.
std::string find_hazard(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics) {
  HazardTracker tracker(HazardTracker::Known::kTouched);
  std::size_t barrier = 0, dispatch = 0;
  for (std::size_t i = 0; i < encoded.commands.size() && dispatch < statistics.size(); i++) {
    apply_barriers(encoded, i, barrier, tracker);
    if (encoded.commands[i].kind != Command::Kind::kDispatch) continue;
    auto conflict = tracker.add(touched(encoded.commands[i], encoded.bindings[i], statistics[dispatch++]));
    if (conflict) return *conflict;
  }
  return {};
}

// The first use of a buffer that is wrong by now; empty when there is none.
std::string find_misuse(const Encoded& encoded) {
  for (std::size_t i = 0; i < encoded.commands.size(); i++) {
    for (const EncodedBinding& binding : encoded.bindings[i]) {
      if (!binding.buffer) continue;
      if (binding.buffer->released) {
        return describe(encoded.commands[i], binding) + ": the buffer was deallocated before the command "
                                                        "buffer completed (its references are unretained)";
      }
      if (binding.writable && !binding.buffer->allocation->intact()) {
        return describe(encoded.commands[i], binding) +
               ": bytes past the end of the buffer were written (by this " +
               "binding or a later one of the same buffer)";
      }
    }
  }
  return {};
}

std::vector<DispatchRecord> make_records(const Encoded& encoded,
                                         const std::vector<DispatchStatistics>& statistics) {
  std::vector<DispatchRecord> records;
  for (std::size_t i = 0; i < encoded.commands.size(); i++) {
    const Command& command = encoded.commands[i];
    if (command.kind != Command::Kind::kDispatch) continue;
    const auto& dispatch = command.dispatch;
    DispatchRecord record{
        dispatch.pipeline->kernel->name, dispatch.grid, dispatch.group, 0, 0, command.after_barrier, {}};
    const DispatchStatistics none;
    const DispatchStatistics& measured =
        records.size() < statistics.size() ? statistics[records.size()] : none;
    record.threads = measured.threads;
    record.barriers = measured.barriers;
    for (const EncodedBinding& binding : encoded.bindings[i]) {
      const auto index = static_cast<std::size_t>(binding.index);
      BindingRecord entry{binding.index, binding.name, {}, 0, 0};
      if (binding.buffer) entry.label = State::get().label(*binding.buffer);
      if (index < measured.bytes_read.size()) entry.bytes_read = measured.bytes_read[index];
      if (index < measured.bytes_written.size()) entry.bytes_written = measured.bytes_written[index];
      record.bindings.push_back(std::move(entry));
    }
    records.push_back(std::move(record));
  }
  return records;
}

struct Running {
  EmulatorCommandBuffer* object;
};

// Keeps the first `dispatches` dispatches and the other commands before them.
void truncate(std::vector<Command>& commands, int dispatches) {
  for (std::size_t i = 0; i < commands.size(); i++) {
    if (commands[i].kind == Command::Kind::kDispatch && dispatches-- == 0) {
      commands.resize(i);
      return;
    }
  }
}

}  // namespace

@implementation EmulatorCommandBuffer {
  EmulatorCommandQueue* _queue;
  BOOL _retained;
  Encoded _encoded;
  int _dispatches;
  BOOL _encoderOpen;
  int _debugGroups;
  std::string _violation;  // of an encoder that was released before endEncoding
  std::vector<id> _references;
  std::vector<MTLCommandBufferHandler> _scheduledHandlers, _completedHandlers;

  std::mutex _mutex;  // guards what follows
  std::condition_variable _changed;
  MTLCommandBufferStatus _status;
  BOOL _finished;  // completed, and its handlers have run
  NSError* _error;
  CFTimeInterval _submitted, _start, _end;
}
@synthesize label = _label;

- (instancetype)initWithQueue:(EmulatorCommandQueue*)queue retainedReferences:(BOOL)retained {
  if ((self = [super init])) {
    _queue = queue;
    _retained = retained;
  }
  return self;
}
- (void)dealloc {
  if (_status < MTLCommandBufferStatusCommitted) [_queue commandBufferDropped];
}

- (id<MTLDevice>)device {
  return _queue.device;
}
- (id<MTLCommandQueue>)commandQueue {
  return _queue;
}
- (BOOL)retainedReferences {
  return _retained;
}
- (MTLCommandBufferStatus)status {
  std::lock_guard lock(_mutex);
  return _status;
}
- (NSError*)error {
  std::lock_guard lock(_mutex);
  return _error;
}
- (CFTimeInterval)kernelStartTime {
  std::lock_guard lock(_mutex);
  return _submitted;
}
- (CFTimeInterval)kernelEndTime {
  return self.GPUStartTime;
}
- (CFTimeInterval)GPUStartTime {
  std::lock_guard lock(_mutex);
  return _start;
}
- (CFTimeInterval)GPUEndTime {
  std::lock_guard lock(_mutex);
  return _end;
}
- (BOOL)committed {
  return self.status >= MTLCommandBufferStatusCommitted;
}

- (void)requireUncommitted:(const char*)call {
  if (self.committed) throw ValidationError(std::string(call) + ": the command buffer was already committed");
}
- (void)becomeStatus:(MTLCommandBufferStatus)status {
  std::lock_guard lock(_mutex);
  _status = status;
  _changed.notify_all();
}

- (void)enqueue {
  if (self.status != MTLCommandBufferStatusNotEnqueued) {
    throw ValidationError("enqueue: the command buffer was already enqueued");
  }
  [self becomeStatus:MTLCommandBufferStatusEnqueued];
  [_queue enqueue:self];
}

- (void)commit {
  [self requireUncommitted:"commit"];
  if (!_violation.empty()) throw ValidationError("commit: " + _violation);
  if (_encoderOpen) throw ValidationError("commit: an encoder of the command buffer has not ended encoding");
  if (const std::string misuse = find_misuse(_encoded); !misuse.empty())
    throw ValidationError("commit: " + misuse);
  if (self.status == MTLCommandBufferStatusNotEnqueued) [self enqueue];
  State::get().count(&metal_emulator::Counters::command_buffers);
  State::get().count(&metal_emulator::Counters::dispatches, static_cast<std::uint64_t>(_dispatches));
  [self becomeStatus:MTLCommandBufferStatusCommitted];
  [_queue submitReady];
}

- (void)submit {
  State& state = State::get();
  state.begin_work();
  std::vector<Command> commands = _encoded.commands;
  const auto fault = state.next_command_buffer_fault();
  if (fault) truncate(commands, fault->dispatches);
  {
    std::lock_guard lock(_mutex);
    _status = MTLCommandBufferStatusScheduled;
    _submitted = now();
    _changed.notify_all();
  }
  // The object lives until it is done, and is let go before the work counts as done.
  auto running = std::make_shared<Running>(Running{self});
  state.executor().submit(std::move(commands), [running, fault](const Completion& completion) {
    const metal_emulator::WorkerScope scope;
    {
      const AutoreleasePool pool;
      [running->object finish:completion fault:fault];
      running->object = nil;
    }
    State::get().end_work();
  });
}

- (void)finish:(const Completion&)completion fault:(const std::optional<CommandBufferFault>&)fault {
  std::string message = completion.error;
  NSInteger code = MTLCommandBufferErrorInternal;
  if (message.empty()) message = find_misuse(_encoded);
  if (message.empty()) message = find_hazard(_encoded, completion.statistics);
  if (message.empty() && fault) {
    message = fault->message;
    code = fault->code;
  }
  if (State::get().keeps_history()) {
    CommandBufferRecord record{
        to_string(self.label), message, completion.start_seconds, completion.end_seconds, {}};
    record.dispatches = make_records(_encoded, completion.statistics);
    State::get().add_record(std::move(record));
  }
  for (MTLCommandBufferHandler handler : _scheduledHandlers) handler(self);
  const bool failed = !message.empty();
  {
    std::lock_guard lock(_mutex);
    if (failed) _error = metal_emulator::make_error(MTLCommandBufferErrorDomain, code, message);
    _start = completion.start_seconds;
    _end = completion.end_seconds;
    _status = failed ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
  }
  for (MTLCommandBufferHandler handler : _completedHandlers) handler(self);
  _scheduledHandlers.clear();
  _completedHandlers.clear();
  _references.clear();
  _encoded = {};
  [_queue commandBufferFinished];
  std::lock_guard lock(_mutex);
  _finished = YES;
  _changed.notify_all();
}

- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [self requireUncommitted:"addScheduledHandler"];
  _scheduledHandlers.push_back([block copy]);
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [self requireUncommitted:"addCompletedHandler"];
  _completedHandlers.push_back([block copy]);
}
- (void)waitUntilScheduled {
  if (!self.committed) throw ValidationError("waitUntilScheduled: the command buffer was not committed");
  std::unique_lock lock(_mutex);
  _changed.wait(lock, [&] { return _status >= MTLCommandBufferStatusScheduled; });
}
// Completion handlers have run when it returns.
- (void)waitUntilCompleted {
  if (!self.committed) throw ValidationError("waitUntilCompleted: the command buffer was not committed");
  std::unique_lock lock(_mutex);
  _changed.wait(lock, [&] { return _finished; });
}

- (void)requireNoEncoder:(const char*)call {
  [self requireUncommitted:call];
  if (_encoderOpen) throw ValidationError(std::string(call) + ": another encoder has not ended encoding");
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  [self requireNoEncoder:"blitCommandEncoder"];
  _encoderOpen = YES;
  return [[EmulatorBlitEncoder alloc] initWithCommandBuffer:self];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  [self requireNoEncoder:"computeCommandEncoder"];
  _encoderOpen = YES;
  return [[EmulatorComputeEncoder alloc] initWithCommandBuffer:self dispatchType:type];
}
- (void)pushDebugGroup:(NSString*)string {
  static_cast<void>(string);
  _debugGroups++;
}
- (void)popDebugGroup {
  if (_debugGroups-- == 0) throw ValidationError("popDebugGroup: no debug group is open");
}

- (void)encode:(Command)command bindings:(std::vector<EncodedBinding>)bindings {
  if (command.kind == Command::Kind::kDispatch) _dispatches++;
  _encoded.commands.push_back(std::move(command));
  _encoded.bindings.push_back(std::move(bindings));
}
- (void)encodeBarrier:(EncodedBarrier)barrier {
  _encoded.barriers.push_back(std::move(barrier));
}
- (int)nextDispatch {
  return _dispatches;
}
- (std::size_t)commandCount {
  return _encoded.commands.size();
}
- (void)retainUntilCompleted:(id)object {
  if (_retained) _references.push_back(object);
}
- (void)encoderEnded:(BOOL)properly label:(NSString*)label {
  _encoderOpen = NO;
  if (properly) return;
  _violation = "an encoder";
  if (label) _violation += " \"" + to_string(label) + "\"";
  _violation += " was released without endEncoding (a Mac aborts the process there)";
  State::get().add_violation(_violation);
}
@end
