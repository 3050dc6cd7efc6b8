// The libraries that compiled shaders register.
#include <map>
#include <mutex>
#include <utility>

#include "../executor.h"

namespace metal_emulator {
namespace {

// By name and text. Plain and checked variants of a source are two libraries.
struct Registry {
  using Libraries = std::map<std::pair<std::string_view, std::string_view>, const ShaderLibrary*>;

  std::mutex mutex;
  Libraries plain, checked;

  Libraries& variants(bool are_checked) { return are_checked ? checked : plain; }
};

}  // namespace

std::vector<const ShaderLibrary*> registered_libraries() {
  auto& registry = the_only<Registry>();
  std::lock_guard lock(registry.mutex);
  std::vector<const ShaderLibrary*> libraries;
  for (const auto& [text, library] : registry.plain) libraries.push_back(library);
  return libraries;
}

const ShaderLibrary* checked_variant(const ShaderLibrary& library) {
  auto& registry = the_only<Registry>();
  std::lock_guard lock(registry.mutex);
  const auto found = registry.checked.find({library.name, source_of(library)});
  return found == registry.checked.end() ? nullptr : found->second;
}

}  // namespace metal_emulator

void metal_emulator_register(const metal_emulator::abi::Library* library) {
  using namespace metal_emulator;
  auto& registry = the_only<Registry>();
  std::lock_guard lock(registry.mutex);
  registry.variants(library->checked)[{library->name, source_of(*library)}] = library;
}
