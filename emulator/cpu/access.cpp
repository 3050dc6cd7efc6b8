#include "access.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>

namespace metal_emulator::cpu {
namespace {

// An access this close to a buffer is attributed to it. A guard follows its end; other memory may precede it.
constexpr std::size_t kNearEnd = 1 << 16, kNearBegin = 256;
constexpr std::uintptr_t kNullPages = 1 << 16;

// Number of host threads that run kernels in checked mode. If it is 0, the caller may not be on a fiber.
std::atomic<int> recording{0};

inline void record(std::uintptr_t address, std::size_t bytes, bool write, const void* caller) {
  if (!recording.load(std::memory_order_relaxed)) return;
  if (AccessRecorder* recorder = recorder_of(abi::current_worker()))
    recorder->access(address, bytes, write, caller);
}
inline void record(const void* memory, std::size_t bytes, bool write, const void* caller) {
  record(reinterpret_cast<std::uintptr_t>(memory), bytes, write, caller);
}

// Appends a range that begins at or after the beginning of the last one.
void append(std::vector<ByteRange>& ranges, ByteRange range) {
  if (ranges.empty() || range.begin > ranges.back().end) {
    ranges.push_back(range);
  } else {
    ranges.back().end = std::max(ranges.back().end, range.end);
  }
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

}  // namespace

void set_recorder(abi::Worker& worker, AccessRecorder* recorder) {
  AccessRecorder*& current = recorder_of(worker);
  recording += (recorder != nullptr) - (current != nullptr);
  current = recorder;
}

std::string source_location(const void* instruction) {
  Dl_info info{};
  if (!dladdr(instruction, &info) || !info.dli_fname) return "";
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(instruction) -
                                               static_cast<const char*>(info.dli_fbase));
  char hex[32];
  std::snprintf(hex, sizeof hex, "0x%zx", offset - 1);  // the call precedes its return address
  for (const char* tool : {"llvm-symbolizer-19 --functions=none --output-style=GNU -e ",
                           "llvm-symbolizer --functions=none --output-style=GNU -e ", "addr2line -e "}) {
    const std::string command = tool + quoted(info.dli_fname) + " " + hex + " 2>/dev/null";
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) continue;
    char line[1024] = "";
    const bool read = std::fgets(line, sizeof line, pipe) != nullptr;
    pclose(pipe);
    std::string text = read ? line : "";
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
    if (!text.empty() && text[0] != '?') return text;
  }
  return std::string(info.dli_fname) + "+" + hex;
}

void AccessRecorder::begin(const std::vector<Binding>& bindings, Report report, void* context) {
  bindings_ = &bindings;
  last_ = nullptr;
  report_ = report;
  context_ = context;
  for (auto* list : {&read_, &written_}) {
    list->clear();
    for (const Binding& binding : bindings) {
      const std::size_t words = (binding.end - binding.begin) / 64 + 1;
      auto& bits = list->emplace_back().bits;
      bits.reset(static_cast<std::uint64_t*>(std::calloc(words, sizeof(std::uint64_t))));
      if (!bits) throw std::bad_alloc();
    }
  }
}

void AccessRecorder::set_threadgroup_memory(std::uintptr_t begin, std::uintptr_t end) {
  arena_begin_ = begin;
  arena_end_ = end;
  variables_.clear();
}

void AccessRecorder::add_threadgroup_variable(const char* name, std::uintptr_t begin, std::size_t bytes) {
  variables_.push_back({name, begin, begin + bytes});
}

// If several bindings contain the range, returns the one that begins last, which distinguishes tensors of one
// buffer.
inline const Binding* AccessRecorder::find(std::uintptr_t address, std::size_t bytes) {
  if (last_ && address >= last_->begin && address + bytes <= last_end_) return last_;
  const Binding *found = nullptr, *before = nullptr;
  std::uintptr_t next = UINTPTR_MAX;
  for (const Binding& binding : *bindings_) {
    if (binding.begin > address) {
      next = binding.begin;
      break;
    }
    before = &binding;
    if (address + bytes <= binding.end) found = &binding;
  }
  if (found && found == before) {
    last_ = found;
    last_end_ = std::min(found->end, next);
  }
  return found;
}

void AccessRecorder::Touched::mark(std::size_t offset, std::size_t bytes) {
  count += bytes;
  const std::size_t from = offset / 64, to = (offset + bytes - 1) / 64;
  first = std::min(first, from);
  last = std::max(last, to);
  for (std::size_t word = from; word <= to; word++) {
    const std::size_t begin = word == from ? offset % 64 : 0;
    const std::size_t end = word == to ? (offset + bytes - 1) % 64 + 1 : 64;
    bits[word] |= (end - begin == 64 ? ~0ull : ((1ull << (end - begin)) - 1)) << begin;
  }
}

