#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "classes.h"
#include "untracked.h"

using namespace metal_emulator;

NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

namespace {

constexpr std::size_t kUsualCommands = 256;  // per command buffer

bool keeps_history() {
  return locked([](State& state) { return state.history_depth_ > 0; });
}

}  // namespace

@implementation EmulatorCommandBuffer {
  EmulatorCommandQueue* _queue;
  BOOL _retained;
  BOOL _describes;  // keeps commands for messages and records
  Commands _commands;
  int _dispatches;
  BOOL _encoderOpen;
  std::string _violation;  // an encoder was released before endEncoding
  std::vector<id> _references;
  std::shared_ptr<UntrackedUse> _untracked;
  std::size_t _aheadOfHost;

  std::mutex _mutex;  // guards the members below
  std::condition_variable _changed;
  MTLCommandBufferStatus _status;
  std::atomic<bool> _finished;  // completed, with its references released
  NSError* _error;
  CFTimeInterval _start, _end;
}
@synthesize label = _label;

- (instancetype)initWithQueue:(EmulatorCommandQueue*)queue retainedReferences:(BOOL)retained {
  if ((self = [super init])) {
    _queue = queue;
    _retained = retained;
    State& state = State::get();
    _describes = state.validates() || keeps_history() || options().checked || limits().watchdog_steps > 0 ||
                 limits().out_of_memory;
    _untracked = std::make_shared<UntrackedUse>((__bridge const void*)queue);
  }
  return self;
}
- (void)dealloc {
  if (_status < MTLCommandBufferStatusCommitted) [_queue commandBufferDropped];
}

- (BOOL)retainedReferences {
  return _retained;
}
- (MTLCommandBufferStatus)status {
  std::lock_guard lock(_mutex);
  if (_status >= MTLCommandBufferStatusCompleted) [self observe];
  return _status;
}
// Records that the host has seen the completion. Returns false if it had already.
- (BOOL)observe {
  UntrackedUse::observe(*_untracked);
  return [_queue observe:self];
}
- (NSError*)error {
  std::lock_guard lock(_mutex);
  return _error;
}
- (CFTimeInterval)GPUStartTime {
  std::lock_guard lock(_mutex);
  return _start;
}
- (CFTimeInterval)GPUEndTime {
  std::lock_guard lock(_mutex);
  return _end;
}
// Unlike `status`, which the program reads, this does not count as the host seeing the completion.
- (BOOL)committed {
  std::lock_guard lock(_mutex);
  return _status >= MTLCommandBufferStatusCommitted;
}

- (void)requireUncommitted:(const char*)call {
  if (self.committed) throw ValidationError(std::string(call) + ": the command buffer was already committed");
}

- (void)commit {
  [self requireUncommitted:"commit"];
  if (!_violation.empty()) throw ValidationError("commit: " + _violation);
  if (_encoderOpen) throw ValidationError("commit: an encoder of the command buffer has not ended encoding");
  if (State::get().validates()) {
    if (const std::string misuse = find_misuse(_commands); !misuse.empty())
      throw ValidationError("commit: " + misuse);
  }
  if (const auto refusal = locked([](State& state) { return state.commit_refusal_.next(); }))
    throw ValidationError("commit: " + *refusal);
  UntrackedUse::commit(_untracked);
  State::get().count(&Counters::command_buffers);
  State::get().count(&Counters::dispatches, static_cast<std::uint64_t>(_dispatches));
  _aheadOfHost = [_queue committed:self];
  {
    std::lock_guard lock(_mutex);
    _status = MTLCommandBufferStatusCommitted;
  }
  [_queue submit:self];
}

