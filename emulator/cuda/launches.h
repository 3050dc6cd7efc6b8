// Converts dispatches to launches of the driver: geometry and parameters.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graphs.h"
#include "program.h"

namespace metal_emulator::cuda {

struct CudaPipeline final : Pipeline {
  std::shared_ptr<Program> program;
  Function function = nullptr;  // of the default variant
};

// The address of a buffer for a kernel; 0 if none is bound.
Address address_of(const BoundBuffer& buffer);

// Throws std::runtime_error naming the dispatch.
[[noreturn]] void fail(const DispatchCommand& command, const std::string& why);

// Copies the bytes of setBytes to the GPU and returns their address.
using Upload = std::function<Address(const std::vector<std::byte>&)>;

Launch make_launch(const DispatchCommand& command, std::size_t stage, const Upload& upload);

}  // namespace metal_emulator::cuda
