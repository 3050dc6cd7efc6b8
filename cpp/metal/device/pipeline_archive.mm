#include "pipeline_archive.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <string_view>

#include "device.h"
#include "embedded_shaders.h"

namespace metal_prefill::metal {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".pipelines";

// FNV-1a: detects damage, not manipulation.
std::string checksum(std::string_view text) {
  std::uint64_t sum = 14695981039346656037u;
  for (const char c : text) sum = (sum ^ std::uint8_t(c)) * 1099511628211u;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum));
  return digits;
}

// Checksum of a file; empty if it cannot be read.
std::optional<std::string> checksum_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return checksum(std::string(std::istreambuf_iterator<char>(file), {}));
}

// Checksum of kernels on a device. It covers the shaders' text, which changes while the package is developed.
std::string checksum_of(id<MTLDevice> device, std::span<const std::string> kernels) {
  std::string text = device.name.UTF8String;
  for (const std::string& kernel : kernels) text += "\n" + kernel;
  for (std::size_t i = 0; i < kShaderSourceCount; ++i) text += kShaderSources[i].text;
  return checksum(text);
}

id<MTLBinaryArchive> open(id<MTLDevice> device, const std::string& path) {
  MTLBinaryArchiveDescriptor* descriptor = [[MTLBinaryArchiveDescriptor alloc] init];
  if (!path.empty()) descriptor.url = [NSURL fileURLWithPath:to_ns(path)];
  NSError* error = nil;
  return [device newBinaryArchiveWithDescriptor:descriptor error:&error];
}

}  // namespace

PipelineArchive::PipelineArchive(id<MTLDevice> device, const std::string& folder,
                                 std::span<const std::string> kernels)
    : device_(device), folder_(folder), set_(folder.empty() ? "" : checksum_of(device, kernels)) {}

std::vector<std::string> PipelineArchive::files() const {
  std::vector<std::string> found;
  std::error_code error;
  if (!is_kept()) return found;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path path = entry->path();
    if (path.extension() == kSuffix && path.stem().string().starts_with(set_ + "-"))
      found.push_back(path.string());
  }
  return found;
}

id<MTLBinaryArchive> PipelineArchive::read() const {
  for (const std::string& path : files()) {
    const std::string wanted = set_ + "-" + checksum_of(path).value_or("");
    if (fs::path(path).stem() != wanted) continue;
    if (id<MTLBinaryArchive> archive = open(device_, path)) {
      std::error_code error;  // such as a read-only file system
      fs::last_write_time(path, fs::file_time_type::clock::now(), error);
      return archive;
    }
  }
  return nil;
}

void PipelineArchive::write(std::span<const id<MTLFunction>> functions) const {
  if (!is_kept()) return;
  static std::mutex writing;  // threads of a process share the name of the temporary file
  const std::scoped_lock lock(writing);
  id<MTLBinaryArchive> archive = open(device_, "");
  for (id<MTLFunction> function : functions) {
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
    descriptor.computeFunction = function;
    NSError* error = nil;
    if (![archive addComputePipelineFunctionsWithDescriptor:descriptor error:&error]) return;
  }
  const std::vector<std::string> damaged = files();
  std::error_code error;
  fs::create_directories(folder_, error);
  const fs::path part = fs::path(folder_) / (set_ + "." + std::to_string(getpid()) + ".part");
  NSError* failure = nil;
  if ([archive serializeToURL:[NSURL fileURLWithPath:to_ns(part.string())] error:&failure])
    if (const auto checksum = checksum_of(part.string())) {
      fs::path path = fs::path(folder_) / (set_ + "-" + *checksum);
      path += kSuffix;
      fs::rename(part, path, error);
      for (const std::string& old : damaged)
        if (old != path.string()) fs::remove(old, error);
    }
  fs::remove(part, error);  // if it was not renamed
}

}  // namespace metal_prefill::metal
