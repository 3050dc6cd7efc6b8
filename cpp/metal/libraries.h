// The shaders as Metal libraries: the one that was compiled when the package was built, or those of the
// sources in the extension, compiled here.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <map>
#include <set>
#include <string>

namespace metal_prefill::metal {

struct Libraries {
  std::map<std::string, id<MTLLibrary>> by_kernel;
  bool compiled = false;  // when the package was built

  // Null where no library has the kernel.
  id<MTLFunction> function(const std::string& kernel) const;
};

// Where they are compiled here, with these variants of kernels (see shaders/wanted.h) and what has none.
// Throws DeviceError naming the source that does not compile.
Libraries open_libraries(id<MTLDevice> device, const std::set<std::string>& variants);
// That of the trial alone, which the others do not have.
Libraries open_trial(id<MTLDevice> device);

}  // namespace metal_prefill::metal
