#include "launches.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>

namespace metal_emulator::cuda {
namespace {

constexpr std::uint32_t kMaxGridYZ = 65535, kMaxGroupZ = 64;  // limits of CUDA
constexpr std::size_t kMaxParameterBytes = 4096;

const BoundBuffer* bound_to(const DispatchCommand& command, const KernelArgument& argument) {
  const auto index = static_cast<std::size_t>(argument.index);
  const bool buffer = argument.space != KernelArgument::Space::kThreadgroup;
  return buffer && index < command.buffers.size() ? &command.buffers[index] : nullptr;
}

}  // namespace

Address address_of(const BoundBuffer& buffer) {
  return buffer.allocation ? buffer.allocation->device_address + buffer.offset : 0;
}

void fail(const DispatchCommand& command, const std::string& why) {
  throw std::runtime_error(describe(command) + ": " + why);
}

Launch make_launch(const DispatchCommand& command, std::size_t stage, const Upload& upload) {
  const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
  const ParameterLayout& layout = pipeline.program->layout();
  const std::span<const KernelArgument> arguments = pipeline.kernel->arguments;
  if (layout.bytes > kMaxParameterBytes) fail(command, "its arguments exceed 4096 bytes");

  // Builds the parameters. A value that is bound as a buffer needs the variant with addresses.
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
        slot = upload(bound->bytes);
      }
    }
    std::memcpy(parameters.data() + layout.places[i].slot, &slot, sizeof slot);
  }

  if (command.grid.y > kMaxGridYZ || command.grid.z > kMaxGridYZ || command.group.z > kMaxGroupZ)
    fail(command, "a CUDA grid has at most 65535 threadgroups in y and z, and a threadgroup 64 threads in z");
  variant.partial = command.group.volume() % kSimdWidth != 0;
  return {.function = variant == Variant{} ? pipeline.function : pipeline.program->function(variant),
          .groups = command.grid,
          .threads = command.group,
          .threadgroup_bytes = threadgroup_bytes,
          .command = &command,
          .stage = stage,
          .parameters = std::move(parameters)};
}

}  // namespace metal_emulator::cuda
