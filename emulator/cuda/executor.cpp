// The executor on an NVIDIA GPU. The thread that commits a command buffer launches its commands on a stream;
// another thread waits for their end.
#include "../executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "device.h"
#include "graphs.h"
#include "program.h"

namespace metal_emulator {
namespace cuda {
namespace {

constexpr std::uint32_t kMaxGridYZ = 65535, kMaxGroupZ = 64;  // of CUDA
constexpr std::size_t kMaxParameterBytes = 4096;
constexpr std::size_t kSideStreams = 4;     // for dispatches that may overlap
constexpr std::size_t kLaunchedAhead = 48;  // one by one, before a graph

bool is_set(const char* variable, bool otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoul(text, nullptr, 10) != 0 : otherwise;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct CudaPipeline final : Pipeline {
  std::shared_ptr<Program> program;
  Function function = nullptr;  // of the usual variant
};

// Events to be used again.
class Events {
 public:
  explicit Events(unsigned flags) : flags_(flags) {}
  Event take() {
    std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      Event event = nullptr;
      METAL_EMULATOR_CALL(cuEventCreate, &event, flags_);
      return event;
    }
    Event event = idle_.back();
    idle_.pop_back();
    return event;
  }
  void put_back(Event event) {
    std::lock_guard lock(mutex_);
    idle_.push_back(event);
  }

 private:
  const unsigned flags_;
  std::mutex mutex_;
  std::vector<Event> idle_;
};

double seconds_between(Event start, Event end) {
  float milliseconds = 0;
  METAL_EMULATOR_CALL(cuEventElapsedTime, &milliseconds, start, end);
  return static_cast<double>(milliseconds) * 1e-3;
}

std::uint64_t volume(Dim3 d) {
  return std::uint64_t{d.x} * d.y * d.z;
}

// Part of a dispatch whose threadgroups are of one size.
struct Region {
  Dim3 first, groups, threads;  // threadgroup positions, their number, threads of each
};

// Threadgroups at the far sides of a grid are smaller where it does not divide into whole ones.
std::vector<Region> regions_of(const DispatchCommand& command) {
  if (command.threads.x == 0) return {{{0, 0, 0}, command.grid, command.group}};
  struct Part {
    std::uint32_t first, groups, threads;
  };
  const auto parts = [](std::uint32_t threads, std::uint32_t group) {
    std::vector<Part> result;
    if (threads / group > 0) result.push_back({0, threads / group, group});
    if (threads % group > 0) result.push_back({threads / group, 1, threads % group});
    return result;
  };
  std::vector<Region> regions;
  for (const Part& z : parts(command.threads.z, command.group.z)) {
    for (const Part& y : parts(command.threads.y, command.group.y)) {
      for (const Part& x : parts(command.threads.x, command.group.x)) {
        regions.push_back(
            {{x.first, y.first, z.first}, {x.groups, y.groups, z.groups}, {x.threads, y.threads, z.threads}});
      }
    }
  }
  return regions;
}

Vec3 to_vec3(Dim3 d) {
  return {d.x, d.y, d.z};
}

class CudaExecutor final : public Executor {
 public:
  CudaExecutor()
      : libraries_(make_cpu_executor()),
        filled_(is_set("METAL_EMULATOR_FILL", true)),
        timed_(is_set("METAL_EMULATOR_TIMED", false)),
        as_graphs_(is_set("METAL_EMULATOR_GRAPHS", true)) {
    device_.enter();
    METAL_EMULATOR_CALL(cuStreamCreate, &stream_, kNonBlocking);
    for (Stream& stream : side_streams_) METAL_EMULATOR_CALL(cuStreamCreate, &stream, kNonBlocking);
  }
  ~CudaExecutor() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  std::string device_name() const override { return "Metal emulator (CUDA, " + device_.name() + ")"; }

  std::chrono::microseconds polling_time() const override { return std::chrono::milliseconds(20); }

  // The GPU has an order of threads of its own, and lanes that are active.
  void configure(const ExecutorOptions& options) override {
    if (options.checked) throw std::runtime_error("checked mode needs the emulator's CPU executor");
  }

  std::shared_ptr<Allocation> allocate(std::size_t bytes, bool host_visible) override {
    return host_visible ? allocate_shared(device_, bytes) : allocate_private(device_, bytes, filled_);
  }
  std::shared_ptr<Allocation> wrap(void* memory, std::size_t bytes) override {
    return cuda::wrap(device_, memory, bytes);
  }
  const ShaderLibrary* load(const std::string& path) override { return libraries_->load(path); }

