// Runs single kernels for tests, without the Metal classes: a C interface to the executor on CPU threads, for
// ctypes. Linked with cpu/*.cpp, metal/memory.cpp and compiled shaders into a shared library.
#include <cstring>
#include <future>
#include <string>

#include "../executor.h"

namespace metal_emulator {
namespace {

std::shared_ptr<const Pipeline> prepare(Executor& executor, const std::string& name) {
  for (const ShaderLibrary* library : registered_libraries()) {
    for (const Kernel& kernel : library->kernels) {
      if (kernel.name == name) return executor.prepare(*library, kernel);
    }
  }
  throw std::invalid_argument("no kernel '" + name + "'");
}

}  // namespace

}  // namespace metal_emulator

using namespace metal_emulator;

// Runs one threadgroup on `count` buffers, whose contents it copies from and to `data`. Returns null, or the
// message of an error.
extern "C" __attribute__((visibility("default"))) const char* runner_run(const char* kernel,
                                                                         std::uint32_t threads,
                                                                         std::uint64_t seed,
                                                                         std::uint32_t count, void** data,
                                                                         const std::uint64_t* bytes) {
  static Executor& executor = *make_cpu_executor().release();  // its threads outlive static objects
  static std::string error;
  executor.configure({.workers = 2, .seed = seed});
  Command command;
  try {
    command.dispatch.pipeline = prepare(executor, kernel);
  } catch (const std::exception& e) {
    return (error = e.what()).c_str();
  }
  command.dispatch.grid = {1, 1, 1};
  command.dispatch.group = {threads, 1, 1};
  std::vector<BoundBuffer> buffers(count);
  for (std::uint32_t i = 0; i < count; i++) {
    buffers[i].allocation = executor.allocate(bytes[i], true);
    std::memcpy(buffers[i].allocation->host(), data[i], bytes[i]);
  }
  command.dispatch.buffers = buffers;
  std::promise<Completion> promise;
  executor.submit({command}, [&](Completion result) { promise.set_value(std::move(result)); });
  error = promise.get_future().get().error;
  for (std::uint32_t i = 0; i < count; i++) {
    std::memcpy(data[i], buffers[i].allocation->host(), bytes[i]);
    if (!buffers[i].allocation->intact()) error = "a write past the end of buffer " + std::to_string(i);
  }
  return error.empty() ? nullptr : error.c_str();
}
