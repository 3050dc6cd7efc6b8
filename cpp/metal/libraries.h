// The shaders as Metal libraries: the one compiled with the package, or those compiled here from the sources
// in the extension.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <map>
#include <set>
#include <string>
#include <string_view>

namespace metal_prefill::metal {

struct Libraries {
  std::map<std::string, id<MTLLibrary>> by_kernel;
  bool compiled = false;  // when the package was built

  // Null where no library has the kernel.
  id<MTLFunction> function(const std::string& kernel) const;
  void add(const Libraries& others) { by_kernel.insert(others.by_kernel.begin(), others.by_kernel.end()); }
};

// If compiled here, with these variants of kernels (see shaders/variants.h) and all kernels without variants.
// Throws DeviceError naming the source that does not compile.
Libraries open_libraries(id<MTLDevice> device, const std::set<std::string>& variants);
// That of the trial alone, which the others do not have.
Libraries open_trial(id<MTLDevice> device);
// That of one source of kernels on tensors, likewise, which is always compiled here: where the language or
// its headers are missing, the others are not concerned.
Libraries open_tensors(id<MTLDevice> device, std::string_view source, const std::set<std::string>& variants);

}  // namespace metal_prefill::metal
