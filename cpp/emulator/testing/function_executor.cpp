#include "testing/function_executor.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace metal_emulator {
namespace {

char* address(const BoundBuffer& buffer) {
  if (!buffer.allocation) return reinterpret_cast<char*>(const_cast<std::byte*>(buffer.bytes.data()));
  return static_cast<char*>(buffer.allocation->host()) + buffer.offset;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class FunctionExecutor final : public Executor {
 public:
  FunctionExecutor() : thread_([this] { serve(); }) {}
  ~FunctionExecutor() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  std::string device_name() const override { return "Metal emulator (C++ functions)"; }
  void configure(const ExecutorOptions& options) override { options_ = options; }
  std::shared_ptr<Allocation> allocate(std::size_t bytes, bool host_visible) override {
    return allocate_guarded(bytes, host_visible ? 0 : 0xff);
  }
  std::shared_ptr<Allocation> wrap(void* memory, std::size_t bytes) override {
    return wrap_memory(memory, bytes, options_.checked);
  }
  const ShaderLibrary* load(const std::string&) override {
    throw std::runtime_error("this executor loads no compiled libraries");
  }
  std::shared_ptr<const Pipeline> prepare(const ShaderLibrary& library, const Kernel& kernel,
                                          const Specialization& constants) override {
    auto pipeline = std::make_shared<Pipeline>();
    pipeline->library = &library;
    pipeline->kernel = &kernel;
    pipeline->constants = constants;
    return pipeline;
  }
  void submit(std::vector<Command> commands, std::function<void(Completion)> done) override {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(commands), std::move(done)});
    wake_.notify_all();
  }

 private:
  struct Submission {
    std::vector<Command> commands;
    std::function<void(Completion)> done;
  };

  static void run(const Command& command, Completion& completion) {
    switch (command.kind) {
      case Command::Kind::kDispatch: {
        const auto& dispatch = command.dispatch;
        DispatchStatistics& statistics = completion.statistics.emplace_back();
        statistics.threads = std::uint64_t{dispatch.grid.x} * dispatch.grid.y * dispatch.grid.z *
                             dispatch.group.x * dispatch.group.y * dispatch.group.z;
        const auto function =
            reinterpret_cast<KernelFunction>(const_cast<void*>(dispatch.pipeline->kernel->entry));
        try {
          function({dispatch, statistics});
        } catch (const std::exception& error) {
          completion.error = error.what();
        }
        break;
      }
      case Command::Kind::kCopy:
        std::memcpy(address(command.copy.to), address(command.copy.from), command.copy.bytes);
        break;
      case Command::Kind::kFill:
        std::memset(address(command.fill.to), command.fill.value, command.fill.bytes);
        break;
    }
  }

  void serve() {
    for (;;) {
      Submission submission;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        submission = std::move(queue_.front());
        queue_.pop_front();
      }
      Completion completion;
      completion.start_seconds = now();
      for (const Command& command : submission.commands) {
        if (completion.error.empty()) run(command, completion);
      }
      completion.end_seconds = now();
      submission.done(std::move(completion));
    }
  }

  ExecutorOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Submission> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

void* FunctionCall::buffer(int index) const {
  return address(dispatch.buffers.at(static_cast<std::size_t>(index)));
}

std::size_t FunctionCall::bytes(int index) const {
  const BoundBuffer& buffer = dispatch.buffers.at(static_cast<std::size_t>(index));
  return buffer.allocation ? buffer.allocation->bytes - buffer.offset : buffer.bytes.size();
}

std::unique_ptr<Executor> make_function_executor() {
  return std::make_unique<FunctionExecutor>();
}
std::unique_ptr<Executor> make_cpu_executor() {
  return make_function_executor();
}

}  // namespace metal_emulator
