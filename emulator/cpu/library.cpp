#include "library.h"

#include <deque>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "../executor.h"

namespace metal_emulator {
namespace cpu {
namespace {

// A library for the Metal classes. Lives as long as the process.
struct Loaded {
  ShaderLibrary library{};
  std::vector<Kernel> kernels;
  std::deque<KernelEntry> entries;
};

// Libraries by name and text. Plain and checked variants of a source are two tables of the same name.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string_view, std::string_view>, Loaded*> by_text;
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
}  // namespace cpu

std::vector<const ShaderLibrary*> registered_libraries() {
  cpu::Registry& registry = the_only<cpu::Registry>();
  std::lock_guard lock(registry.mutex);
  std::vector<const ShaderLibrary*> libraries;
  for (const auto& [text, loaded] : registry.by_text) libraries.push_back(&loaded->library);
  return libraries;
}

}  // namespace metal_emulator

void metal_emulator_register(const metal_emulator::abi::Library* table) {
  using namespace metal_emulator;
  cpu::Registry& registry = the_only<cpu::Registry>();
  std::lock_guard lock(registry.mutex);
  cpu::Loaded*& loaded = registry.by_text[{table->name, {table->source, table->source_bytes}}];
  if (!loaded) {
    loaded = new cpu::Loaded;
    cpu::fill(*loaded, *table);
  }
  for (abi::u32 i = 0; i < table->kernel_count; i++) {
    cpu::KernelEntry& entry = loaded->entries[i];
    (table->checked ? entry.checked : entry.plain) = &table->kernels[i];
  }
}
