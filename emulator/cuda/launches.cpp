#include "launches.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

namespace metal_emulator::cuda {
namespace {

constexpr std::uint32_t kMaxGridYZ = 65535, kMaxGroupZ = 64;  // of CUDA
constexpr std::size_t kMaxParameterBytes = 4096;

std::uint64_t volume(Dim3 d) {
  return std::uint64_t{d.x} * d.y * d.z;
}

// Part of a dispatch whose threadgroups are of one size.
struct Region {
  Dim3 first, groups, threads;  // threadgroup positions, their number, threads of each
};

// Threadgroups at the far sides of a grid are smaller if it does not divide into whole ones.
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

const BoundBuffer* bound_to(const DispatchCommand& command, const KernelArgument& argument) {
  const auto index = static_cast<std::size_t>(argument.index);
  const bool buffer = argument.space != KernelArgument::Space::kThreadgroup;
  return buffer && index < command.buffers.size() ? &command.buffers[index] : nullptr;
}

}  // namespace

std::uint64_t threads_of(const DispatchCommand& command) {
  return command.threads.x ? volume(command.threads) : volume(command.grid) * volume(command.group);
}

Address address_of(const BoundBuffer& buffer) {
  return buffer.allocation ? buffer.allocation->device_address + buffer.offset : 0;
}

void fail(const DispatchCommand& command, const std::string& why) {
  throw std::runtime_error("dispatch " + std::to_string(command.number) + ", kernel '" +
                           command.pipeline->kernel->name + "': " + why);
}

void add_launches(const DispatchCommand& command, std::size_t stage, const Upload& upload,
                  std::vector<Launch>& launches) {
  const auto& pipeline = static_cast<const CudaPipeline&>(*command.pipeline);
  const ParameterLayout& layout = pipeline.program->layout();
  const std::span<const KernelArgument> arguments = pipeline.kernel->arguments;
  if (layout.bytes > kMaxParameterBytes) fail(command, "its arguments exceed 4096 bytes");

  // Parameters. A value that is bound as a buffer needs the variant with addresses.
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

  Geometry geometry;
  geometry.groups = to_vec3(command.grid);
  geometry.group_threads = to_vec3(command.group);
  geometry.threads = command.threads.x
                         ? to_vec3(command.threads)
                         : Vec3{command.grid.x * command.group.x, command.grid.y * command.group.y,
                                command.grid.z * command.group.z};
  const std::vector<Region> regions = regions_of(command);
  for (const Region& region : regions) {
    if (region.groups.y > kMaxGridYZ || region.groups.z > kMaxGridYZ || region.threads.z > kMaxGroupZ) {
      fail(command,
           "a CUDA grid has at most 65535 threadgroups in y and z, and a threadgroup 64 threads in z");
    }
    geometry.first_group = to_vec3(region.first);
    std::memcpy(parameters.data(), &geometry, sizeof geometry);
    variant.partial = volume(region.threads) % kSimdWidth != 0;
    const bool usual = variant == Variant{};
    launches.push_back(
        {.function = usual ? pipeline.function : pipeline.program->function(variant),
         .groups = region.groups,
         .threads = region.threads,
         .threadgroup_bytes = threadgroup_bytes,
         .command = &command,
         .stage = stage,
         .parameters = &region == &regions.back() ? std::exchange(parameters, {}) : parameters});
  }
}

}  // namespace metal_emulator::cuda
