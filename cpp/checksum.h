// XXH64, the 64-bit xxHash (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): detects
// accidental damage at memory speed. It is no defence against a forger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace metal_prefill {

std::uint64_t xxh64(std::span<const std::byte> data, std::uint64_t seed = 0);

}  // namespace metal_prefill
