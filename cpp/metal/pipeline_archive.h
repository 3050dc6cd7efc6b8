// Compiled pipelines of earlier processes, in the user's folder of caches.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <span>
#include <string>
#include <vector>

namespace metal_prefill::metal {

// A file has the pipelines of one set of kernels on one device, and its checksum in its name: what is damaged
// is not read, and what is there is never changed. Its time of modification says when it was used last:
// Python deletes the files whose use is longest ago.
class PipelineArchive {
 public:
  // `folder` is for one build of the system and one version of the package; empty: nothing is kept.
  PipelineArchive(id<MTLDevice> device, const std::string& folder, std::span<const std::string> kernels);

  bool is_kept() const { return !folder_.empty(); }
  // Null where no process has left one, or it is damaged.
  id<MTLBinaryArchive> read() const;
  // Compiles the functions into an archive for later processes. Does nothing where that fails: they compile
  // again.
  void write(std::span<const id<MTLFunction>> functions) const;

 private:
  std::vector<std::string> files() const;  // of this set of kernels

  id<MTLDevice> device_;
  const std::string folder_, set_;
};

}  // namespace metal_prefill::metal
