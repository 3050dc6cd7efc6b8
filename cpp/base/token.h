#pragma once

#include <cstdint>

namespace metal_prefill {

using TokenId = std::int32_t;

}  // namespace metal_prefill
