#include "read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace metal_prefill::metal {

namespace {

// The system reads one block while the thread waits for the pages of the previous one.
constexpr std::size_t kBlock = std::size_t(8) << 20;

void ask_for(std::span<const std::byte> mapping, std::size_t begin) {
  if (begin < mapping.size())
    madvise(const_cast<std::byte*>(mapping.data()) + begin, std::min(kBlock, mapping.size() - begin),
            MADV_WILLNEED);  // a hint
}

}  // namespace

void ReadAhead::read(std::span<const std::byte> mapping) const {
  const auto page = std::size_t(getpagesize());
  const volatile std::byte* bytes = mapping.data();
  ask_for(mapping, 0);
  for (std::size_t at = 0; at < mapping.size() && !ends_; at += page) {
    if (at % kBlock == 0) ask_for(mapping, at + kBlock);
    static_cast<void>(bytes[at]);
  }
}

ReadAhead::ReadAhead(std::span<const std::byte> mapping) {
  try {
    thread_ = std::thread([this, mapping] { read(mapping); });
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

}  // namespace metal_prefill::metal
