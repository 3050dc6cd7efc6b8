// The shaders as Metal libraries: the one compiled with the package, or those compiled here from the sources
// in the extension.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "../../engine/engine.h"

namespace metal_prefill::metal {

struct Libraries {
  std::map<std::string, id<MTLLibrary>> by_kernel;
  bool compiled = false;  // when the package was built

  // Null if no library has the kernel.
  id<MTLFunction> function(const std::string& kernel) const;
  void add(const Libraries& others) { by_kernel.insert(others.by_kernel.begin(), others.by_kernel.end()); }
};

// The libraries of all sources but those below. If compiled here, they have these variants of kernels (see
// shaders/variants.h) and all kernels without variants. Throws a DeviceError that names a source that does
// not compile.
Libraries open_libraries(id<MTLDevice> device, const std::set<std::string>& variants);
// The library of the trial, which the others do not contain.
Libraries open_trial(id<MTLDevice> device);
// See compile_shaders.
std::vector<CompiledSource> compile_sources(id<MTLDevice> device);
// The library of one source of tensor kernels, with these variants. It is always compiled here, and
// separately: systems that lack the language or its headers have the other libraries.
Libraries open_tensors(id<MTLDevice> device, std::string_view source, const std::set<std::string>& variants);

}  // namespace metal_prefill::metal
