#include "state.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "objc/abi.h"

namespace metal_emulator {
namespace {

constexpr unsigned kBackgroundThreads = 4;

std::uint64_t from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : 0;
}

std::uint64_t machine_bytes() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

void check(const ExecutorOptions& options) {
  if (options.checked && *sanitizer()) {
    throw std::runtime_error(std::string("checked mode is not part of builds with the sanitizer '") +
                             sanitizer() + "'");
  }
}

std::unique_ptr<Executor> make_executor() {
  const char* name = std::getenv("METAL_EMULATOR_EXECUTOR");
  if (!name || std::string_view(name) == "cpu") return make_cpu_executor();
#if METAL_EMULATOR_CUDA
  if (std::string_view(name) == "cuda") return make_cuda_executor();
#endif
  throw std::runtime_error(std::string("METAL_EMULATOR_EXECUTOR: unknown executor '") + name + "'");
}

DeviceLimits completed(DeviceLimits limits) {
  if (limits.max_buffer_length == 0) limits.max_buffer_length = machine_bytes() / 2;
  if (limits.working_set_bytes == 0) limits.working_set_bytes = machine_bytes() / 4 * 3;
  return limits;
}

// Separate memory of the GPU in place of the caller's: the first `right` bytes are copied, others are zero.
std::shared_ptr<Allocation> stale(Executor& executor, const void* memory, std::size_t length,
                                  std::size_t right) {
  auto copy = executor.allocate(length, true);
  if (!copy) return nullptr;
  auto* bytes = static_cast<std::byte*>(copy->host());
  std::memcpy(bytes, memory, right);
  std::memset(bytes + right, 0, length - right);
  return copy;
}

bool allocation_fails() {
  return locked([](State& state) { return state.allocation_fault_.next().has_value(); });
}

}  // namespace

// Never destroyed, as its threads may outlive everything else in the process.
State& State::get() {
  static auto* instance = new State;
  return *instance;
}

State::State() : executor_(make_executor()) {
  options_.workers = static_cast<unsigned>(from_environment("METAL_EMULATOR_THREADS"));
  options_.seed = from_environment("METAL_EMULATOR_SEED");
  options_.checked = from_environment("METAL_EMULATOR_CHECKED") != 0;
  options_.fast_errors = from_environment("METAL_EMULATOR_FAST_ERRORS") != 0;
  check(options_);
  executor_->configure(options_);
  if (const char* text = std::getenv("METAL_EMULATOR_VALIDATION")) validates_ = std::string_view(text) != "0";
  limits_ = completed({});
}

std::shared_ptr<Allocation> State::keep(std::shared_ptr<Allocation> buffer) {
  if (!buffer) return nullptr;
  std::lock_guard lock(mutex_);
  buffers_.push_back(buffer);
  counters_.buffers++;
  return buffer;
}

std::shared_ptr<Allocation> State::allocate(std::size_t length, StorageMode mode) {
  if (allocation_fails()) return nullptr;
  auto buffer = executor_->allocate(length, mode != StorageMode::kPrivate);
  if (buffer) buffer->storage_mode = mode;
  return keep(std::move(buffer));
}

std::shared_ptr<Allocation> State::wrap(void* memory, std::size_t length) {
  if (allocation_fails()) return nullptr;
  const std::uint64_t right = limits().stale_no_copy;
  auto buffer = right > 0 && length > right ? stale(*executor_, memory, length, right)
                                            : executor_->wrap(memory, length);
  if (buffer) buffer->caller_memory = memory;
  return keep(std::move(buffer));
}

void State::count(std::uint64_t Counters::* counter, std::uint64_t times) {
  std::lock_guard lock(mutex_);
  counters_.*counter += times;
}

void State::begin_work() {
  std::lock_guard lock(mutex_);
  work_++;
}

void State::end_work() {
  std::lock_guard lock(mutex_);
  if (--work_ == 0) idle_.notify_all();
}

void State::wait_idle() {
  if (WorkerScope::depth > 0) return;
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return work_ == 0; });
}

void State::run_in_background(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  work_++;
  background_tasks_.push_back(std::move(task));
  if (background_threads_ < kBackgroundThreads) {
    background_threads_++;
    std::thread([this] { serve_background(); }).detach();
  }
  background_wake_.notify_one();
}

void State::serve_background() {
  const WorkerScope scope;
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      background_wake_.wait(lock, [&] { return !background_tasks_.empty(); });
      task = std::move(background_tasks_.front());
      background_tasks_.pop_front();
    }
    task();
    task = nullptr;  // destroys its captures before the work counts as done
    end_work();
  }
}

namespace {

// Calls `use` with the locked state once nothing runs.
template <typename Use>
auto settled(const Use& use) {
  State::get().wait_idle();
  return locked(use);
}

}  // namespace

long live_objects() {
  State::get().wait_idle();
  return objc::live_objects();
}
std::map<std::string, long> live_objects_by_class() {
  State::get().wait_idle();
  return objc::live_objects_by_class();
}

ExecutorOptions options() {
  return locked([](State& state) { return state.options_; });
}
void set_options(const ExecutorOptions& options) {
  check(options);
  settled([&](State& state) {
    state.options_ = options;
    state.executor_->configure(options);
  });
}

DeviceLimits limits() {
  return locked([](State& state) { return state.limits_; });
}
void set_limits(const DeviceLimits& limits) {
  locked([&](State& state) { state.limits_ = completed(limits); });
}

std::vector<BufferInfo> live_buffers() {
  return settled([](State& state) {
    std::vector<BufferInfo> infos;
    for (const auto& buffer : state.buffers_)
      infos.push_back({buffer->label, buffer->bytes, buffer->storage_mode, buffer->caller_memory != nullptr});
    return infos;
  });
}
std::size_t resident_bytes() {
  return settled([](State& state) { return state.resident_bytes_; });
}

void fail_allocation(int nth) {
  locked([&](State& state) { state.allocation_fault_ = {nth, true}; });
}
bool allocation_will_fail() {
  return locked([](State& state) { return state.allocation_fault_.calls > 0; });
}
void fail_command_buffer(int nth, const std::string& message, int dispatches) {
  locked([&](State& state) { state.command_buffer_fault_ = {nth, {message, dispatches}}; });
}
void refuse_commit(int nth, const std::string& message) {
  locked([&](State& state) { state.commit_refusal_ = {nth, message}; });
}
void lose_residency() {
  locked([](State& state) { state.loses_residency_ = true; });
}
void clear_faults() {
  locked([](State& state) {
    state.allocation_fault_ = {};
    state.command_buffer_fault_ = {};
    state.commit_refusal_ = {};
    state.loses_residency_ = false;
  });
}

Counters counters() {
  return locked([](State& state) { return state.counters_; });
}

std::vector<LibraryRecord> compiled_libraries() {
  return locked([](State& state) { return state.compiled_; });
}
void forget_compiled_libraries() {
  locked([](State& state) { state.compiled_.clear(); });
}

std::vector<std::string> take_violations() {
  return locked([](State& state) { return std::exchange(state.violations_, {}); });
}

std::vector<CommandBufferRecord> history() {
  return settled([](State& state) { return std::vector(state.history_.begin(), state.history_.end()); });
}
void set_history_depth(std::size_t command_buffers) {
  locked([&](State& state) {
    state.history_depth_ = command_buffers;
    while (state.history_.size() > command_buffers) state.history_.pop_front();
  });
}

}  // namespace metal_emulator
