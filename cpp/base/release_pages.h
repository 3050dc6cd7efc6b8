// Release of the physical memory of pages that are not needed for now.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "rounding.h"

namespace metal_prefill {

// Tells the system that the pages of a file mapping are no longer needed in memory. They stay readable.
inline void release_pages(const std::byte* data, std::size_t bytes) {
  const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE));
  const auto begin = round_up(std::uintptr_t(data), page);
  const auto end = (std::uintptr_t(data) + bytes) / page * page;
  // The system reads dropped pages of a private, unmodified file mapping from the file again.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace metal_prefill
