// The checks of Apple's validation layer that depend on the bindings of a dispatch when it is encoded.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "state.h"

namespace metal_emulator {

struct Binding {
  std::shared_ptr<BufferState> buffer;  // null: `bytes`, or unbound
  std::size_t offset = 0;
  bool is_bytes = false;  // setBytes
  std::vector<std::byte> bytes;

  bool bound() const { return buffer || is_bytes; }
  std::size_t length() const { return buffer ? buffer->info.length - offset : bytes.size(); }
};

using Bindings = std::array<Binding, kMaxBuffers>;
using ThreadgroupLengths = std::array<std::size_t, kMaxThreadgroupArguments>;

inline constexpr std::size_t kMaxSetBytes = 4096;
inline constexpr std::size_t kThreadgroupLengthUnit = 16;

// Formats "kernel 'name', dispatch 3, buffer(2) 'weights'".
std::string describe(const Pipeline& pipeline, int dispatch, const KernelArgument& argument);

// The caller's sizes, before they are narrowed.
struct Size {
  std::uint64_t width, height, depth;
};

// Each throws ValidationError.
void check_geometry(const Pipeline& pipeline, int dispatch, const Size& grid, const Size& group);
void check_buffers(const Pipeline& pipeline, int dispatch, const Bindings& bindings);
void check_threadgroup_memory(const Pipeline& pipeline, int dispatch, const ThreadgroupLengths& lengths);

}  // namespace metal_emulator
