// Commands as they were encoded, with the details that messages and records need, and the checks that are
// made when they have run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hazards.h"
#include "validation.h"

namespace metal_emulator {

// A buffer, or bytes, that a command uses.
struct EncodedBinding {
  int index;  // of the kernel's buffer argument; 0 and 1 for source and destination of a copy
  const char* name;
  std::shared_ptr<BufferState> buffer;  // null: setBytes
  std::size_t offset;
  bool writable;
};

struct Encoded {
  std::vector<Command> commands;
  std::vector<std::vector<EncodedBinding>> bindings;  // of each command
};

// Conflicts between dispatches by the bytes that they touched; empty without conflicts.
std::string find_hazard(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics);
// Bytes that a dispatch accesses through two of its bindings, one of them written; empty if there are none.
// Metal's compiler assumes that the buffers of a kernel do not overlap.
std::string find_overlap(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics);
// The first use of a buffer that is now invalid: deallocated, or written past its end; empty without one.
std::string find_misuse(const Encoded& encoded);
// Uses of buffers that Metal does not track.
std::vector<Access> find_untracked(const Command& command, const std::vector<EncodedBinding>& bindings);
std::vector<DispatchRecord> make_records(const Encoded& encoded,
                                         const std::vector<DispatchStatistics>& statistics);
// After each dispatch of a kernel named, overwrites the first bytes of the first output.
void plant_mistakes(std::vector<Command>& commands, const std::set<std::string>& kernels);
// Exchanges each dispatch with its neighbour, as a driver that ignores barriers may.
void reorder(std::vector<Command>& commands);
// Whether one of the kernels is dispatched.
bool has_kernel(const std::vector<Command>& commands, const std::set<std::string>& kernels);
// The watchdog's error for more steps than the limit, if there is one; see DeviceLimits.
std::string find_timeout(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics,
                         std::uint64_t limit);
// Metal's error for commands whose buffers are together larger than `most` bytes; empty if they are not.
std::string find_excess(const Encoded& encoded, std::uint64_t most);
// Keeps the first `dispatches` dispatches and the other commands before them.
void truncate(std::vector<Command>& commands, int dispatches);

}  // namespace metal_emulator
