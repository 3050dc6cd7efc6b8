#include "driver.h"

#include <dlfcn.h>

namespace metal_emulator::cuda {
namespace {

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("METAL_EMULATOR_EXECUTOR=cuda: ") + dlerror());
  Driver driver{};
  std::string missing;  // the last missing function
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) missing = name;
  };
#define METAL_EMULATOR_DRIVER_FIND(name, ...) find(driver.name, #name);
  METAL_EMULATOR_DRIVER_FUNCTIONS(METAL_EMULATOR_DRIVER_FIND)
  if (!missing.empty()) {
    throw std::runtime_error("METAL_EMULATOR_EXECUTOR=cuda: the NVIDIA driver has no " + missing +
                             ": version 520 or newer is needed");
  }
  METAL_EMULATOR_DRIVER_GRAPH_FUNCTIONS(METAL_EMULATOR_DRIVER_FIND)
#undef METAL_EMULATOR_DRIVER_FIND
  driver.has_graphs = missing.empty();
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = load();
  return driver;
}

std::string describe(Result result) {
  const char *name = nullptr, *text = nullptr;
  if (Driver::get().cuGetErrorName(result, &name) != 0 || !name) return "error " + std::to_string(result);
  Driver::get().cuGetErrorString(result, &text);
  return std::string(name) + (text ? std::string(", ") + text : std::string());
}

void check(Result result, const char* call) {
  if (result != 0) throw std::runtime_error(std::string(call) + ": " + describe(result));
}

}  // namespace metal_emulator::cuda