  // The CPU executor knows what a kernel's source says of it.
  std::shared_ptr<const Pipeline> prepare(const ShaderLibrary& library, const Kernel& kernel,
                                          const Specialization& constants) override {
    const auto described = libraries_->prepare(library, kernel, constants);
    auto pipeline = std::make_shared<CudaPipeline>();
    static_cast<Pipeline&>(*pipeline) = *described;
    pipeline->program = program_of(library, kernel, constants);
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
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    running_.push_back(std::move(running));
    wake_.notify_one();
  }

 private:
  // A submission on the GPU.
  struct Running {
    std::vector<Command> commands;
    std::vector<std::shared_ptr<Allocation>> memory;  // that they use, once they are launched
    std::function<void(Completion)> done;
    Completion completion;
    Event start = nullptr, end = nullptr;
    std::vector<Event> marks;    // in timed mode, before each dispatch and after the last
    std::vector<Address> bytes;  // of setBytes that kernels take by address
  };

  std::shared_ptr<Program> program_of(const ShaderLibrary& library, const Kernel& kernel,
                                      const Specialization& constants) {
    std::lock_guard lock(programs_mutex_);
    for (const auto& program : programs_[&kernel]) {
      if (program->constants() == constants) return program;
    }
    auto program = std::make_shared<Program>(device_, library, kernel, constants);
    programs_[&kernel].push_back(program);
    return program;
  }

  // Memory that is freed now need not be freed when somebody waits for the end.
  static void keep_memory_alone(Running& running) {
    const auto keep = [&](BoundBuffer& buffer) {
      if (buffer.allocation) running.memory.push_back(std::move(buffer.allocation));
    };
    for (Command& command : running.commands) {
      for (BoundBuffer& buffer : command.dispatch.buffers) keep(buffer);
      for (BoundBuffer* buffer : {&command.copy.from, &command.copy.to, &command.fill.to}) keep(*buffer);
    }
    running.commands.clear();
    std::ranges::sort(running.memory);
    const auto repeated = std::ranges::unique(running.memory);
    running.memory.erase(repeated.begin(), repeated.end());
  }

  // Launches all commands, between two events.
  void launch(Running& running) {
    running.start = timing_.take();
    running.end = timing_.take();
    running.completion.start_seconds = now();
    try {
      METAL_EMULATOR_CALL(cuEventRecord, running.start, stream_);
      if (timed_ || !has_only_dispatches(running.commands)) {
        launch_in_order(running);
      } else {
        // The GPU begins with the first ones while the graph of the others is brought up to date.
        const std::size_t ahead = end_of_stage(running.commands, kLaunchedAhead);
        launch_stages(prepare_all(running, 0, ahead));
        std::vector<Launch> others = prepare_all(running, ahead, running.commands.size());
        if (!as_graphs_ || !graphs_.run(others, stream_)) launch_stages(others);
      }
      if (timed_) mark(running);
    } catch (const std::exception& error) {
      running.completion.error = error.what();
    }
    for (const Address address : running.bytes) Driver::get().cuMemFreeAsync(address, stream_);
    Driver::get().cuEventRecord(running.end, stream_);
  }

  static bool has_only_dispatches(const std::vector<Command>& commands) {
    return std::all_of(commands.begin(), commands.end(),
                       [](const Command& command) { return command.kind == Command::Kind::kDispatch; });
  }

  void launch_in_order(Running& running) {
    std::vector<Launch> launches;
    for (const Command& command : running.commands) {
      switch (command.kind) {
        case Command::Kind::kCopy:
          METAL_EMULATOR_CALL(cuMemcpyAsync, address_of(command.copy.to), address_of(command.copy.from),
                              command.copy.bytes, stream_);
          break;
        case Command::Kind::kFill:
          METAL_EMULATOR_CALL(cuMemsetD8Async, address_of(command.fill.to), command.fill.value,
                              command.fill.bytes, stream_);
          break;
        case Command::Kind::kDispatch:
          launches.clear();
          prepare(running, command.dispatch, 0, launches);
          if (timed_) mark(running);
          for (const Launch& launch : launches) start(launch, stream_);
          break;
      }
    }
  }

  // The first command after the barrier that follows `count` commands.
  static std::size_t end_of_stage(const std::vector<Command>& commands, std::size_t count) {
    std::size_t end = std::min(count, commands.size());
    while (end < commands.size() && !commands[end].after_barrier) end++;
    return end;
  }

