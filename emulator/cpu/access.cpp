#include "access.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <new>

namespace metal_emulator::cpu {
namespace {

// An access this close to a buffer was meant for it. A guard follows its end; other memory may precede it.
constexpr std::size_t kNearEnd = 1 << 16, kNearBegin = 256;
constexpr std::uintptr_t kNullPages = 1 << 16;

// Host threads that run kernels in checked mode. Others, which start programs, are not on a fiber.
std::atomic<int> recording{0};

inline AccessRecorder* current_recorder() {
  return recording.load(std::memory_order_relaxed) ? recorder_of(abi::current_worker()) : nullptr;
}

std::uint64_t* map_bits(std::size_t words) {
  void* memory =
      mmap(nullptr, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::uint64_t*>(memory);
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
  std::snprintf(hex, sizeof hex, "0x%zx", offset - 1);  // the call is before its return address
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

AccessRecorder::~AccessRecorder() {
  release();
}

void AccessRecorder::release() {
  for (auto* list : {&read_, &written_}) {
    for (Touched& touched : *list) {
      if (touched.bits) munmap(touched.bits, touched.words * 8);
    }
    list->clear();
  }
}

void AccessRecorder::begin(const std::vector<Binding>& bindings, Report report, void* context) {
  release();
  bindings_ = &bindings;
  last_ = nullptr;
  report_ = report;
  context_ = context;
  for (const Binding& binding : bindings) {
    for (auto* list : {&read_, &written_}) {
      Touched touched;
      touched.words = (binding.end - binding.begin + 63) / 64;
      if (touched.words) touched.bits = map_bits(touched.words);
      list->push_back(touched);
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

// Of several bindings that hold the range, the one that begins last: two tensors of one buffer are
// distinguished.
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

void AccessRecorder::mark(Touched& touched, std::size_t offset, std::size_t bytes) {
  touched.count += bytes;
  const std::size_t first = offset / 64, last = (offset + bytes - 1) / 64;
  touched.first = std::min(touched.first, first);
  touched.last = std::max(touched.last, last);
  for (std::size_t word = first; word <= last; word++) {
    const std::size_t begin = word == first ? offset % 64 : 0;
    const std::size_t end = word == last ? (offset + bytes - 1) % 64 + 1 : 64;
    touched.bits[word] |= (end - begin == 64 ? ~0ull : ((1ull << (end - begin)) - 1)) << begin;
  }
}

void AccessRecorder::access(std::uintptr_t address, std::size_t bytes, bool write, const void* caller) {
  if (bytes == 0) return;
  const auto region = reinterpret_cast<std::uintptr_t>(&abi::current_worker());
  if (address - region < abi::kRegionBytes) return;  // a thread's own variables
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
    return;  // a table of the shader's own
  }
  const auto position = static_cast<std::size_t>(binding - bindings_->data());
  mark(write ? written_[position] : read_[position], address - binding->begin, bytes);
}

bool AccessRecorder::is_meant_for_buffer(std::uintptr_t address) const {
  if (address < kNullPages) return true;  // nothing is bound
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
    const auto take = [&](const Touched& touched, std::vector<std::uint64_t>& counts,
                          std::vector<std::vector<ByteRange>>& ranges) {
      if (counts.size() <= index) counts.resize(index + 1), ranges.resize(index + 1);
      counts[index] += touched.count;
      if (touched.first > touched.last) return;
      std::vector<ByteRange> own;
      std::size_t begin = SIZE_MAX;
      for (std::size_t word = touched.first; word <= touched.last; word++) {
        const std::uint64_t bits = touched.bits[word];
        if (bits == ~0ull && begin != SIZE_MAX) continue;
        if (bits == 0 && begin == SIZE_MAX) continue;
        for (std::size_t bit = 0; bit < 64; bit++) {
          const bool set = bits >> bit & 1;
          const std::size_t at = binding.offset + word * 64 + bit;
          if (set && begin == SIZE_MAX) begin = at;
          if (!set && begin != SIZE_MAX) own.push_back({begin, at}), begin = SIZE_MAX;
        }
      }
      if (begin != SIZE_MAX) own.push_back({begin, binding.offset + (touched.last + 1) * 64});
      // Union with the ranges that other host threads recorded.
      std::vector<ByteRange>& all = ranges[index];
      all.insert(all.end(), own.begin(), own.end());
      std::sort(all.begin(), all.end(),
                [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
      std::vector<ByteRange> merged;
      for (const ByteRange& range : all) {
        if (!merged.empty() && range.begin <= merged.back().end) {
          merged.back().end = std::max(merged.back().end, range.end);
        } else {
          merged.push_back(range);
        }
      }
      all = std::move(merged);
    };
    take(read_[i], statistics.bytes_read, statistics.read);
    take(written_[i], statistics.bytes_written, statistics.written);
  }
  release();
  bindings_ = nullptr;
}

}  // namespace metal_emulator::cpu

// Called by shaders compiled with --checked.
#define METAL_EMULATOR_ACCESS(kind, write, bytes)                                                         \
  extern "C"                                                                                              \
      __attribute__((visibility("hidden"))) void __asan_##kind##bytes##_noabort(std::uintptr_t address) { \
    if (auto* recorder = metal_emulator::cpu::current_recorder()) {                                       \
      recorder->access(address, bytes, write, __builtin_return_address(0));                               \
    }                                                                                                     \
  }
#if !METAL_EMULATOR_ASAN
METAL_EMULATOR_ACCESS(load, false, 1)
METAL_EMULATOR_ACCESS(load, false, 2)
METAL_EMULATOR_ACCESS(load, false, 4)
METAL_EMULATOR_ACCESS(load, false, 8)
METAL_EMULATOR_ACCESS(load, false, 16)
METAL_EMULATOR_ACCESS(store, true, 1)
METAL_EMULATOR_ACCESS(store, true, 2)
METAL_EMULATOR_ACCESS(store, true, 4)
METAL_EMULATOR_ACCESS(store, true, 8)
METAL_EMULATOR_ACCESS(store, true, 16)
extern "C" {
__attribute__((visibility("hidden"))) void __asan_loadN_noabort(std::uintptr_t address, std::size_t bytes) {
  if (auto* recorder = metal_emulator::cpu::current_recorder()) {
    recorder->access(address, bytes, false, __builtin_return_address(0));
  }
}
__attribute__((visibility("hidden"))) void __asan_storeN_noabort(std::uintptr_t address, std::size_t bytes) {
  if (auto* recorder = metal_emulator::cpu::current_recorder()) {
    recorder->access(address, bytes, true, __builtin_return_address(0));
  }
}
__attribute__((visibility("hidden"))) void* __asan_memcpy(void* to, const void* from, std::size_t bytes) {
  if (auto* recorder = metal_emulator::cpu::current_recorder()) {
    recorder->access(reinterpret_cast<std::uintptr_t>(from), bytes, false, __builtin_return_address(0));
    recorder->access(reinterpret_cast<std::uintptr_t>(to), bytes, true, __builtin_return_address(0));
  }
  return std::memcpy(to, from, bytes);
}
__attribute__((visibility("hidden"))) void* __asan_memmove(void* to, const void* from, std::size_t bytes) {
  if (auto* recorder = metal_emulator::cpu::current_recorder()) {
    recorder->access(reinterpret_cast<std::uintptr_t>(from), bytes, false, __builtin_return_address(0));
    recorder->access(reinterpret_cast<std::uintptr_t>(to), bytes, true, __builtin_return_address(0));
  }
  return std::memmove(to, from, bytes);
}
__attribute__((visibility("hidden"))) void* __asan_memset(void* to, int value, std::size_t bytes) {
  if (auto* recorder = metal_emulator::cpu::current_recorder()) {
    recorder->access(reinterpret_cast<std::uintptr_t>(to), bytes, true, __builtin_return_address(0));
  }
  return std::memset(to, value, bytes);
}
__attribute__((visibility("hidden"))) void __asan_handle_no_return() {}
}
#endif
