#include "file_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace metal_prefill {

FileMapping::FileMapping(int descriptor, std::size_t bytes) : bytes_(bytes) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  if (std::size_t(status.st_size) < bytes)
    throw std::invalid_argument("the file has " + std::to_string(status.st_size) + " bytes, not " +
                                std::to_string(bytes));
  memory_ = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
}

FileMapping::~FileMapping() {
  munmap(memory_, bytes_);
}

}  // namespace metal_prefill
