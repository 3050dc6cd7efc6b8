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
  bool compiled = false;  // with the package

  // Null if no library has the kernel.
  id<MTLFunction> function(const std::string& kernel) const;
  void add(const Libraries& others) { by_kernel.insert(others.by_kernel.begin(), others.by_kernel.end()); }
};

// Opens the libraries of all sources except those of tensor kernels. If compiled here, they have these
// variants of kernels (see shaders/variants.h) and all kernels without variants. Throws DeviceError naming a
// source that does not compile.
Libraries open_libraries(id<MTLDevice> device, const std::set<std::string>& variants);
// Implements compile_shaders.
std::vector<CompiledSource> compile_sources(id<MTLDevice> device);
// Opens the library of one source of tensor kernels, with these variants. Always compiled here and
// separately, so that systems without the language or its headers can use the other libraries.
Libraries open_tensors(id<MTLDevice> device, std::string_view source, const std::set<std::string>& variants);

}  // namespace metal_prefill::metal
