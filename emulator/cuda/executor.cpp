// The executor on an NVIDIA GPU. The thread that commits a command buffer launches its commands on a stream;
// another thread waits for their completion.
#include "../executor.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>

#include "../submissions.h"
#include "device.h"
#include "events.h"
#include "graphs.h"
#include "launches.h"
#include "program.h"
#include "streams.h"

namespace metal_emulator {
namespace cuda {
namespace {

constexpr std::size_t kLaunchedAhead = 48;  // launches before the graph

bool is_set(const char* variable, bool otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoul(text, nullptr, 10) != 0 : otherwise;
}

class CudaExecutor final : public Executor {
 public:
  CudaExecutor()
      : libraries_(make_cpu_executor()),
        filled_(is_set("METAL_EMULATOR_FILL", true)),
        timed_(is_set("METAL_EMULATOR_TIMED", false)),
        as_graphs_(is_set("METAL_EMULATOR_GRAPHS", true)) {}

  std::string device_name() const override { return "Metal emulator (CUDA, " + device_.name() + ")"; }

  std::chrono::microseconds polling_time() const override { return std::chrono::milliseconds(20); }

  // The seed has no effect: the GPU orders threads itself.
  void configure(const ExecutorOptions& options) override {
    if (options.checked) throw std::runtime_error("checked mode needs the emulator's CPU executor");
  }

  std::shared_ptr<Allocation> allocate(std::size_t bytes, bool host_visible) override {
    return host_visible ? allocate_shared(device_, bytes) : allocate_private(device_, bytes, filled_);
  }
  std::shared_ptr<Allocation> wrap(void* memory, std::size_t bytes) override {
    return cuda::wrap(device_, memory, bytes);
  }

  // The CPU executor describes the kernel from its source.
  std::shared_ptr<const Pipeline> prepare(const ShaderLibrary& library, const Kernel& kernel) override {
    const auto described = libraries_->prepare(library, kernel);
    auto pipeline = std::make_shared<CudaPipeline>();
    static_cast<Pipeline&>(*pipeline) = *described;
    pipeline->program = program_of(library, kernel);
    pipeline->function = pipeline->program->function({});
    int most = 0;
    METAL_EMULATOR_CALL(cuFuncGetAttribute, &most, kMaxThreadsPerBlock, pipeline->function);
    pipeline->max_threads = std::min(pipeline->max_threads, static_cast<std::uint32_t>(most));
    return pipeline;
  }

  void submit(std::vector<Command> commands, std::function<void(Completion)> done) override {
    device_.enter();
    Running running;
    running.commands = std::move(commands);
    running.done = std::move(done);
    {
      std::lock_guard lock(launch_mutex_);
      launch(running);
    }
    keep_memory_alone(running);
    running_.push(std::move(running));
  }

 private:
  // A submission on the GPU.
  struct Running {
    std::vector<Command> commands;
    std::vector<std::shared_ptr<Allocation>> memory;  // memory that they use, after the launch
    std::function<void(Completion)> done;
    Completion completion;
    Event start = nullptr, end = nullptr;
    std::vector<Event> marks;    // in timed mode, before each dispatch and after the last one
    std::vector<Address> bytes;  // addresses of setBytes data that kernels take by address
  };

  std::shared_ptr<Program> program_of(const ShaderLibrary& library, const Kernel& kernel) {
    std::lock_guard lock(programs_mutex_);
    std::shared_ptr<Program>& program = programs_[&kernel];
    if (!program) program = std::make_shared<Program>(device_, library, kernel);
    return program;
  }

  // Keeps only the memory of the commands: freeing the rest later would delay callers that wait.
  static void keep_memory_alone(Running& running) {
    const auto keep = [&](BoundBuffer& buffer) {
      if (buffer.allocation) running.memory.push_back(std::move(buffer.allocation));
    };
    for (Command& command : running.commands) {
      for (BoundBuffer& buffer : command.dispatch.buffers) keep(buffer);
      for (BoundBuffer* buffer : {&command.copy.from, &command.copy.to, &command.fill.to}) keep(*buffer);
    }
    running.commands.clear();
    std::sort(running.memory.begin(), running.memory.end());
    running.memory.erase(std::unique(running.memory.begin(), running.memory.end()), running.memory.end());
  }

  // Launches all commands between two events.
  void launch(Running& running) {
    running.start = timing_.take();
    running.end = timing_.take();
    running.completion.start_seconds = now();
    try {
      METAL_EMULATOR_CALL(cuEventRecord, running.start, streams_.main());
      if (timed_ || !has_only_dispatches(running.commands)) {
        launch_in_order(running);
      } else {
        // The GPU starts the first commands while the graph of the others is updated.
        const std::size_t ahead = end_of_stage(running.commands, kLaunchedAhead);
        streams_.launch_stages(prepare_all(running, 0, ahead));
        std::vector<Launch> others = prepare_all(running, ahead, running.commands.size());
        if (!as_graphs_ || !graphs_.run(others, streams_.main())) streams_.launch_stages(others);
      }
      if (timed_) mark(running);
    } catch (const std::exception& error) {
      running.completion.error = error.what();
    }
    for (const Address address : running.bytes) Driver::get().cuMemFreeAsync(address, streams_.main());
    Driver::get().cuEventRecord(running.end, streams_.main());
  }

