// Encoded commands: the buffers that they use, and the checks after they have run.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "emulator.h"
#include "hazards.h"

namespace metal_emulator {

using Commands = std::vector<Command>;
using Statistics = std::vector<DispatchStatistics>;  // of the dispatches that ran

// Uses of buffers, or only of untracked ones: their bytes from the bound offset on.
std::vector<Access> find_bound(const Command& command, bool untracked_alone = false);
// Describes conflicts between dispatches by the bytes that they accessed; empty if there are none.
std::string find_hazard(const Commands& commands, const Statistics& statistics);
// Describes bytes that a dispatch accesses through two of its bindings, one of them written; empty if there
// are none. Metal's compiler assumes that the buffers of a kernel do not overlap.
std::string find_overlap(const Commands& commands, const Statistics& statistics);
// Describes the first use of a buffer that is now deallocated or written past its end; empty if none.
std::string find_misuse(const Commands& commands);
std::vector<DispatchRecord> make_records(const Commands& commands, const Statistics& statistics);
// Overwrites the first bytes of the first output after each dispatch of these kernels.
void plant_mistakes(Commands& commands, const std::set<std::string>& kernels);
// Swaps adjacent dispatches, as a driver that ignores barriers may.
void reorder(Commands& commands);
// Whether any of the kernels is dispatched.
bool has_kernel(const Commands& commands, const std::set<std::string>& kernels);
// The watchdog's error if steps exceed the limit; empty otherwise. See DeviceLimits.
std::string find_timeout(const Commands& commands, const Statistics& statistics, std::uint64_t limit);
// Metal's error for commands whose buffers together exceed `most` bytes; empty otherwise.
std::string find_excess(const Commands& commands, std::uint64_t most);
// Keeps the first `dispatches` dispatches and the other commands before them.
void truncate(Commands& commands, int dispatches);

}  // namespace metal_emulator
