// Archives of compiled pipelines. A file only contains the names of its pipelines.
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>

#include "classes.h"

using namespace metal_emulator;

NSErrorDomain const MTLBinaryArchiveDomain = @"MTLBinaryArchiveDomain";

std::string metal_emulator::checksum_of(std::string_view text) {
  return std::to_string(std::hash<std::string_view>{}(text));
}

namespace {

constexpr const char* kHeader = "Metal emulator: binary archive 1";

}  // namespace

@implementation MTLBinaryArchiveDescriptor
@end

@implementation EmulatorBinaryArchive {
  std::mutex _mutex;
  std::set<std::string> _pipelines;  // identities of EmulatorFunction
}

// The last line of a file is the checksum of the others.
- (std::string)load:(const std::string&)path {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (text.empty()) return "there is no file";
  const std::size_t end = text.size() < 2 ? std::string::npos : text.rfind('\n', text.size() - 2);
  if (end == std::string::npos || text.substr(end + 1) != checksum_of(text.substr(0, end + 1)) + "\n")
    return "the file is damaged";
  std::istringstream lines(text.substr(0, end));
  std::string line;
  if (!std::getline(lines, line) || line != kHeader) return "the file is not an archive";
  while (std::getline(lines, line)) _pipelines.insert(line);
  return {};
}

- (BOOL)has:(const std::string&)identity {
  std::lock_guard lock(_mutex);
  return _pipelines.contains(identity);
}

- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                            error:(NSError**)error {
  auto* function =
      checked_cast<EmulatorFunction>(descriptor.computeFunction, "addComputePipelineFunctionsWithDescriptor");
  try {
    [function prepare];
    State::get().count(&Counters::compiled_pipelines);
    State::get().count(&Counters::archived_pipelines);
  } catch (const std::runtime_error& exception) {
    fail(error, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorCompilationFailure, exception.what());
    return NO;
  }
  std::lock_guard lock(_mutex);
  _pipelines.insert(function.identity);
  return YES;
}

- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error {
  std::string text = std::string(kHeader) + "\n", problem;
  {
    std::lock_guard lock(_mutex);
    for (const std::string& identity : _pipelines) text += identity + "\n";
    if (_pipelines.empty()) problem = "there is nothing to serialize";
    if (!limits().binary_archives) problem = "the device has no binary archives";
  }
  const std::string path = to_string(url.path);
  if (problem.empty()) {
    std::ofstream file(path, std::ios::binary);
    file << text << checksum_of(text) << "\n";
    if (!file.flush()) problem = "cannot write '" + path + "'";
  }
  if (problem.empty()) return YES;
  fail(error, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorInternalError, problem);
  return NO;
}
@end
