// Files mapped into memory.
#pragma once

#include <cstddef>

namespace metal_prefill {

// A file mapped for reading. Python's mmap is not used: on macOS it flushes the disk's write cache first.
class FileMapping {
 public:
  // Throws std::system_error, and std::invalid_argument if the file now has fewer than `bytes` bytes.
  FileMapping(int descriptor, std::size_t bytes);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  const std::byte* data() const { return static_cast<const std::byte*>(memory_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* memory_;
  std::size_t bytes_;
};

}  // namespace metal_prefill