void AccessRecorder::Touched::add_to(std::vector<ByteRange>& all, std::size_t offset) const {
  std::vector<ByteRange> own, both, united;
  for (std::size_t word = first; word <= last; word++) {
    const std::size_t at = offset + word * 64;
    for (int begin = 0; begin < 64;) {
      begin += std::countr_zero(bits[word] >> begin);
      if (begin >= 64) break;
      const int end = begin + std::countr_one(bits[word] >> begin);
      append(own, {at + static_cast<std::size_t>(begin), at + static_cast<std::size_t>(end)});
      begin = end;
    }
  }
  std::merge(all.begin(), all.end(), own.begin(), own.end(), std::back_inserter(both),
             [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  for (const ByteRange& range : both) append(united, range);
  all = std::move(united);
}

void AccessRecorder::access(std::uintptr_t address, std::size_t bytes, bool write, const void* caller) {
  if (bytes == 0) return;
  const auto region = reinterpret_cast<std::uintptr_t>(&abi::current_worker());
  if (address - region < abi::kRegionBytes) return;  // a variable of the thread
  if (address - arena_begin_ < arena_end_ - arena_begin_) {
    for (const Variable& variable : variables_) {
      if (address < variable.begin || address + bytes > variable.end) continue;
      return;
    }
    report_outside(address, bytes, write, caller);
  }
  const Binding* binding = find(address, bytes);
  if (!binding) {
    if (write || is_meant_for_buffer(address)) report_outside(address, bytes, write, caller);
    return;  // a table of the shader
  }
  const auto position = static_cast<std::size_t>(binding - bindings_->data());
  (write ? written_ : read_)[position].mark(address - binding->begin, bytes);
}

bool AccessRecorder::is_meant_for_buffer(std::uintptr_t address) const {
  if (address < kNullPages) return true;  // null: nothing is bound
  for (const Binding& binding : *bindings_) {
    if (address < binding.begin ? binding.begin - address <= kNearBegin : address < binding.end + kNearEnd)
      return true;
  }
  return false;
}

void AccessRecorder::report_outside(std::uintptr_t address, std::size_t bytes, bool write,
                                    const void* caller) {
  const std::string what = std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes ";
  const std::string location = source_location(caller);
  const std::string where = location.empty() ? "" : location + ": ";
  const Variable* variable = nullptr;
  for (const Variable& candidate : variables_) {
    if (candidate.begin <= address && address - arena_begin_ < arena_end_ - arena_begin_)
      variable = &candidate;
  }
  if (variable) {
    report_(context_, where + what + "at offset " + std::to_string(address - variable->begin) + " of the " +
                          std::to_string(variable->end - variable->begin) + " bytes of threadgroup memory '" +
                          variable->name + "'");
  }
  const Binding* nearest = nullptr;
  std::size_t distance = kNearEnd;
  for (const Binding& binding : *bindings_) {
    const std::size_t gap = address >= binding.end    ? address - binding.end
                            : address < binding.begin ? binding.begin - address
                                                      : 0;
    if (gap < distance) nearest = &binding, distance = gap;
  }
  if (nearest) {
    report_(context_, where + what + "at offset " +
                          std::to_string(static_cast<std::ptrdiff_t>(address - nearest->begin)) + " of the " +
                          std::to_string(nearest->end - nearest->begin) + " bytes of buffer " +
                          std::to_string(nearest->index) + " ('" + nearest->name + "')");
  }
  report_(context_, where + what + "at an address outside of every buffer");
  __builtin_unreachable();
}

void AccessRecorder::collect(DispatchStatistics& statistics) {
  if (!bindings_) return;
  for (std::size_t i = 0; i < bindings_->size(); i++) {
    const Binding& binding = (*bindings_)[i];
    const auto index = static_cast<std::size_t>(binding.index);
    if (statistics.bindings.size() <= index) statistics.bindings.resize(index + 1);
    BindingStatistics& accesses = statistics.bindings[index];
    accesses.bytes_read += read_[i].count;
    accesses.bytes_written += written_[i].count;
    read_[i].add_to(accesses.read, binding.offset);
    written_[i].add_to(accesses.written, binding.offset);
  }
  read_.clear();
  written_.clear();
  bindings_ = nullptr;
}

}  // namespace metal_emulator::cpu

// Called by shaders compiled with --checked.
#if !METAL_EMULATOR_ASAN
using metal_emulator::cpu::record;

extern "C" {
#define METAL_EMULATOR_ACCESSES(bytes)                          \
  void __asan_load##bytes##_noabort(std::uintptr_t address) {   \
    record(address, bytes, false, __builtin_return_address(0)); \
  }                                                             \
  void __asan_store##bytes##_noabort(std::uintptr_t address) {  \
    record(address, bytes, true, __builtin_return_address(0));  \
  }
METAL_EMULATOR_ACCESSES(1)
METAL_EMULATOR_ACCESSES(2)
METAL_EMULATOR_ACCESSES(4)
METAL_EMULATOR_ACCESSES(8)
METAL_EMULATOR_ACCESSES(16)
void __asan_loadN_noabort(std::uintptr_t address, std::size_t bytes) {
  record(address, bytes, false, __builtin_return_address(0));
}
void __asan_storeN_noabort(std::uintptr_t address, std::size_t bytes) {
  record(address, bytes, true, __builtin_return_address(0));
}
void* __asan_memcpy(void* to, const void* from, std::size_t bytes) {
  record(from, bytes, false, __builtin_return_address(0));
  record(to, bytes, true, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __asan_memmove(void* to, const void* from, std::size_t bytes) {
  record(from, bytes, false, __builtin_return_address(0));
  record(to, bytes, true, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __asan_memset(void* to, int value, std::size_t bytes) {
  record(to, bytes, true, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
void __asan_handle_no_return() {}
}
#endif
