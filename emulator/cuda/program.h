// Kernels as the driver runs them: modules compiled from assembly when they are first needed.
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

// The ways in which a kernel is compiled.
struct Variant {
  bool values = true;    // `constant` references come by value, from setBytes
  bool partial = false;  // the last simdgroup of a threadgroup may have fewer than 32 threads
  auto operator<=>(const Variant&) const = default;
};

// The parameters of a kernel: see abi.h.
struct ParameterLayout {
  std::vector<Place> places;  // of each argument of the kernel
  unsigned bytes = 0;
};
ParameterLayout layout_of(const Kernel& kernel);

// One kernel, all variants of it. Used by any number of pipelines.
class Program {
 public:
  // Throws std::runtime_error if the build has no code of the kernel for GPUs.
  Program(const Device& device, const ShaderLibrary& library, const Kernel& kernel);

  // Compiles the variant when it is first used; throws std::runtime_error with the driver's message.
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
