// Compiled pipelines of earlier processes, in the user's cache folder.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <span>
#include <string>
#include <vector>

namespace metal_prefill::metal {

// A file contains the pipelines of one set of kernels on one device, and its name contains its checksum:
// damaged files are not read, and existing ones never change. The modification time records the last use:
// Python deletes the least recently used files.
class PipelineArchive {
 public:
  // `folder` is specific to a build of the system and a version of the package; empty: nothing is stored.
  PipelineArchive(id<MTLDevice> device, const std::string& folder, std::span<const std::string> kernels);

  bool is_kept() const { return !folder_.empty(); }
  // Reads the archive. Null if no process has stored one, or if it is damaged.
  id<MTLBinaryArchive> read() const;
  // Compiles the functions into an archive for later processes. If that fails, does nothing: later processes
  // compile again.
  void write(std::span<const id<MTLFunction>> functions) const;

 private:
  std::vector<std::string> files() const;  // archives of this set of kernels

  id<MTLDevice> device_;
  const std::string folder_, set_;
};

}  // namespace metal_prefill::metal
