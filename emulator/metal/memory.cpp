// Host memory for buffers, with guards at its end.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "emulator.h"

#if METAL_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) static_cast<void>(0)
#endif

namespace metal_emulator {
namespace {

constexpr std::size_t kAlignment =
    64;  // of a buffer's first byte: enough for all vectors of the shading language
constexpr unsigned char kCanary = 0xa5;

// Guard regions, by their end address.
struct Guards {
  struct Region {
    std::uintptr_t begin;
    const Allocation* allocation;
  };
  std::mutex mutex;
  std::map<std::uintptr_t, Region> regions;

  void add(void* begin, std::size_t bytes, const Allocation* allocation) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    std::lock_guard lock(mutex);
    regions[address + bytes] = {address, allocation};
  }
  void remove(void* begin, std::size_t bytes) {
    std::lock_guard lock(mutex);
    regions.erase(reinterpret_cast<std::uintptr_t>(begin) + bytes);
  }
  const Allocation* find(std::uintptr_t address) {
    std::lock_guard lock(mutex);
    const auto found = regions.upper_bound(address);
    return found != regions.end() && address >= found->second.begin ? found->second.allocation : nullptr;
  }
};

// Size of the inaccessible region after the pages. A whole megabyte also catches strided accesses.
constexpr std::size_t kGuardBytes = 1 << 20;

void* map_inaccessible(std::size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

// Maps shared pages again, with a guard after them; null if they cannot be mapped twice.
char* map_again(void* memory, std::size_t bytes) {
  void* place = map_inaccessible(bytes + kGuardBytes);
  if (!place) return nullptr;
  // An old size of zero duplicates the mapping, which only MAP_SHARED supports.
  void* view = mremap(memory, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place);
  if (view != MAP_FAILED) return static_cast<char*>(view);
  munmap(place, bytes + kGuardBytes);
  return nullptr;
}

constexpr std::size_t kLeastLazyBytes = 256 << 10;  // filling smaller buffers takes less time than mapping

// Maps pages filled with 0xff, which take memory only when written to: most pages of large buffers never are.
// Returns false if that is impossible; the pages are then unchanged.
bool map_filled(char* memory, std::size_t bytes) {
  constexpr std::size_t kBytes = 1 << 20;
  static const int file = [] {
    const int made = memfd_create("filled", MFD_CLOEXEC);
    const std::vector<unsigned char> block(64 << 10, 0xff);
    for (std::size_t at = 0; made >= 0 && at < kBytes; at += block.size()) {
      if (pwrite(made, block.data(), block.size(), off_t(at)) == ssize_t(block.size())) continue;
      close(made);
      return -1;
    }
    return made;
  }();
  if (file < 0) return false;
  for (std::size_t at = 0; at < bytes; at += kBytes) {
    void* mapped = mmap(memory + at, std::min(kBytes, bytes - at), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0);
    if (mapped != MAP_FAILED) continue;
    constexpr int kAsBefore = MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED;
    if (at > 0 && mmap(memory, at, PROT_READ | PROT_WRITE, kAsBefore, -1, 0) == MAP_FAILED)
      throw std::bad_alloc();
    return false;
  }
  return true;
}

// Mappings of freed buffers for reuse by later buffers of the same size: mapping new pages takes longer than
// filling old ones. Until then they are inaccessible.
class FreeMappings {
 public:
  // Returns null if there is none of this size.
  char* take(std::size_t bytes) {
    if (!enabled()) return nullptr;
    std::lock_guard lock(mutex_);
    const auto found = mappings_.find(bytes);
    if (found == mappings_.end() || mprotect(found->second, bytes, PROT_READ | PROT_WRITE) != 0)
      return nullptr;
    char* mapping = found->second;
    mappings_.erase(found);
    bytes_ -= bytes;
    return mapping;
  }
  // Returns false if the caller must unmap the mapping.
  bool keep(char* mapping, std::size_t bytes) {
    if (!enabled()) return false;
    std::lock_guard lock(mutex_);
    if (bytes_ + bytes > kMostBytes || mprotect(mapping, bytes, PROT_NONE) != 0) return false;
    mappings_.emplace(bytes, mapping);
    bytes_ += bytes;
    return true;
  }

 private:
  static constexpr std::size_t kMostBytes = 32 << 20;

  // A forked process shares the pages with its parent. A sanitizer would miss uses of freed buffers.
  bool enabled() const { return sanitizer()[0] == 0 && getpid() == process_; }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::multimap<std::size_t, char*> mappings_;
  std::size_t bytes_ = 0;
};

// Further mappings of whole pages, created on first use. Private pages are then replaced by shared ones.
class Views {
 public:
  Views(char* memory, std::size_t bytes, bool shared) : memory_(memory), bytes_(bytes), shared_(shared) {}
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  ~Views() {
    for (char* view : views_) munmap(view, bytes_ + kGuardBytes);
  }
  // Null if the pages cannot be mapped twice.
  char* get(std::size_t number) {
    std::lock_guard lock(mutex_);
    if (!shared_ && !share()) return nullptr;
    while (views_.size() < number) {
      char* view = map_again(memory_, bytes_);
      if (!view) return nullptr;
      views_.push_back(view);
    }
    return views_[number - 1];
  }

 private:
  // Replaces the pages by shared ones with the same contents. Nothing may access them meanwhile: views are
  // created between dispatches, and the host cannot access private pages.
  bool share() {
    void* copy = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return false;
    std::memcpy(copy, memory_, bytes_);
    shared_ = mremap(copy, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, memory_) != MAP_FAILED;
    if (!shared_) munmap(copy, bytes_);
    return shared_;
  }

  char* const memory_;
  const std::size_t bytes_;
  bool shared_;
  std::mutex mutex_;
  std::vector<char*> views_;
};

// Pages followed by a guard. Shared pages can be mapped twice; reusable ones may become those of later
// buffers.
class GuardedAllocation final : public Allocation {
 public:
  GuardedAllocation(char* mapping, std::size_t data_bytes, std::size_t length, bool shared, bool reusable)
      : mapping_(mapping), data_bytes_(data_bytes), reusable_(reusable), views_(mapping, data_bytes, shared) {
    bytes = length;
    first_ = mapping + data_bytes - round_up(length, kAlignment);
    std::memset(first_ + length, kCanary, slack());
    ASAN_POISON_MEMORY_REGION(first_ + length, slack());
    the_only<Guards>().add(mapping_ + data_bytes_, kGuardBytes, this);
  }
  GuardedAllocation(const GuardedAllocation&) = delete;
  GuardedAllocation& operator=(const GuardedAllocation&) = delete;
  ~GuardedAllocation() override {
    the_only<Guards>().remove(mapping_ + data_bytes_, kGuardBytes);
    ASAN_UNPOISON_MEMORY_REGION(first_ + bytes, slack());
    if (reusable_ && the_only<FreeMappings>().keep(mapping_, data_bytes_)) return;
    munmap(mapping_, data_bytes_ + kGuardBytes);
  }
  void* host() override { return first_; }
  void* view(std::size_t number) override {
    char* pages = views_.get(number);
    return pages ? pages + (first_ - mapping_) : nullptr;
  }
  bool intact() override {
#if !METAL_EMULATOR_ASAN
    for (std::size_t i = 0; i < slack(); i++) {
      if (static_cast<unsigned char>(first_[bytes + i]) != kCanary) return false;
    }
#endif
    return true;
  }

 private:
  std::size_t slack() const { return round_up(bytes, kAlignment) - bytes; }

  char* const mapping_;
  const std::size_t data_bytes_;
  const bool reusable_;
  char* first_;
  Views views_;
};

// The caller's memory itself.
class UnguardedAllocation final : public Allocation {
 public:
  UnguardedAllocation(void* memory, std::size_t length) : memory_(memory) { bytes = length; }
  void* host() override { return memory_; }

 private:
  void* const memory_;
};

// Written by the signal handler for `landing`, which runs instead of the faulting instruction.
struct Fault {
  GuardHandler handler = nullptr;
  const Allocation* missed = nullptr;
  std::size_t overrun = 0;
  bool write = false;
};
thread_local Fault fault;

#if !METAL_EMULATOR_ASAN  // AddressSanitizer's report names the line
[[noreturn]] void landing() {
  fault.handler(*fault.missed, fault.overrun, fault.write);
  std::abort();  // handlers do not return
}

struct sigaction previous_segv, previous_bus;

void pass_on(int signal, siginfo_t* info, void* context) {
  const struct sigaction& previous = signal == SIGBUS ? previous_bus : previous_segv;
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else {
    sigaction(signal, &previous, nullptr);  // the instruction runs again, and the default action is taken
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const Allocation* missed = fault.handler ? the_only<Guards>().find(address) : nullptr;
  if (!missed) return pass_on(signal, info, context);
  const auto* end = static_cast<const char*>(const_cast<Allocation*>(missed)->host()) + missed->bytes;
  fault.missed = missed;
  fault.overrun = address - reinterpret_cast<std::uintptr_t>(end);
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  fault.write = (registers.gregs[REG_ERR] & 2) != 0;
  auto stack = static_cast<std::uintptr_t>(registers.gregs[REG_RSP]) - 128;  // below the red zone
  stack = (stack & ~std::uintptr_t{15}) - 8;                                 // alignment as after a call
  registers.gregs[REG_RSP] = static_cast<greg_t>(stack);
  registers.gregs[REG_RIP] = reinterpret_cast<greg_t>(landing);
#else
  fault.write = false;  // unknown
  registers.pc = reinterpret_cast<std::uintptr_t>(landing);
#endif
}
#endif

void install_signal_handler() {
#if !METAL_EMULATOR_ASAN
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
  });
#endif
}

// Fibers have small stacks, so each thread that runs kernels has a separate stack for the signal handler.
struct SignalStack {
  std::vector<std::byte> memory = std::vector<std::byte>(64 << 10);
  SignalStack() {
    stack_t stack{};
    if (sigaltstack(nullptr, &stack) == 0 && !(stack.ss_flags & SS_DISABLE)) return;
    stack = {};
    stack.ss_sp = memory.data();
    stack.ss_size = memory.size();
    sigaltstack(&stack, nullptr);
  }
  SignalStack(const SignalStack&) = delete;
  SignalStack& operator=(const SignalStack&) = delete;
  ~SignalStack() {
    stack_t stack{};
    if (sigaltstack(nullptr, &stack) != 0 || stack.ss_sp != memory.data()) return;
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, nullptr);
  }
};

}  // namespace

