#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../base/errors.h"

namespace metal_prefill::cpu {

namespace {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define METAL_PREFILL_ASAN 1
#endif
#endif

#if METAL_PREFILL_ASAN

// Mapped pages would hide overruns from AddressSanitizer, which knows only the ends of malloc's blocks.
void* allocate(std::size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes) != 0) return nullptr;
  return std::memset(p, 0, bytes);
}

void release(void* p, std::size_t) {
  std::free(p);
}

#else

constexpr std::size_t kHugePage = std::size_t(2) << 20;

void* allocate(std::size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(p, bytes, MADV_HUGEPAGE);  // a hint: refusal costs speed only
#endif
  return p;
}

void release(void* p, std::size_t bytes) {
  munmap(p, bytes);
}

#endif

}  // namespace

Buffer::Buffer(std::size_t bytes, const char* what) : memory_(nullptr, Release{bytes}) {
  if (bytes == 0) return;
  memory_.reset(static_cast<std::byte*>(allocate(bytes)));
  if (!memory_)
    throw DeviceError("cannot allocate " + std::to_string(bytes) + " bytes for " + std::string(what));
}

void Buffer::Release::operator()(std::byte* memory) const {
  release(memory, bytes);
}

}  // namespace metal_prefill::cpu
