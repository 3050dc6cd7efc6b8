#include "read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace metal_prefill {

namespace {

// While the thread waits for the pages of one block, the system reads the next.
constexpr std::size_t kBlock = std::size_t(8) << 20;

void ask_for(std::span<const std::byte> part, std::size_t begin) {
  if (begin < part.size())
    madvise(const_cast<std::byte*>(part.data()) + begin, std::min(kBlock, part.size() - begin),
            MADV_WILLNEED);  // a hint
}

}  // namespace

void ReadAhead::read(std::span<const std::byte> part) const {
  const auto page = std::size_t(getpagesize());
  const volatile std::byte* bytes = part.data();
  ask_for(part, 0);
  for (std::size_t at = 0; at < part.size() && !ends_; at += page) {
    if (at % kBlock == 0) ask_for(part, at + kBlock);
    static_cast<void>(bytes[at]);
  }
}

ReadAhead::ReadAhead(std::vector<std::span<const std::byte>> parts) {
  try {
    thread_ = std::thread([this, parts = std::move(parts)] {
      for (const std::span<const std::byte> part : parts) read(part);
    });
  } catch (const std::system_error&) {  // no thread: pages are loaded on demand
  }
}

ReadAhead::~ReadAhead() {
  ends_ = true;
  wait();
}

void ReadAhead::wait() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace metal_prefill
