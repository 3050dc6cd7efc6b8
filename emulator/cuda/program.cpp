#include "program.h"

#include <algorithm>
#include <array>
#include <vector>

namespace metal_emulator::cuda {
namespace {

// Images are registered before main, in no particular order.
struct Images {
  std::vector<const Image*> all;
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

}  // namespace

bool register_image(const Image* image) {
  the_only<Images>().all.push_back(image);
  return true;
}

const Image* find_image(std::string_view name, std::string_view source) {
  for (const Image* image : the_only<Images>().all) {
    if (image->name == name && image->source == source) return image;
  }
  return nullptr;
}

ParameterLayout layout_of(const Kernel& kernel) {
  std::vector<Form> forms;
  for (const KernelArgument& argument : kernel.arguments) {
    const bool constant = argument.space == KernelArgument::Space::kConstant;
    forms.push_back(
        {true, is_inline(constant, argument.reference, argument.element_bytes), argument.element_bytes});
  }
  ParameterLayout layout{.places = std::vector<Place>(forms.size())};
  layout.bytes = lay_out(forms.data(), static_cast<unsigned>(forms.size()), layout.places.data());
  return layout;
}

Program::Program(const Device& device, const ShaderLibrary& library, const Kernel& kernel)
    : device_(device), kernel_(kernel), layout_(layout_of(kernel)) {
  const Image* image = find_image(library.name, source_of(library));
  if (!image) {
    throw std::runtime_error(std::string("'") + library.name + "' was not compiled for NVIDIA GPUs");
  }
  modules_ = &image->modules[static_cast<std::size_t>(&kernel - library.kernels.data()) * 2];
}

Function Program::function(Variant variant) {
  const std::lock_guard lock(mutex_);
  const auto [found, added] = functions_.try_emplace(variant, nullptr);
  if (!added && found->second) return found->second;
  return found->second = compile(variant);
}

Function Program::compile(Variant variant) const {
  device_.enter();
  const Module& module = modules_[variant.values ? 0 : 1];
  std::string assembly = module.assembly;
  replace_all(assembly, "%nsmid", variant.partial ? "1" : "0");
  if (device_.capability() >= 90) {
    // The next kernel may be launched while this one runs, and waits on the multiprocessors for its results.
    // It is launched only after this one's own inputs are ready: otherwise later kernels would be launched as
    // well, and occupy the multiprocessors.
    replace_all(assembly, ".target sm_80", ".target sm_90");
    replace_all(assembly, "// await", "griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;");
  }
  std::array<char, 8192> log{};
  std::array<int, 2> options = {kJitErrorLog, kJitErrorLogBytes};
  std::array<void*, 2> values = {log.data(), reinterpret_cast<void*>(log.size())};
  ModuleHandle loaded = nullptr;
  const Result result = Driver::get().cuModuleLoadDataEx(&loaded, assembly.c_str(), options.size(),
                                                         options.data(), values.data());
  if (result != 0) {
    throw std::runtime_error(std::string("kernel '") + kernel_.name + "': the driver does not load it: " +
                             describe(result) + (log[0] ? std::string("\n") + log.data() : std::string()));
  }
  Function function = nullptr;
  METAL_EMULATOR_CALL(cuModuleGetFunction, &function, loaded, module.entry);
  return function;
}

}  // namespace metal_emulator::cuda
