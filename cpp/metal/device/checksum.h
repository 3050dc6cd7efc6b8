// Checksums of the contents and names of files in the user's cache folder.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include "embedded_shaders.h"

namespace metal_prefill::metal {

// FNV-1a: detects damage, not manipulation.
class Checksum {
 public:
  void add(std::string_view text) {
    for (const char c : text) sum_ = (sum_ ^ std::uint8_t(c)) * 1099511628211u;
  }
  std::string text() const {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum_));
    return digits;
  }

 private:
  std::uint64_t sum_ = 14695981039346656037u;
};

// Checksum of kernels on a device. It covers the shaders' text, which changes while the package is developed.
inline std::string checksum_of_kernels(id<MTLDevice> device, std::span<const std::string> kernels) {
  Checksum sum;
  sum.add(device.name.UTF8String);
  for (const std::string& kernel : kernels) sum.add("\n" + kernel);
  for (std::size_t i = 0; i < kShaderSourceCount; ++i) sum.add(kShaderSources[i].text);
  return sum.text();
}

}  // namespace metal_prefill::metal
