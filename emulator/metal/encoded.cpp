#include "encoded.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace metal_emulator {
namespace {

constexpr std::size_t kMistakenBytes = 8;

std::string describe(const Command& command, const EncodedBinding& binding) {
  std::string text;
  switch (command.kind) {
    case Command::Kind::kDispatch:
      text = describe(*command.dispatch.pipeline, command.dispatch.number) + ", buffer(" +
             std::to_string(binding.index) + ") '" + binding.name + "'";
      break;
    case Command::Kind::kCopy:
      text = std::string("copyFromBuffer, ") + binding.name;
      break;
    case Command::Kind::kFill:
      text = std::string("fillBuffer, ") + binding.name;
      break;
  }
  if (binding.buffer) {
    if (const std::string label = State::get().label(*binding.buffer); !label.empty())
      text += " = \"" + label + "\"";
  }
  return text;
}

// A dispatch that ran.
struct Ran {
  const Command& command;
  const std::vector<EncodedBinding>& bindings;
  const DispatchStatistics& statistics;
};

std::vector<Ran> dispatches_that_ran(const Encoded& encoded,
                                     const std::vector<DispatchStatistics>& statistics) {
  std::vector<Ran> ran;
  for (std::size_t i = 0; i < encoded.commands.size() && ran.size() < statistics.size(); i++) {
    if (encoded.commands[i].kind == Command::Kind::kDispatch)
      ran.push_back({encoded.commands[i], encoded.bindings[i], statistics[ran.size()]});
  }
  return ran;
}

std::vector<Access> touched(const Ran& ran) {
  std::vector<Access> accesses;
  for (const EncodedBinding& binding : ran.bindings) {
    if (!binding.buffer) continue;
    const auto add = [&](const std::vector<ByteRange>& ranges, bool write) {
      for (const ByteRange& range : ranges)
        accesses.push_back({binding.buffer->allocation.get(), range, write, describe(ran.command, binding)});
    };
    add(ran.statistics.of(binding.index).read, false);
    add(ran.statistics.of(binding.index).written, true);
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

std::string find_hazard(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics) {
  HazardTracker tracker(HazardTracker::Known::kTouched);
  for (const Ran& ran : dispatches_that_ran(encoded, statistics)) {
    if (ran.command.after_barrier) tracker.barrier();
    auto accesses = touched(ran);
    if (auto conflict = tracker.find_conflict(accesses, kNoBarrier)) return *conflict;
    tracker.add(std::move(accesses));
  }
  return {};
}

std::string find_overlap(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics) {
  for (const Ran& ran : dispatches_that_ran(encoded, statistics)) {
    for (const EncodedBinding& own : ran.bindings) {
      for (const EncodedBinding& other : ran.bindings) {
        if (!own.buffer || !other.buffer || own.index == other.index ||
            own.buffer->allocation != other.buffer->allocation)
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

std::string find_misuse(const Encoded& encoded) {
  for (std::size_t i = 0; i < encoded.commands.size(); i++) {
    for (const EncodedBinding& binding : encoded.bindings[i]) {
      if (!binding.buffer) continue;
      if (binding.buffer->released) {
        return describe(encoded.commands[i], binding) +
               ": the buffer was deallocated before the command "
               "buffer completed (its references are unretained)";
      }
      if (binding.writable && !binding.buffer->allocation->intact()) {
        return describe(encoded.commands[i], binding) +
               ": bytes past the end of the buffer were written (by this " +
               "binding or a later one of the same buffer)";
      }
    }
  }
  return {};
}

std::vector<DispatchRecord> make_records(const Encoded& encoded,
                                         const std::vector<DispatchStatistics>& statistics) {
  std::vector<DispatchRecord> records;
  for (std::size_t i = 0; i < encoded.commands.size(); i++) {
    const Command& command = encoded.commands[i];
    if (command.kind != Command::Kind::kDispatch) continue;
    const auto& dispatch = command.dispatch;
    DispatchRecord record;
    record.kernel = dispatch.pipeline->kernel->name;
    record.grid = dispatch.grid;
    record.group = dispatch.group;
    record.after_barrier = command.after_barrier;
    const DispatchStatistics none;
    const DispatchStatistics& measured =
        records.size() < statistics.size() ? statistics[records.size()] : none;
    record.threads = measured.threads;
    record.barriers = measured.barriers;
    record.seconds = measured.seconds;
    for (const EncodedBinding& binding : encoded.bindings[i]) {
      const BindingStatistics& accesses = measured.of(binding.index);
      record.bindings.push_back({.index = binding.index,
                                 .name = binding.name,
                                 .label = binding.buffer ? State::get().label(*binding.buffer) : "",
                                 .bytes_read = accesses.bytes_read,
                                 .bytes_written = accesses.bytes_written,
                                 .unique_bytes_read = total_bytes(accesses.read),
                                 .unique_bytes_written = total_bytes(accesses.written)});
    }
    records.push_back(std::move(record));
  }
  return records;
}

std::vector<Access> find_untracked(const Command& command, const std::vector<EncodedBinding>& bindings) {
  std::vector<Access> accesses;
  for (const EncodedBinding& binding : bindings) {
    if (!binding.buffer || !binding.buffer->untracked) continue;
    accesses.push_back({binding.buffer->allocation.get(),
                        {binding.offset, binding.buffer->info.length},
                        binding.writable,
                        describe(command, binding)});
  }
  return accesses;
}

void plant_mistakes(std::vector<Command>& commands, const std::set<std::string>& kernels) {
  std::vector<Command> planted;
  for (Command& command : commands) {
    planted.push_back(std::move(command));
    if (planted.back().kind != Command::Kind::kDispatch) continue;
    const DispatchCommand dispatch = planted.back().dispatch;
    const Kernel& kernel = *dispatch.pipeline->kernel;
    if (!kernels.contains(kernel.name)) continue;
    for (const KernelArgument& argument : kernel.arguments) {
      const auto index = static_cast<std::size_t>(argument.index);
      if (!argument.writable || index >= dispatch.buffers.size() || !dispatch.buffers[index].allocation)
        continue;
      Command mistake;
      mistake.kind = Command::Kind::kFill;
      mistake.fill.to = dispatch.buffers[index];
      mistake.fill.bytes = kMistakenBytes;
      mistake.fill.value = 0x43;  // 195 as a float, 3.6 as a half
      planted.push_back(std::move(mistake));
      break;
    }
  }
  commands = std::move(planted);
}

void reorder(std::vector<Command>& commands) {
  for (std::size_t i = 0; i + 1 < commands.size(); i += 2)
    if (commands[i].kind == Command::Kind::kDispatch && commands[i + 1].kind == Command::Kind::kDispatch)
      std::swap(commands[i], commands[i + 1]);
}

bool has_kernel(const std::vector<Command>& commands, const std::set<std::string>& kernels) {
  return std::any_of(commands.begin(), commands.end(), [&](const Command& command) {
    return command.kind == Command::Kind::kDispatch &&
           kernels.contains(command.dispatch.pipeline->kernel->name);
  });
}

std::string find_timeout(const Encoded& encoded, const std::vector<DispatchStatistics>& statistics,
                         std::uint64_t limit) {
  if (limit == 0) return {};
  std::uint64_t steps = 0;
  const std::string allowed =
      " steps of threads are more than the " + std::to_string(limit) + " that the watchdog allows";
  for (const Ran& ran : dispatches_that_ran(encoded, statistics)) {
    const DispatchCommand& dispatch = ran.command.dispatch;
    const std::uint64_t own = ran.statistics.threads + ran.statistics.barriers * dispatch.group.volume();
    if (own > limit)
      return "Caused GPU Timeout Error: " + describe(*dispatch.pipeline, dispatch.number) + ": " +
             std::to_string(own) + allowed;
    steps += own;
  }
  if (steps <= limit) return {};
  return "Caused GPU Timeout Error: " + std::to_string(steps) + allowed;
}

std::string find_excess(const Encoded& encoded, std::uint64_t most) {
  std::set<const BufferState*> buffers;
  for (const auto& bindings : encoded.bindings)
    for (const EncodedBinding& binding : bindings)
      if (binding.buffer) buffers.insert(binding.buffer.get());
  std::uint64_t bytes = 0;
  for (const BufferState* buffer : buffers) bytes += buffer->info.length;
  if (bytes <= most) return {};
  return "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory): buffers of " +
         std::to_string(bytes) + " bytes are beyond the working set of " + std::to_string(most);
}

void truncate(std::vector<Command>& commands, int dispatches) {
  for (std::size_t i = 0; i < commands.size(); i++) {
    if (commands[i].kind == Command::Kind::kDispatch && dispatches-- == 0) {
      commands.resize(i);
      return;
    }
  }
}

}  // namespace metal_emulator
