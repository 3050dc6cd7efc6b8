// Encoded commands, with the details that messages and records need, and the checks after they have run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hazards.h"
#include "validation.h"

namespace metal_emulator {

// A buffer, or setBytes data, that a command uses.
struct EncodedBinding {
  int index;  // of the kernel's buffer argument; for a copy, 0 is the source and 1 the destination
  const char* name;
  std::shared_ptr<BufferState> buffer;  // null for setBytes
  std::size_t offset;
  bool writable;
};

struct Encoded {
  std::vector<Command> commands;
  std::vector<std::vector<EncodedBinding>> bindings;  // of each command
};

// Describes conflicts between dispatches by the bytes that they accessed; empty if there are none.
std::string find_hazard(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics);
// Describes bytes that a dispatch accesses through two of its bindings, one of them written; empty if there
// are none. Metal's compiler assumes that the buffers of a kernel do not overlap.
std::string find_overlap(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics);
// Describes the first use of a buffer that is now deallocated or written past its end; empty if none.
std::string find_misuse(const Encoded& encoded);
// Uses of buffers that Metal does not track.
std::vector<Access> find_untracked(const Command& command, const std::vector<EncodedBinding>& bindings);
std::vector<DispatchRecord> make_records(const Encoded& encoded,
                                         const std::vector<DispatchStatistics>& statistics);
// Overwrites the first bytes of the first output after each dispatch of these kernels.
void plant_mistakes(std::vector<Command>& commands, const std::set<std::string>& kernels);
// Swaps adjacent dispatches, as a driver that ignores barriers may.
void reorder(std::vector<Command>& commands);
// Whether any of the kernels is dispatched.
bool has_kernel(const std::vector<Command>& commands, const std::set<std::string>& kernels);
// The watchdog's error if steps exceed the limit; empty otherwise. See DeviceLimits.
std::string find_timeout(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics,
                         std::uint64_t limit);
// Metal's error for commands whose buffers together exceed `most` bytes; empty otherwise.
std::string find_excess(const Encoded& encoded, std::uint64_t most);
// Keeps the first `dispatches` dispatches and the other commands before them.
void truncate(std::vector<Command>& commands, int dispatches);

}  // namespace metal_emulator
