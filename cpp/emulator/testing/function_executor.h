// An executor whose kernels are C++ functions, for programs that test the Metal classes without a shader
// compiler.
#pragma once

#include "executor.h"

namespace metal_emulator {

struct FunctionCall {
  const DispatchCommand& dispatch;
  void* buffer(int index) const;
  std::size_t bytes(int index) const;
  DispatchStatistics& statistics;  // to report what was touched
};
using KernelFunction = void (*)(const FunctionCall& call);  // Kernel::entry

std::unique_ptr<Executor> make_function_executor();

}  // namespace metal_emulator
