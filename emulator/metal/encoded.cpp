#include "encoded.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "state.h"

namespace metal_emulator {
namespace {

constexpr std::size_t kMistakenBytes = 8;

// A buffer or setBytes data that a command uses.
struct Use {
  int index;  // of the kernel's buffer argument; for a copy, 0 is the source and 1 the destination
  const char* name;
  const BoundBuffer& bound;
  bool writable;
};

std::vector<Use> uses_of(const Command& command) {
  switch (command.kind) {
    case Command::Kind::kDispatch:
      break;
    case Command::Kind::kCopy:
      return {{0, "source", command.copy.from, false}, {1, "destination", command.copy.to, true}};
    case Command::Kind::kFill:
      return {{0, "destination", command.fill.to, true}};
  }
  std::vector<Use> uses;
  for (const KernelArgument& argument : command.dispatch.pipeline->kernel->arguments) {
    if (argument.space == KernelArgument::Space::kThreadgroup) continue;
    const BoundBuffer& bound = command.dispatch.buffers[static_cast<std::size_t>(argument.index)];
    uses.push_back({argument.index, argument.name, bound, argument.writable});
  }
  return uses;
}

std::string label_of(const Use& use) {
  return use.bound.allocation ? locked([&](State&) { return use.bound.allocation->label; }) : "";
}

std::string describe(const Command& command, const Use& use) {
  const std::string text =
      command.kind == Command::Kind::kDispatch
          ? describe(command.dispatch) + ", buffer(" + std::to_string(use.index) + ") '" + use.name + "'"
          : (command.kind == Command::Kind::kCopy ? "copyFromBuffer, " : "fillBuffer, ") +
                std::string(use.name);
  const std::string label = label_of(use);
  return label.empty() ? text : text + " = \"" + label + "\"";
}

// A dispatch that ran.
struct Ran {
  const Command& command;
  const DispatchStatistics& statistics;
};

std::vector<Ran> dispatches_that_ran(const Commands& commands, const Statistics& statistics) {
  std::vector<Ran> ran;
  for (std::size_t i = 0; i < commands.size() && ran.size() < statistics.size(); i++)
    if (commands[i].kind == Command::Kind::kDispatch) ran.push_back({commands[i], statistics[ran.size()]});
  return ran;
}

std::vector<Access> touched(const Ran& ran) {
  std::vector<Access> accesses;
  for (const Use& use : uses_of(ran.command)) {
    if (!use.bound.allocation) continue;
    const auto add = [&](const std::vector<ByteRange>& ranges, bool write) {
      for (const ByteRange& range : ranges)
        accesses.push_back({use.bound.allocation.get(), range, write, describe(ran.command, use)});
    };
    add(ran.statistics.of(use.index).read, false);
    add(ran.statistics.of(use.index).written, true);
  }
  return accesses;
}

// Returns the first range that two sorted lists have in common.
std::optional<ByteRange> first_common(const std::vector<ByteRange>& a, const std::vector<ByteRange>& b) {
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const ByteRange both{std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
    if (both.begin < both.end) return both;
    a[i].end < b[j].end ? i++ : j++;
  }
  return std::nullopt;
}

std::uint64_t total_bytes(const std::vector<ByteRange>& ranges) {
  std::uint64_t total = 0;
  for (const ByteRange& range : ranges) total += range.end - range.begin;
  return total;
}

}  // namespace

std::vector<Access> find_bound(const Command& command, bool untracked_alone) {
  std::vector<Access> accesses;
  for (const Use& use : uses_of(command)) {
    const BoundBuffer& bound = use.bound;
    if (!bound.allocation || (untracked_alone && !bound.allocation->untracked)) continue;
    accesses.push_back({bound.allocation.get(),
                        {bound.offset, bound.allocation->bytes},
                        use.writable,
                        describe(command, use)});
  }
  return accesses;
}

std::string find_hazard(const Commands& commands, const Statistics& statistics) {
  HazardTracker tracker(HazardTracker::Known::kTouched);
  for (const Ran& ran : dispatches_that_ran(commands, statistics)) {
    if (ran.command.after_barrier) tracker.barrier();
    auto accesses = touched(ran);
    if (auto conflict = tracker.find_conflict(accesses, kNoBarrier)) return *conflict;
    tracker.add(std::move(accesses));
  }
  return {};
}

std::string find_overlap(const Commands& commands, const Statistics& statistics) {
  for (const Ran& ran : dispatches_that_ran(commands, statistics)) {
    const std::vector<Use> uses = uses_of(ran.command);
    for (const Use& own : uses) {
      for (const Use& other : uses) {
        if (!own.bound.allocation || own.bound.allocation != other.bound.allocation ||
            own.index == other.index)
          continue;
        const BindingStatistics& accesses = ran.statistics.of(other.index);
        for (const bool writes : {false, true}) {
          const auto both =
              first_common(ran.statistics.of(own.index).written, writes ? accesses.written : accesses.read);
          if (!both) continue;
          return describe(ran.command, own) + " writes bytes " + std::to_string(both->begin) + " to " +
                 std::to_string(both->end) + " of a buffer that buffer(" + std::to_string(other.index) +
                 ") '" + other.name + "' of the same dispatch " + (writes ? "writes" : "reads") +
                 ", which Metal's compiler assumes never to happen";
        }
      }
    }
  }
  return {};
}

std::string find_misuse(const Commands& commands) {
  for (const Command& command : commands) {
    for (const Use& use : uses_of(command)) {
      if (!use.bound.allocation) continue;
      if (use.bound.allocation->released) {
        return describe(command, use) +
               ": the buffer was deallocated before the command "
               "buffer completed (its references are unretained)";
      }
      if (use.writable && !use.bound.allocation->intact()) {
        return describe(command, use) + ": bytes past the end of the buffer were written (by this " +
               "binding or a later one of the same buffer)";
      }
    }
  }
  return {};
}

std::vector<DispatchRecord> make_records(const Commands& commands, const Statistics& statistics) {
  std::vector<DispatchRecord> records;
  for (const Command& command : commands) {
    if (command.kind != Command::Kind::kDispatch) continue;
    const DispatchStatistics none;
    const DispatchStatistics& measured =
        records.size() < statistics.size() ? statistics[records.size()] : none;
    DispatchRecord& record = records.emplace_back(DispatchRecord{
        .kernel = command.dispatch.pipeline->kernel->name,
        .grid = command.dispatch.grid,
        .group = command.dispatch.group,
        .threads = measured.threads,
        .barriers = measured.barriers,
        .seconds = measured.seconds,
        .after_barrier = command.after_barrier,
        .bindings = {},
    });
    for (const Use& use : uses_of(command)) {
      const BindingStatistics& accesses = measured.of(use.index);
      record.bindings.push_back({.index = use.index,
                                 .name = use.name,
                                 .label = label_of(use),
                                 .bytes_read = accesses.bytes_read,
                                 .bytes_written = accesses.bytes_written,
                                 .unique_bytes_read = total_bytes(accesses.read),
                                 .unique_bytes_written = total_bytes(accesses.written)});
    }
  }
  return records;
}

void plant_mistakes(Commands& commands, const std::set<std::string>& kernels) {
  Commands planted;
  for (Command& command : commands) {
    const Command dispatch = planted.emplace_back(std::move(command));
    if (!has_kernel({dispatch}, kernels)) continue;
    for (const Use& use : uses_of(dispatch)) {
      if (!use.writable) continue;
      Command mistake;
      mistake.kind = Command::Kind::kFill;
      mistake.fill.to = use.bound;
      mistake.fill.bytes = kMistakenBytes;
      mistake.fill.value = 0x43;  // 195 as a float, 3.6 as a half
      planted.push_back(std::move(mistake));
      break;
    }
  }
  commands = std::move(planted);
}

void reorder(Commands& commands) {
  for (std::size_t i = 0; i + 1 < commands.size(); i += 2)
    if (commands[i].kind == Command::Kind::kDispatch && commands[i + 1].kind == Command::Kind::kDispatch)
      std::swap(commands[i], commands[i + 1]);
}

bool has_kernel(const Commands& commands, const std::set<std::string>& kernels) {
  return std::any_of(commands.begin(), commands.end(), [&](const Command& command) {
    return command.kind == Command::Kind::kDispatch &&
           kernels.contains(command.dispatch.pipeline->kernel->name);
  });
}

std::string find_timeout(const Commands& commands, const Statistics& statistics, std::uint64_t limit) {
  if (limit == 0) return {};
  std::uint64_t steps = 0;
  const std::string allowed =
      " steps of threads are more than the " + std::to_string(limit) + " that the watchdog allows";
  for (const Ran& ran : dispatches_that_ran(commands, statistics)) {
    const DispatchCommand& dispatch = ran.command.dispatch;
    const std::uint64_t own = ran.statistics.threads + ran.statistics.barriers * dispatch.group.volume();
    if (own > limit)
      return "Caused GPU Timeout Error: " + describe(dispatch) + ": " + std::to_string(own) + allowed;
    steps += own;
  }
  if (steps <= limit) return {};
  return "Caused GPU Timeout Error: " + std::to_string(steps) + allowed;
}

std::string find_excess(const Commands& commands, std::uint64_t most) {
  std::set<const Allocation*> buffers;
  for (const Command& command : commands)
    for (const Use& use : uses_of(command))
      if (use.bound.allocation) buffers.insert(use.bound.allocation.get());
  std::uint64_t bytes = 0;
  for (const Allocation* buffer : buffers) bytes += buffer->bytes;
  if (bytes <= most) return {};
  return "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory): buffers of " +
         std::to_string(bytes) + " bytes are beyond the working set of " + std::to_string(most);
}

void truncate(Commands& commands, int dispatches) {
  for (std::size_t i = 0; i < commands.size(); i++) {
    if (commands[i].kind == Command::Kind::kDispatch && dispatches-- == 0) {
      commands.resize(i);
      return;
    }
  }
}

}  // namespace metal_emulator
