#include "library.h"

#include <dlfcn.h>

#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace metal_emulator {
namespace cpu {
namespace {

// A library for the Metal classes. Lives as long as the process.
struct Loaded {
  ShaderLibrary library{};
  std::vector<Kernel> kernels;
  std::deque<KernelEntry> entries;
};

// Known libraries, by name and text. Plain and checked variants of a source are two objects of the same name;
// the first one is kept here until the other is registered.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string_view, std::string_view>, Loaded*> by_text;
  std::vector<const ShaderLibrary*> linked;
};

void fill(Loaded& loaded, const abi::Library& table) {
  for (abi::u32 i = 0; i < table.kernel_count; i++) {
    const abi::Kernel& kernel = table.kernels[i];
    loaded.entries.emplace_back();
    loaded.kernels.push_back({.name = kernel.name,
                              .arguments = {kernel.arguments, kernel.argument_count},
                              .entry = &loaded.entries.back(),
                              .selected_by = kernel.selected_by});
  }
  loaded.library = {.name = table.name,
                    .source = {table.source, table.source_bytes},
                    .kernels = loaded.kernels,
                    .guard = table.guard,
                    .selectors = {table.selectors, table.selector_count},
                    .metal_version = table.metal_version};
}

}  // namespace

const ShaderLibrary* add_library(const abi::Library& table, bool linked) {
  Registry& registry = the_only<Registry>();
  std::lock_guard lock(registry.mutex);
  Loaded*& loaded = registry.by_text[{table.name, {table.source, table.source_bytes}}];
  if (!loaded) {
    loaded = new Loaded;
    fill(*loaded, table);
    if (linked) registry.linked.push_back(&loaded->library);
  }
  for (abi::u32 i = 0; i < table.kernel_count; i++) {
    KernelEntry& entry = loaded->entries[i];
    (table.checked ? entry.checked : entry.plain) = &table.kernels[i];
  }
  return &loaded->library;
}

}  // namespace cpu

std::vector<const ShaderLibrary*> registered_libraries() {
  cpu::Registry& registry = the_only<cpu::Registry>();
  std::lock_guard lock(registry.mutex);
  return registry.linked;
}

}  // namespace metal_emulator

void metal_emulator_register(const metal_emulator::abi::Library* library) {
  metal_emulator::cpu::add_library(*library, true);
}

const metal_emulator::ShaderLibrary* metal_emulator::cpu::load_library(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(path + ": " + dlerror());
  using Libraries = const abi::Library* const* (*)(abi::u32* count);
  const auto libraries = reinterpret_cast<Libraries>(dlsym(handle, "metal_emulator_libraries"));
  if (!libraries) {
    dlclose(handle);
    throw std::runtime_error(path + ": not a library of compiled shaders");
  }
  abi::u32 count = 0;
  const abi::Library* const* tables = libraries(&count);
  const ShaderLibrary* result = nullptr;
  for (abi::u32 i = 0; i < count; i++) result = add_library(*tables[i], false);
  if (!result) throw std::runtime_error(path + ": a library without shaders");
  return result;
}