- (void)submit {
  State& state = State::get();
  const DeviceLimits limits = metal_emulator::limits();
  if (!limits.endless_kernels.empty() && has_kernel(_commands, limits.endless_kernels)) {
    [[maybe_unused]] static auto& running = *new std::vector<EmulatorCommandBuffer*>;
    running.push_back(self);
    return;
  }
  state.begin_work();
  // Checks after the commands have run need them.
  Commands commands = _describes ? _commands : std::exchange(_commands, {});
  std::string failure;
  if (const auto fault = locked([](State& state) { return state.command_buffer_fault_.next(); })) {
    truncate(commands, fault->dispatches);
    failure = fault->message;
  }
  if (!limits.barriers) reorder(commands);
  if (limits.out_of_memory) {
    if (const std::string excess = find_excess(commands, limits.working_set_bytes); !excess.empty()) {
      failure = excess;
      commands.clear();
    }
  }
  if (!limits.wrong_kernels.empty()) plant_mistakes(commands, limits.wrong_kernels);
  // The object lives until the commands have completed, and is released before the work counts as done.
  state.executor().submit(std::move(commands),
                          [object = self, failure](const Completion& completion) mutable {
                            const WorkerScope scope;
                            {
                              const AutoreleasePool pool;
                              [object finish:completion failure:failure];
                              object = nil;
                            }
                            State::get().end_work();
                          });
}

- (void)finish:(const Completion&)completion failure:(const std::string&)failure {
  std::string message = completion.error;
  NSInteger code = MTLCommandBufferErrorInternal;
  if (message.empty() && State::get().validates()) message = find_misuse(_commands);
  if (message.empty()) message = find_overlap(_commands, completion.statistics);
  if (message.empty()) message = find_hazard(_commands, completion.statistics);
  if (message.empty()) {
    message = find_timeout(_commands, completion.statistics, limits().watchdog_steps);
    if (!message.empty()) code = MTLCommandBufferErrorTimeout;
  }
  if (message.empty()) message = failure;
  if (keeps_history()) {
    CommandBufferRecord record{
        to_string(self.label), message, static_cast<bool>(_retained), _aheadOfHost, {}};
    record.dispatches = make_records(_commands, completion.statistics);
    locked([&](State& state) {
      state.history_.push_back(std::move(record));
      while (state.history_.size() > state.history_depth_) state.history_.pop_front();
    });
  }
  const bool failed = !message.empty();
  {
    std::lock_guard lock(_mutex);
    if (failed) _error = make_error(MTLCommandBufferErrorDomain, code, message);
    _start = completion.start_seconds;
    _end = completion.end_seconds;
    _status = failed ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
  }
  _references.clear();
  _commands = Commands();
  [_queue commandBufferFinished];
  std::lock_guard lock(_mutex);
  _finished = true;
  _changed.notify_all();
}

- (void)waitUntilCompleted {
  if (!self.committed) throw ValidationError("waitUntilCompleted: the command buffer was not committed");
  const auto until = std::chrono::steady_clock::now() + State::get().executor().polling_time();
  while (!_finished && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  std::unique_lock lock(_mutex);
  _changed.wait(lock, [&] { return _finished.load(); });
  if ([self observe]) State::get().count(&Counters::waits);
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
- (void)encode:(Command)command {
  if (State::get().validates()) {
    std::vector<Access> accesses = find_bound(command, true);
    if (const auto conflict = _untracked->find_conflict(accesses)) throw ValidationError(*conflict);
    _untracked->add(std::move(accesses));
  }
  if (command.kind == Command::Kind::kDispatch) _dispatches++;
  if (_commands.empty()) _commands.reserve(kUsualCommands);
  _commands.push_back(std::move(command));
}
- (void)waitForFence:(id<MTLFence>)fence {
  _untracked->wait_for((__bridge const void*)checked_cast<EmulatorFence>(fence, "waitForFence"));
  if (_retained) _references.push_back(fence);
}
- (void)updateFence:(id<MTLFence>)fence {
  _untracked->update((__bridge const void*)checked_cast<EmulatorFence>(fence, "updateFence"));
  if (_retained) _references.push_back(fence);
}
- (int)nextDispatch {
  return _dispatches;
}
- (void)retainUntilCompleted:(id)object {
  if (_retained) _references.push_back(object);
}
- (void)encoderEnded:(BOOL)properly {
  _encoderOpen = NO;
  _untracked->end_encoder();
  if (properly) return;
  _violation = "an encoder was released without endEncoding (a Mac aborts the process there)";
  locked([&](State& state) { state.violations_.push_back(_violation); });
}
@end
