// The executor on an NVIDIA GPU. The thread that commits a command buffer launches its commands on a stream;
// another thread waits for their end.
#include "../executor.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "device.h"
#include "program.h"

namespace metal_emulator {
namespace cuda {
namespace {

constexpr std::uint32_t kMaxGridYZ = 65535, kMaxGroupZ = 64;  // of CUDA
constexpr std::size_t kMaxParameterBytes = 4096;
constexpr std::size_t kSideStreams = 4;  // for dispatches that may overlap

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
        timed_(is_set("METAL_EMULATOR_TIMED", false)) {
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
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    running_.push_back(std::move(running));
    wake_.notify_one();
  }

 private:
  // A submission on the GPU.
  struct Running {
    std::vector<Command> commands;
    std::function<void(Completion)> done;
    Completion completion;
    Event start = nullptr, end = nullptr;
    std::vector<Event> marks;    // in timed mode, before each dispatch and behind the last
    std::vector<Address> bytes;  // of setBytes that kernels find behind an address
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

  // Launches all commands, between two events.
  void launch(Running& running) {
    running.start = timing_.take();
    running.end = timing_.take();
    running.completion.start_seconds = now();
    try {
      METAL_EMULATOR_CALL(cuEventRecord, running.start, stream_);
      const std::vector<Command>& commands = running.commands;
      for (std::size_t begin = 0; begin < commands.size();) {
        std::size_t end = begin + 1;
        if (!timed_) {
          while (end < commands.size() && !commands[end].after_barrier) end++;
        }
        launch_overlapping(running, begin, end);
        begin = end;
      }
      if (timed_) mark(running);
    } catch (const std::exception& error) {
      running.completion.error = error.what();
    }
    for (const Address address : running.bytes) Driver::get().cuMemFreeAsync(address, stream_);
    Driver::get().cuEventRecord(running.end, stream_);
  }

  // Commands without a barrier between them: one after another on as many streams as there are.
  void launch_overlapping(Running& running, std::size_t begin, std::size_t end) {
    if (end - begin == 1) return launch_command(running, running.commands[begin], stream_);
    const Event fork = ordering_.take();
    METAL_EMULATOR_CALL(cuEventRecord, fork, stream_);
    const std::size_t streams = std::min(kSideStreams, end - begin - 1);
    for (std::size_t i = 0; i < streams; i++) {
      METAL_EMULATOR_CALL(cuStreamWaitEvent, side_streams_[i], fork, 0);
    }
    ordering_.put_back(fork);
    for (std::size_t i = begin; i < end; i++) {
      const std::size_t place = (i - begin) % (streams + 1);
      launch_command(running, running.commands[i], place == 0 ? stream_ : side_streams_[place - 1]);
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

  void launch_command(Running& running, const Command& command, Stream stream) {
    switch (command.kind) {
      case Command::Kind::kCopy:
        METAL_EMULATOR_CALL(cuMemcpyAsync, address_of(command.copy.to), address_of(command.copy.from),
                            command.copy.bytes, stream);
        break;
      case Command::Kind::kFill:
        METAL_EMULATOR_CALL(cuMemsetD8Async, address_of(command.fill.to), command.fill.value,
                            command.fill.bytes, stream);
        break;
      case Command::Kind::kDispatch:
        if (timed_) mark(running);
        dispatch(running, command.dispatch, stream);
        DispatchStatistics statistics;
        const Dim3 threads = command.dispatch.threads;
        statistics.threads =
            threads.x ? volume(threads) : volume(command.dispatch.grid) * volume(command.dispatch.group);
        running.completion.statistics.push_back(std::move(statistics));
        break;
    }
  }

  static Address address_of(const BoundBuffer& buffer) {
    return buffer.allocation ? buffer.allocation->device_address + buffer.offset : 0;
  }

  // Puts the bytes of setBytes where a kernel finds them behind an address.
  Address upload(Running& running, const std::vector<std::byte>& bytes, Stream stream) {
    Address address = 0;
    METAL_EMULATOR_CALL(cuMemAllocAsync, &address, bytes.size(), stream);
    running.bytes.push_back(address);
    METAL_EMULATOR_CALL(cuMemcpyHtoDAsync_v2, address, bytes.data(), bytes.size(), stream);
    return address;
  }

  void dispatch(Running& running, const DispatchCommand& command, Stream stream) {
    const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
    const ParameterLayout& layout = pipeline.program->layout();
    const std::span<const KernelArgument> arguments = pipeline.kernel->arguments;
    const auto fail = [&](const std::string& why) {
      throw std::runtime_error("dispatch " + std::to_string(command.number) + ", kernel '" +
                               pipeline.kernel->name + "': " + why);
    };
    if (layout.bytes > kMaxParameterBytes) fail("its arguments exceed 4096 bytes");

    // Parameters. A value that is bound as a buffer needs the variant with addresses.
    Variant variant;
    for (std::size_t i = 0; i < arguments.size(); i++) {
      const BoundBuffer* bound = bound_to(command, arguments[i]);
      if (layout.places[i].value && bound && bound->allocation) variant.values = false;
    }
    alignas(16) std::array<std::byte, kMaxParameterBytes> parameters;
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
          slot = upload(running, bound->bytes, stream);
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
    LaunchAttribute overlap{};
    overlap.id = kSerialization;
    overlap.value = 1;
    const bool overlaps = device_.capability() >= 90 && !timed_;
    for (const Region& region : regions_of(command)) {
      if (region.groups.y > kMaxGridYZ || region.groups.z > kMaxGridYZ || region.threads.z > kMaxGroupZ) {
        fail("a CUDA grid has at most 65535 threadgroups in y and z, and a threadgroup 64 threads in z");
      }
      geometry.first_group = to_vec3(region.first);
      std::memcpy(parameters.data(), &geometry, sizeof geometry);
      variant.partial = volume(region.threads) % kSimdWidth != 0;
      const bool usual = variant == Variant{};
      const Function function = usual ? pipeline.function : pipeline.program->function(variant);
      const LaunchConfig config = {region.groups.x,  region.groups.y,   region.groups.z,   region.threads.x,
                                   region.threads.y, region.threads.z,  threadgroup_bytes, stream,
                                   &overlap,         overlaps ? 1u : 0u};
      void* pointers[] = {parameters.data()};
      const Result result = Driver::get().cuLaunchKernelEx(&config, function, pointers, nullptr);
      if (result != 0) fail("the launch failed: " + describe(result));
    }
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
      completion.error = "a kernel failed on the GPU, which cannot go on: " + describe(result);
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
  const bool filled_, timed_;
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
