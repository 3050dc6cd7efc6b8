#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "../engine.h"

namespace metal_prefill::cpu {

namespace {

constexpr std::size_t kHugePage = std::size_t(2) << 20;

}  // namespace

Buffer::Buffer(std::size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    throw DeviceError("cannot allocate " + std::to_string(bytes) + " bytes for " + std::string(what));
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(p, bytes, MADV_HUGEPAGE);  // a hint: refusal costs speed only
#endif
  data_ = static_cast<std::byte*>(p);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, bytes_);
}

void release_pages(const std::byte* data, std::size_t bytes) {
  const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE));
  const auto begin = (std::uintptr_t(data) + page - 1) / page * page;
  const auto end = (std::uintptr_t(data) + bytes) / page * page;
  // For a private file mapping that was only read, dropped pages come back from the file.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace metal_prefill::cpu