const char* sanitizer() {
#if METAL_EMULATOR_ASAN
  return "address";
#elif METAL_EMULATOR_TSAN
  return "thread";
#else
  return "";
#endif
}

std::shared_ptr<Allocation> allocate_guarded(std::size_t bytes, std::uint8_t fill, bool shared) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  static const auto page_size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t data_bytes = round_up(round_up(bytes, kAlignment), page_size);
  const bool large = bytes >= kLeastLazyBytes;
  if (shared && (fill != 0xff || !large)) {
    if (char* mapping = the_only<FreeMappings>().take(data_bytes)) {
      std::memset(mapping, fill, data_bytes);
      return std::make_shared<GuardedAllocation>(mapping, data_bytes, bytes, true, true);
    }
  }
  auto* mapping = static_cast<char*>(map_inaccessible(data_bytes + kGuardBytes));
  if (!mapping) return nullptr;
  const bool writable = shared ? mmap(mapping, data_bytes, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED
                               : mprotect(mapping, data_bytes, PROT_READ | PROT_WRITE) == 0;
  if (!writable) {
    munmap(mapping, data_bytes + kGuardBytes);
    return nullptr;
  }
  const bool lazy = fill == 0xff && large && map_filled(mapping, data_bytes);
  const bool reusable = shared && !lazy;
  auto allocation = std::make_shared<GuardedAllocation>(mapping, data_bytes, bytes, reusable, reusable);
  if (fill != 0 && !lazy) std::memset(allocation->host(), fill, bytes);  // new pages are zero
  return allocation;
}

std::shared_ptr<Allocation> wrap_memory(void* memory, std::size_t bytes, bool guarded) {
  char* view = guarded ? map_again(memory, bytes) : nullptr;
  if (!view) return std::make_shared<UnguardedAllocation>(memory, bytes);
  return std::make_shared<GuardedAllocation>(view, bytes, bytes, true, false);
}

void set_guard_handler(GuardHandler handler) {
  if (handler) {
    install_signal_handler();
    static thread_local SignalStack stack;
  }
  fault.handler = handler;
}

}  // namespace metal_emulator