  static bool has_only_dispatches(const std::vector<Command>& commands) {
    return std::all_of(commands.begin(), commands.end(),
                       [](const Command& command) { return command.kind == Command::Kind::kDispatch; });
  }

  void launch_in_order(Running& running) {
    for (const Command& command : running.commands) {
      switch (command.kind) {
        case Command::Kind::kCopy:
          METAL_EMULATOR_CALL(cuMemcpyAsync, address_of(command.copy.to), address_of(command.copy.from),
                              command.copy.bytes, streams_.main());
          break;
        case Command::Kind::kFill:
          METAL_EMULATOR_CALL(cuMemsetD8Async, address_of(command.fill.to), command.fill.value,
                              command.fill.bytes, streams_.main());
          break;
        case Command::Kind::kDispatch: {
          const Launch launch = make_launch(running, command.dispatch, 0);
          if (timed_) mark(running);
          streams_.start(launch, streams_.main());
          break;
        }
      }
    }
  }

  // Index of the first command after the barrier that follows at least `count` commands.
  static std::size_t end_of_stage(const std::vector<Command>& commands, std::size_t count) {
    std::size_t end = std::min(count, commands.size());
    while (end < commands.size() && !commands[end].after_barrier) end++;
    return end;
  }

  // Prepares commands, all of which are dispatches. Dispatches without a barrier between them form a stage.
  std::vector<Launch> prepare_all(Running& running, std::size_t begin, std::size_t end) {
    std::vector<Launch> launches;
    launches.reserve(end - begin);
    std::size_t stage = 0;
    for (std::size_t i = begin; i < end; i++) {
      stage += running.commands[i].after_barrier;
      launches.push_back(make_launch(running, running.commands[i].dispatch, stage));
    }
    return launches;
  }

  Launch make_launch(Running& running, const DispatchCommand& command, std::size_t stage) {
    running.completion.statistics.emplace_back().threads = command.grid.volume() * command.group.volume();
    return cuda::make_launch(command, stage,
                             [&](const std::vector<std::byte>& bytes) { return upload(running, bytes); });
  }

  void mark(Running& running) {
    running.marks.push_back(timing_.take());
    METAL_EMULATOR_CALL(cuEventRecord, running.marks.back(), streams_.main());
  }

  // Copies the bytes of setBytes to the GPU and returns their address.
  Address upload(Running& running, const std::vector<std::byte>& bytes) {
    Address address = 0;
    METAL_EMULATOR_CALL(cuMemAllocAsync, &address, bytes.size(), streams_.main());
    running.bytes.push_back(address);
    METAL_EMULATOR_CALL(cuMemcpyHtoDAsync_v2, address, bytes.data(), bytes.size(), streams_.main());
    return address;
  }

  // Waits for the submission to complete.
  Completion finish(Running& running) {
    device_.enter();
    Completion completion = std::move(running.completion);
    const Result result = Driver::get().cuEventSynchronize(running.end);
    if (result != 0 && completion.error.empty()) {
      completion.error = "a kernel failed on the GPU, which cannot continue: " + describe(result);
    }
    completion.end_seconds = completion.start_seconds;
    if (result != 0) return completion;
    completion.end_seconds += seconds_between(running.start, running.end);
    for (std::size_t i = 0; i + 1 < running.marks.size(); i++) {
      completion.statistics[i].seconds = seconds_between(running.marks[i], running.marks[i + 1]);
    }
    for (Event event : running.marks) timing_.put_back(event);
    timing_.put_back(running.start);
    timing_.put_back(running.end);
    return completion;
  }

  const Device device_;
  const std::unique_ptr<Executor> libraries_;
  const bool filled_, timed_, as_graphs_;
  const bool overlaps_ = device_.capability() >= 90 && !timed_;  // kernels wait for their inputs: see Program
  Graphs graphs_{overlaps_};
  Streams streams_{device_, overlaps_};
  Events timing_;
  std::mutex launch_mutex_;

  std::mutex programs_mutex_;
  std::map<const Kernel*, std::shared_ptr<Program>> programs_;

  SubmissionQueue<Running> running_{[this](Running& running) { return finish(running); }};
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Executor> make_cuda_executor() {
  return std::make_unique<cuda::CudaExecutor>();
}

}  // namespace metal_emulator
