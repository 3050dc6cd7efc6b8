// Runs single kernels for tests, without the Metal classes: a C interface to the executor on CPU threads, for
// ctypes. Linked with cpu/*.cpp, metal/memory.cpp and compiled shaders into a shared library.
#include <cstring>
#include <future>
#include <string>

#include "../executor.h"

namespace metal_emulator {
namespace {

std::vector<const ShaderLibrary*>& libraries() {
  static auto* instance = new std::vector<const ShaderLibrary*>;
  return *instance;
}

}  // namespace

void register_library(const ShaderLibrary* library) {
  libraries().push_back(library);
}
std::vector<const ShaderLibrary*> registered_libraries() {
  return libraries();
}

}  // namespace metal_emulator

using namespace metal_emulator;

extern "C" {

struct RunnerBuffer {
  void* data;  // null: nothing is bound at this index
  std::uint64_t bytes;
  std::int32_t is_bytes;  // 1: bound as by setBytes, 0: a copy in guarded memory
};

struct RunnerDispatch {
  const char* kernel;
  std::uint32_t grid[3], group[3];
  RunnerBuffer* buffers;
  std::uint32_t buffer_count;
  const std::uint64_t* threadgroup_bytes;
  std::uint32_t threadgroup_count;
  std::uint64_t seed;
  std::uint32_t workers, checked;
  // Results.
  std::uint64_t threads_run, barriers, static_threadgroup_bytes, max_threads;
  char error[4096];  // empty: all went well
};

__attribute__((visibility("default"))) void runner_run(RunnerDispatch* run) {
  static Executor& executor = *make_cpu_executor().release();  // its threads outlive static objects
  run->error[0] = 0;
  const auto fail = [&](const std::string& message) {
    std::snprintf(run->error, sizeof run->error, "%s", message.c_str());
  };
  const ShaderLibrary* library = nullptr;
  const Kernel* kernel = nullptr;
  for (const ShaderLibrary* candidate : registered_libraries()) {
    for (const Kernel& k : candidate->kernels) {
      if (std::strcmp(k.name, run->kernel) == 0) library = candidate, kernel = &k;
    }
  }
  if (!kernel) return fail(std::string("no kernel '") + run->kernel + "'");
  executor.configure({.workers = run->workers, .seed = run->seed, .checked = run->checked != 0});
  Command command;
  DispatchCommand& dispatch = command.dispatch;
  try {
    dispatch.pipeline = executor.prepare(*library, *kernel);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  run->static_threadgroup_bytes = dispatch.pipeline->static_threadgroup_bytes;
  run->max_threads = dispatch.pipeline->max_threads;
  const auto dim = [](const std::uint32_t* v) { return Dim3{v[0], v[1], v[2]}; };
  dispatch.grid = dim(run->grid);
  dispatch.group = dim(run->group);
  for (std::uint32_t i = 0; i < run->buffer_count; i++) {
    const RunnerBuffer& given = run->buffers[i];
    BoundBuffer bound;
    if (given.data && !given.is_bytes) {
      bound.allocation = executor.allocate(given.bytes, true);
      std::memcpy(bound.allocation->host(), given.data, given.bytes);
    } else if (given.data) {
      const auto* bytes = static_cast<const std::byte*>(given.data);
      bound.bytes.assign(bytes, bytes + given.bytes);
    }
    dispatch.buffers.push_back(std::move(bound));
  }
  for (std::uint32_t i = 0; i < run->threadgroup_count; i++) {
    dispatch.threadgroup_bytes.push_back(run->threadgroup_bytes[i]);
  }
  const std::vector<BoundBuffer> buffers = dispatch.buffers;
  std::promise<Completion> promise;
  executor.submit({command}, [&](Completion result) { promise.set_value(std::move(result)); });
  const Completion completion = promise.get_future().get();
  fail(completion.error);
  for (const DispatchStatistics& statistics : completion.statistics) {
    run->threads_run = statistics.threads;
    run->barriers = statistics.barriers;
  }
  for (std::uint32_t i = 0; i < run->buffer_count; i++) {
    const RunnerBuffer& given = run->buffers[i];
    if (given.data && !given.is_bytes) std::memcpy(given.data, buffers[i].allocation->host(), given.bytes);
    if (buffers[i].allocation && !buffers[i].allocation->intact()) {
      fail("a write past the end of buffer " + std::to_string(i));
    }
  }
}

}  // extern "C"
