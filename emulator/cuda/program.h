// Kernels in the driver's form: modules compiled from assembly when first needed.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "device.h"
#include "image.h"

namespace metal_emulator::cuda {

// Compilation options of a kernel.
struct Variant {
  bool values = true;    // `constant` references are passed by value, from setBytes
  bool partial = false;  // the last simdgroup of a threadgroup may have fewer than 32 threads
  auto operator<=>(const Variant&) const = default;
};

// The parameters of a kernel: see abi.h.
struct ParameterLayout {
  std::vector<Place> places;  // of each kernel argument
  unsigned bytes = 0;
};
ParameterLayout layout_of(const Kernel& kernel);

// All variants of one kernel. Shared by any number of pipelines.
class Program {
 public:
  // Throws std::runtime_error if the build has no GPU code for the kernel.
  Program(const Device& device, const ShaderLibrary& library, const Kernel& kernel);

  // Compiles the variant on first use. Throws std::runtime_error with the driver's message.
  Function function(Variant variant);
  const ParameterLayout& layout() const { return layout_; }

 private:
  Function compile(Variant variant) const;

  const Device& device_;
  const Kernel& kernel_;
  const ParameterLayout layout_;
  const Module* modules_;  // with values, with addresses
  std::mutex mutex_;
  std::map<Variant, Function> functions_;
};

}  // namespace metal_emulator::cuda
