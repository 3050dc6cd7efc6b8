#include "validation.h"

#include <algorithm>

namespace metal_emulator {
namespace {

// Offsets of buffers in constant memory must be multiples of 4 bytes on Apple's GPUs, of 32 on GPUs of the
// family Mac2, which an M1 also reports, and of 256 in the simulator. The strictest of these applies.
constexpr std::size_t kConstantAlignment = 256;

std::string join(const Size& size) {
  return std::to_string(size.width) + "x" + std::to_string(size.height) + "x" + std::to_string(size.depth);
}

void check_buffer(const Pipeline& pipeline, int dispatch, const KernelArgument& argument,
                  const Binding& binding) {
  const auto fail = [&](const std::string& what) {
    throw ValidationError(describe(pipeline, dispatch, argument) + ": " + what);
  };
  if (!binding.bound()) fail("nothing is bound");
  if (binding.is_bytes && argument.writable) {
    fail("the kernel writes to it, but it was bound by setBytes, whose memory is read-only");
  }
  const std::size_t needed = argument.element_bytes;
  if (binding.length() < (argument.reference ? needed : 1)) {
    fail("holds " + std::to_string(binding.length()) + " bytes from offset " +
         std::to_string(binding.offset) + ", the argument needs " + std::to_string(needed));
  }
  std::size_t alignment = argument.element_align;
  if (argument.space == KernelArgument::Space::kConstant) alignment = std::max(alignment, kConstantAlignment);
  if (binding.buffer && binding.offset % alignment != 0) {
    fail("offset " + std::to_string(binding.offset) + " is not a multiple of " + std::to_string(alignment));
  }
  if (binding.buffer && binding.buffer->released) fail("the bound buffer was deallocated");
}

// Metal's compiler assumes that the buffers of a kernel do not overlap. Bindings of one buffer at different
// offsets may use different parts of it: find_overlap compares the accessed bytes.
void check_overlap(const Pipeline& pipeline, int dispatch, const KernelArgument& written,
                   const Bindings& bindings) {
  const Binding& own = bindings.at(static_cast<std::size_t>(written.index));
  if (!own.buffer) return;
  for (const KernelArgument& other : pipeline.kernel->arguments) {
    if (other.space == KernelArgument::Space::kThreadgroup || other.index == written.index) continue;
    const Binding& binding = bindings.at(static_cast<std::size_t>(other.index));
    if (binding.buffer && binding.buffer->allocation == own.buffer->allocation &&
        binding.offset == own.offset)
      throw ValidationError(describe(pipeline, dispatch, written) + ": is written, and overlaps buffer(" +
                            std::to_string(other.index) + ") '" + other.name +
                            "' of the same dispatch, which Metal's compiler assumes never to happen");
  }
}

}  // namespace

std::string describe(const Pipeline& pipeline, int dispatch, const KernelArgument& argument) {
  const bool threadgroup = argument.space == KernelArgument::Space::kThreadgroup;
  return describe(pipeline, dispatch) + (threadgroup ? ", threadgroup(" : ", buffer(") +
         std::to_string(argument.index) + ") '" + argument.name + "'";
}

void check_geometry(const Pipeline& pipeline, int dispatch, const Size& grid, const Size& group) {
  const auto fail = [&](const std::string& what) {
    throw ValidationError(describe(pipeline, dispatch) + ": " + what);
  };
  constexpr std::uint64_t kMaxGrid = UINT32_MAX;
  if (grid.width == 0 || grid.height == 0 || grid.depth == 0) fail("the grid " + join(grid) + " is empty");
  if (grid.width > kMaxGrid || grid.height > kMaxGrid || grid.depth > kMaxGrid) {
    fail("the grid " + join(grid) + " does not fit 32 bits");
  }
  if (group.width == 0 || group.height == 0 || group.depth == 0)
    fail("the threadgroup " + join(group) + " is empty");
  const std::uint64_t limit = pipeline.max_threads;
  if (group.width > limit || group.height > limit || group.depth > limit ||
      group.width * group.height * group.depth > limit) {
    fail("the threadgroup " + join(group) + " exceeds the pipeline's limit of " + std::to_string(limit) +
         " threads");
  }
}

void check_buffers(const Pipeline& pipeline, int dispatch, const Bindings& bindings) {
  for (const KernelArgument& argument : pipeline.kernel->arguments) {
    if (argument.space == KernelArgument::Space::kThreadgroup) continue;
    check_buffer(pipeline, dispatch, argument, bindings.at(static_cast<std::size_t>(argument.index)));
    if (argument.writable) check_overlap(pipeline, dispatch, argument, bindings);
  }
}

void check_threadgroup_memory(const Pipeline& pipeline, int dispatch, const ThreadgroupLengths& lengths) {
  std::size_t total = pipeline.static_threadgroup_bytes;
  for (const KernelArgument& argument : pipeline.kernel->arguments) {
    if (argument.space != KernelArgument::Space::kThreadgroup) continue;
    const std::size_t length = lengths.at(static_cast<std::size_t>(argument.index));
    if (length < std::max<std::size_t>(argument.element_bytes, 1)) {
      throw ValidationError(describe(pipeline, dispatch, argument) + ": has " + std::to_string(length) +
                            " bytes of threadgroup memory, its element type needs " +
                            std::to_string(argument.element_bytes));
    }
    total += length;
  }
  if (total > kMaxThreadgroupBytes) {
    throw ValidationError(describe(pipeline, dispatch) + ": " + std::to_string(total) +
                          " bytes of threadgroup memory exceed the limit of " +
                          std::to_string(kMaxThreadgroupBytes));
  }
}

}  // namespace metal_emulator