  // Of commands that are all dispatches; those without a barrier between them are of one stage.
  std::vector<Launch> prepare_all(Running& running, std::size_t begin, std::size_t end) {
    std::vector<Launch> launches;
    launches.reserve(end - begin);
    std::size_t stage = 0;
    for (std::size_t i = begin; i < end; i++) {
      stage += running.commands[i].after_barrier;
      prepare(running, running.commands[i].dispatch, stage, launches);
    }
    return launches;
  }

  // Those of a stage on as many streams as there are.
  void launch_stages(const std::vector<Launch>& launches) {
    for (std::size_t begin = 0; begin < launches.size();) {
      std::size_t end = begin + 1;
      while (end < launches.size() && launches[end].stage == launches[begin].stage) end++;
      launch_overlapping({&launches[begin], end - begin});
      begin = end;
    }
  }

  void launch_overlapping(std::span<const Launch> launches) {
    if (launches.size() == 1) return start(launches[0], stream_);
    const Event fork = ordering_.take();
    METAL_EMULATOR_CALL(cuEventRecord, fork, stream_);
    const std::size_t streams = std::min(kSideStreams, launches.size() - 1);
    for (std::size_t i = 0; i < streams; i++) {
      METAL_EMULATOR_CALL(cuStreamWaitEvent, side_streams_[i], fork, 0);
    }
    ordering_.put_back(fork);
    for (std::size_t i = 0; i < launches.size(); i++) {
      const std::size_t place = i % (streams + 1);
      start(launches[i], place == 0 ? stream_ : side_streams_[place - 1]);
    }
    for (std::size_t i = 0; i < streams; i++) {
      const Event join = ordering_.take();
      METAL_EMULATOR_CALL(cuEventRecord, join, side_streams_[i]);
      METAL_EMULATOR_CALL(cuStreamWaitEvent, stream_, join, 0);
      ordering_.put_back(join);
    }
  }

  void mark(Running& running) {
    running.marks.push_back(timing_.take());
    METAL_EMULATOR_CALL(cuEventRecord, running.marks.back(), stream_);
  }

  static Address address_of(const BoundBuffer& buffer) {
    return buffer.allocation ? buffer.allocation->device_address + buffer.offset : 0;
  }

  [[noreturn]] static void fail(const DispatchCommand& command, const std::string& why) {
    throw std::runtime_error("dispatch " + std::to_string(command.number) + ", kernel '" +
                             command.pipeline->kernel->name + "': " + why);
  }

  // Puts the bytes of setBytes where a kernel takes them by address.
  Address upload(Running& running, const std::vector<std::byte>& bytes) {
    Address address = 0;
    METAL_EMULATOR_CALL(cuMemAllocAsync, &address, bytes.size(), stream_);
    running.bytes.push_back(address);
    METAL_EMULATOR_CALL(cuMemcpyHtoDAsync_v2, address, bytes.data(), bytes.size(), stream_);
    return address;
  }

