// The executor on CPU threads: runs command lists in order on a separate thread, and the threadgroups of each
// dispatch on a pool of host threads.
#include "../executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "../submissions.h"
#include "threadgroup.h"

namespace metal_emulator {
namespace cpu {
namespace {

struct CpuPipeline final : Pipeline {
  const Kernel* checked = nullptr;  // null if the shaders were built without checks
};

// Time after which other threads help with a dispatch, unless the options set a number of threads: most
// dispatches end before other threads have woken up. ThreadSanitizer finds races between threadgroups only on
// different threads.
#if METAL_EMULATOR_TSAN
constexpr double kSecondsAlone = 0;
#else
constexpr double kSecondsAlone = 500e-6;
#endif

std::byte* address_of(const BoundBuffer& buffer) {
  if (buffer.allocation) return static_cast<std::byte*>(buffer.allocation->host()) + buffer.offset;
  return const_cast<std::byte*>(buffer.bytes.data());
}

// In checked mode, bindings of one allocation that is written through one of them have distinct addresses, so
// that each access can be attributed to its binding.
std::byte* distinct_address(const Kernel& kernel, const DispatchCommand& command,
                            const KernelArgument& argument) {
  const BoundBuffer& own = command.buffers[static_cast<std::size_t>(argument.index)];
  std::size_t before = 0;
  bool shared = false, written = argument.writable;
  for (const KernelArgument& other : kernel.arguments) {
    const auto index = static_cast<std::size_t>(other.index);
    if (other.space == KernelArgument::Space::kThreadgroup || other.index == argument.index ||
        index >= command.buffers.size() || command.buffers[index].allocation != own.allocation)
      continue;
    shared = true;
    written |= other.writable;
    before += other.index < argument.index;
  }
  if (!own.allocation || !shared || !written || before == 0) return address_of(own);
  auto* view = static_cast<std::byte*>(own.allocation->view(before));
  return view ? view + own.offset : address_of(own);
}

// Threads that run threadgroups. The caller of `run` takes part as worker 0.
class Pool {
 public:
  // Calls `task` once on each of `workers` threads, with the index of the worker.
  void run(unsigned workers, const std::function<void(unsigned)>& task) {
    while (threads_.size() + 1 < workers) {
      const auto number = static_cast<unsigned>(threads_.size()) + 1;
      threads_.emplace_back([this, number](const std::stop_token& stop) { work(stop, number); });
    }
    {
      std::lock_guard lock(mutex_);
      task_ = &task;
      wanted_ = workers - 1;
      running_ = wanted_;
      generation_++;
    }
    if (workers > 1) wake_.notify_all();
    task(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
    task_ = nullptr;
  }

 private:
  void work(const std::stop_token& stop, unsigned number) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (wake_.wait(lock, stop, [&] { return generation_ != seen && number <= wanted_ && task_; })) {
      seen = generation_;
      const auto* task = task_;
      lock.unlock();
      (*task)(number);
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_, done_;
  const std::function<void(unsigned)>* task_ = nullptr;
  unsigned wanted_ = 0, running_ = 0;
  std::uint64_t generation_ = 0;
  std::vector<std::jthread> threads_;
};

// The order in which threadgroups start: by index or, with a seed, a permutation by a stride coprime to their
// number.
class GroupOrder {
 public:
  GroupOrder(Dim3 grid, std::uint64_t seed) : grid_(grid), count_(grid.volume()) {
    if (seed == 0) return;
    offset_ = seed * 0x9e3779b97f4a7c15ull % count_;
    stride_ = (seed * 0xbf58476d1ce4e5b9ull >> 8) % count_;
    while (std::gcd(stride_, count_) != 1) stride_++;
  }
  Dim3 operator[](std::uint64_t n) const {
    const auto index =
        static_cast<std::uint64_t>((static_cast<unsigned __int128>(n) * stride_ + offset_) % count_);
    return {static_cast<std::uint32_t>(index % grid_.x),
            static_cast<std::uint32_t>(index / grid_.x % grid_.y),
            static_cast<std::uint32_t>(index / grid_.x / grid_.y)};
  }
  std::uint64_t size() const { return count_; }

 private:
  Dim3 grid_;
  std::uint64_t count_, offset_ = 0, stride_ = 1;
};

class CpuExecutor final : public Executor {
 public:
  std::string device_name() const override { return "Metal emulator (CPU)"; }

  void configure(const ExecutorOptions& options) override {
    std::lock_guard lock(mutex_);
    options_ = options;
  }

  std::shared_ptr<Allocation> allocate(std::size_t bytes, bool host_visible) override {
    return allocate_guarded(bytes, host_visible ? 0 : 0xff, true);
  }
  std::shared_ptr<Allocation> wrap(void* memory, std::size_t bytes) override {
    return wrap_memory(memory, bytes, true);
  }

  std::shared_ptr<const Pipeline> prepare(const ShaderLibrary& library, const Kernel& kernel) override {
    auto pipeline = std::make_shared<CpuPipeline>();
    pipeline->library = &library;
    pipeline->kernel = &kernel;
    if (const ShaderLibrary* checked = checked_variant(library))
      pipeline->checked = checked->kernels.data() + (&kernel - library.kernels.data());
    pipeline->static_threadgroup_bytes = kernel.layout->declared;
    pipeline->max_threads = kernel.max_threads ? std::min(kernel.max_threads, kMaxThreads) : kMaxThreads;
    return pipeline;
  }

  void submit(std::vector<Command> commands, std::function<void(Completion)> done) override {
    std::lock_guard lock(mutex_);
    queue_.push({std::move(commands), std::move(done), options_});
  }

 private:
  struct Submission {
    std::vector<Command> commands;
    std::function<void(Completion)> done;
    ExecutorOptions options;
  };

  Completion run(const Submission& submission) {
    Completion completion;
    completion.start_seconds = now();
    std::vector<std::size_t> order = order_of(submission);
    std::vector<DispatchStatistics> statistics(submission.commands.size());
    for (const std::size_t i : order) {
      const Command& command = submission.commands[i];
      switch (command.kind) {
        case Command::Kind::kCopy:
          std::memmove(address_of(command.copy.to), address_of(command.copy.from), command.copy.bytes);
          break;
        case Command::Kind::kFill:
          std::memset(address_of(command.fill.to), command.fill.value, command.fill.bytes);
          break;
        case Command::Kind::kDispatch:
          completion.error = dispatch(command.dispatch, submission.options, statistics[i]);
          break;
      }
      if (!completion.error.empty()) break;
    }
    for (std::size_t i = 0; i < submission.commands.size(); i++) {
      const bool ran = statistics[i].threads > 0;
      if (submission.commands[i].kind == Command::Kind::kDispatch && ran) {
        completion.statistics.push_back(std::move(statistics[i]));
      }
    }
    completion.end_seconds = now();
    return completion;
  }

  // Commands without a barrier between them may run in any order; with a seed, they are shuffled.
  static std::vector<std::size_t> order_of(const Submission& submission) {
    std::vector<std::size_t> order(submission.commands.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (submission.options.seed == 0) return order;
    std::mt19937_64 random(submission.options.seed);
    for (auto begin = order.begin(); begin != order.end();) {
      const auto end = std::find_if(begin + 1, order.end(),
                                    [&](std::size_t i) { return submission.commands[i].after_barrier; });
      std::shuffle(begin, end, random);
      begin = end;
    }
    return order;
  }

  std::string dispatch(const DispatchCommand& command, const ExecutorOptions& options,
                       DispatchStatistics& statistics) {
    const Kernel& kernel = *command.pipeline->kernel;
    const Kernel* checked = static_cast<const CpuPipeline&>(*command.pipeline).checked;
    Work work;
    work.options = options;
    work.options.checked = options.checked && checked;
    work.kernel = work.options.checked ? checked : &kernel;
    work.grid = command.grid;
    work.group = command.group;
    work.label = describe(command);
    for (const KernelArgument& argument : kernel.arguments) {
      const auto index = static_cast<std::size_t>(argument.index);
      if (argument.space == KernelArgument::Space::kThreadgroup) {
        if (index < command.threadgroup_bytes.size())
          work.threadgroup_bytes[index] = command.threadgroup_bytes[index];
        continue;
      }
      if (index >= command.buffers.size()) continue;
      const BoundBuffer& bound = command.buffers[index];
      if (!bound.allocation && bound.bytes.empty()) continue;
      std::byte* address =
          work.options.checked ? distinct_address(kernel, command, argument) : address_of(bound);
      work.buffers[index] = address;
      const auto begin = reinterpret_cast<std::uintptr_t>(address);
      work.bindings.push_back({.begin = begin,
                               .end = begin + bound.length(),
                               .index = argument.index,
                               .name = argument.name,
                               .writable = argument.writable,
                               .offset = bound.allocation ? bound.offset : 0});
    }
    std::sort(work.bindings.begin(), work.bindings.end(),
              [](const Binding& a, const Binding& b) { return a.begin < b.begin; });

    const GroupOrder order(work.grid, options.seed);
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    const auto workers = static_cast<unsigned>(
        std::min<std::uint64_t>(options.workers ? options.workers : cores, order.size()));
    while (runners_.size() < workers) runners_.push_back(std::make_unique<ThreadgroupRunner>());
    std::atomic<std::uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::vector<std::string> errors(workers);
    const auto run_groups = [&](unsigned worker, double until) {
      while (!failed && now() < until) {
        const std::uint64_t n = next++;
        if (n >= order.size()) break;
        errors[worker] = runners_[worker]->run(order[n]);
        if (!errors[worker].empty()) failed = true;
      }
    };
    constexpr double kForever = std::numeric_limits<double>::infinity();
    runners_[0]->begin(work, options.seed * 31);
    run_groups(0, workers == 1 ? kForever : options.workers ? 0 : now() + kSecondsAlone);
    const bool helped = !failed && next < order.size();
    if (helped)
      pool_.run(workers, [&](unsigned worker) {
        if (worker > 0) runners_[worker]->begin(work, options.seed * 31 + worker);
        run_groups(worker, kForever);
        if (worker > 0) runners_[worker]->finish();
      });
    runners_[0]->finish();
    for (unsigned worker = 0; worker < (helped ? workers : 1); worker++) {
      ThreadgroupRunner& runner = *runners_[worker];
      statistics.threads += runner.threads();
      statistics.barriers += runner.barriers();
      runner.accesses().collect(statistics);
    }
    for (std::string& error : errors) {
      if (!error.empty()) return std::move(error);
    }
    return {};
  }

  std::mutex mutex_;
  ExecutorOptions options_;
  Pool pool_;
  std::vector<std::unique_ptr<ThreadgroupRunner>> runners_;
  SubmissionQueue<Submission> queue_{[this](Submission& submission) { return run(submission); }};
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Executor> make_cpu_executor() {
  return std::make_unique<cpu::CpuExecutor>();
}

}  // namespace metal_emulator
