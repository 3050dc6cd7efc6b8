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

const BoundBuffer& bound_to(const DispatchCommand& dispatch, const KernelArgument& argument) {
  return dispatch.buffers.at(static_cast<std::size_t>(argument.index));
}

void check_buffer(const DispatchCommand& dispatch, const KernelArgument& argument) {
  const auto fail = [&](const std::string& what) {
    throw ValidationError(describe(dispatch, argument) + ": " + what);
  };
  const BoundBuffer& bound = bound_to(dispatch, argument);
  if (!bound.allocation && bound.bytes.empty()) fail("nothing is bound");
  if (!bound.allocation && argument.writable) {
    fail("the kernel writes to it, but it was bound by setBytes, whose memory is read-only");
  }
  const std::size_t needed = argument.element_bytes;
  if (bound.length() < (argument.reference ? needed : 1)) {
    fail("holds " + std::to_string(bound.length()) + " bytes from offset " + std::to_string(bound.offset) +
         ", the argument needs " + std::to_string(needed));
  }
  std::size_t alignment = argument.element_align;
  if (argument.space == KernelArgument::Space::kConstant) alignment = std::max(alignment, kConstantAlignment);
  if (bound.allocation && bound.offset % alignment != 0) {
    fail("offset " + std::to_string(bound.offset) + " is not a multiple of " + std::to_string(alignment));
  }
  if (bound.allocation && bound.allocation->released) fail("the bound buffer was deallocated");
}

// Metal's compiler assumes that the buffers of a kernel do not overlap. Bindings of one buffer at different
// offsets may use different parts of it: find_overlap compares the accessed bytes.
void check_overlap(const DispatchCommand& dispatch, const KernelArgument& written) {
  const BoundBuffer& own = bound_to(dispatch, written);
  for (const KernelArgument& other : dispatch.pipeline->kernel->arguments) {
    if (other.space == KernelArgument::Space::kThreadgroup || other.index == written.index) continue;
    const BoundBuffer& bound = bound_to(dispatch, other);
    if (bound.allocation == own.allocation && bound.offset == own.offset)
      throw ValidationError(describe(dispatch, written) + ": is written, and overlaps buffer(" +
                            std::to_string(other.index) + ") '" + other.name +
                            "' of the same dispatch, which Metal's compiler assumes never to happen");
  }
}

}  // namespace

std::string describe(const DispatchCommand& dispatch, const KernelArgument& argument) {
  const bool threadgroup = argument.space == KernelArgument::Space::kThreadgroup;
  return describe(dispatch) + (threadgroup ? ", threadgroup(" : ", buffer(") +
         std::to_string(argument.index) + ") '" + argument.name + "'";
}

void check_geometry(const DispatchCommand& dispatch, const Size& grid, const Size& group) {
  const auto fail = [&](const std::string& what) { throw ValidationError(describe(dispatch) + ": " + what); };
  constexpr std::uint64_t kMaxGrid = UINT32_MAX;
  if (grid.width == 0 || grid.height == 0 || grid.depth == 0) fail("the grid " + join(grid) + " is empty");
  if (grid.width > kMaxGrid || grid.height > kMaxGrid || grid.depth > kMaxGrid) {
    fail("the grid " + join(grid) + " does not fit 32 bits");
  }
  if (group.width == 0 || group.height == 0 || group.depth == 0)
    fail("the threadgroup " + join(group) + " is empty");
  const std::uint64_t limit = dispatch.pipeline->max_threads;
  if (group.width > limit || group.height > limit || group.depth > limit ||
      group.width * group.height * group.depth > limit) {
    fail("the threadgroup " + join(group) + " exceeds the pipeline's limit of " + std::to_string(limit) +
         " threads");
  }
}

void check_buffers(const DispatchCommand& dispatch) {
  for (const KernelArgument& argument : dispatch.pipeline->kernel->arguments) {
    if (argument.space == KernelArgument::Space::kThreadgroup) continue;
    check_buffer(dispatch, argument);
    if (argument.writable) check_overlap(dispatch, argument);
  }
}

void check_threadgroup_memory(const DispatchCommand& dispatch) {
  std::size_t total = dispatch.pipeline->static_threadgroup_bytes;
  for (const KernelArgument& argument : dispatch.pipeline->kernel->arguments) {
    if (argument.space != KernelArgument::Space::kThreadgroup) continue;
    const std::size_t length = dispatch.threadgroup_bytes.at(static_cast<std::size_t>(argument.index));
    if (length < std::max<std::size_t>(argument.element_bytes, 1)) {
      throw ValidationError(describe(dispatch, argument) + ": has " + std::to_string(length) +
                            " bytes of threadgroup memory, its element type needs " +
                            std::to_string(argument.element_bytes));
    }
    total += length;
  }
  if (total > kMaxThreadgroupBytes) {
    throw ValidationError(describe(dispatch) + ": " + std::to_string(total) +
                          " bytes of threadgroup memory exceed the limit of " +
                          std::to_string(kMaxThreadgroupBytes));
  }
}

}  // namespace metal_emulator