  // Adds the launches of a dispatch.
  void prepare(Running& running, const DispatchCommand& command, std::size_t stage,
               std::vector<Launch>& launches) {
    DispatchStatistics& statistics = running.completion.statistics.emplace_back();
    statistics.threads =
        command.threads.x ? volume(command.threads) : volume(command.grid) * volume(command.group);
    const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
    const ParameterLayout& layout = pipeline.program->layout();
    const std::span<const KernelArgument> arguments = pipeline.kernel->arguments;
    if (layout.bytes > kMaxParameterBytes) fail(command, "its arguments exceed 4096 bytes");

    // Parameters. A value that is bound as a buffer needs the variant with addresses.
    Variant variant;
    for (std::size_t i = 0; i < arguments.size(); i++) {
      const BoundBuffer* bound = bound_to(command, arguments[i]);
      if (layout.places[i].value && bound && bound->allocation) variant.values = false;
    }
    std::vector<std::byte> parameters(layout.bytes);
    std::uint32_t threadgroup_bytes = 0;
    for (std::size_t i = 0; i < arguments.size(); i++) {
      std::uint64_t slot = 0;
      const BoundBuffer* bound = bound_to(command, arguments[i]);
      if (arguments[i].space == KernelArgument::Space::kThreadgroup) {
        slot = threadgroup_bytes;
        const auto index = static_cast<std::size_t>(arguments[i].index);
        if (index < command.threadgroup_bytes.size())
          threadgroup_bytes += static_cast<std::uint32_t>(command.threadgroup_bytes[index]);
      } else if (bound && bound->allocation) {
        slot = address_of(*bound);
      } else if (bound && !bound->bytes.empty()) {
        if (variant.values && layout.places[i].value) {
          std::memcpy(parameters.data() + layout.places[i].value, bound->bytes.data(),
                      std::min(bound->bytes.size(), arguments[i].element_bytes));
        } else {
          slot = upload(running, bound->bytes);
        }
      }
      std::memcpy(parameters.data() + layout.places[i].slot, &slot, sizeof slot);
    }

    Geometry geometry;
    geometry.groups = to_vec3(command.grid);
    geometry.group_threads = to_vec3(command.group);
    geometry.threads = command.threads.x
                           ? to_vec3(command.threads)
                           : Vec3{command.grid.x * command.group.x, command.grid.y * command.group.y,
                                  command.grid.z * command.group.z};
    const std::vector<Region> regions = regions_of(command);
    for (const Region& region : regions) {
      if (region.groups.y > kMaxGridYZ || region.groups.z > kMaxGridYZ || region.threads.z > kMaxGroupZ) {
        fail(command,
             "a CUDA grid has at most 65535 threadgroups in y and z, and a threadgroup 64 threads in z");
      }
      geometry.first_group = to_vec3(region.first);
      std::memcpy(parameters.data(), &geometry, sizeof geometry);
      variant.partial = volume(region.threads) % kSimdWidth != 0;
      const bool usual = variant == Variant{};
      launches.push_back({.function = usual ? pipeline.function : pipeline.program->function(variant),
                          .groups = region.groups,
                          .threads = region.threads,
                          .threadgroup_bytes = threadgroup_bytes,
                          .command = &command,
                          .stage = stage,
                          .parameters = &region == &regions.back() ? std::move(parameters) : parameters});
    }
  }

  void start(const Launch& launch, Stream stream) {
    LaunchAttribute overlap{};
    overlap.id = kSerialization;
    overlap.value = 1;
    const LaunchConfig config = {
        launch.groups.x,  launch.groups.y,          launch.groups.z, launch.threads.x, launch.threads.y,
        launch.threads.z, launch.threadgroup_bytes, stream,          &overlap,         overlaps_ ? 1u : 0u};
    // The driver copies the parameters.
    void* parameters[] = {const_cast<std::byte*>(launch.parameters.data())};
    const Result result = Driver::get().cuLaunchKernelEx(&config, launch.function, parameters, nullptr);
    if (result != 0) fail(*launch.command, "the launch failed: " + describe(result));
  }

  static const BoundBuffer* bound_to(const DispatchCommand& command, const KernelArgument& argument) {
    const auto index = static_cast<std::size_t>(argument.index);
    const bool buffer = argument.space != KernelArgument::Space::kThreadgroup;
    return buffer && index < command.buffers.size() ? &command.buffers[index] : nullptr;
  }

  // Waits for submissions in their order.
  void serve() {
    device_.enter();
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || !running_.empty(); });
      if (running_.empty()) return;  // whatever was submitted has run
      Running running = std::move(running_.front());
      running_.pop_front();
      lock.unlock();
      Completion completion = finish(running);
      auto done = std::move(running.done);
      running = {};  // buffers are released before the caller hears of it
      done(std::move(completion));
      done = nullptr;
      lock.lock();
    }
  }

  Completion finish(Running& running) {
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
    for (const Event event : running.marks) timing_.put_back(event);
    timing_.put_back(running.start);
    timing_.put_back(running.end);
    return completion;
  }

  const Device device_;
  const std::unique_ptr<Executor> libraries_;
  const bool filled_, timed_, as_graphs_;
  const bool overlaps_ = device_.capability() >= 90 && !timed_;  // kernels wait by themselves: see Program
  Graphs graphs_{overlaps_};
  Stream stream_ = nullptr;
  std::array<Stream, kSideStreams> side_streams_{};
  Events timing_{kWithTime}, ordering_{kWithoutTime};
  std::mutex launch_mutex_;

  std::mutex programs_mutex_;
  std::map<const Kernel*, std::vector<std::shared_ptr<Program>>> programs_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Running> running_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Executor> make_cuda_executor() {
  return std::make_unique<cuda::CudaExecutor>();
}

}  // namespace metal_emulator
