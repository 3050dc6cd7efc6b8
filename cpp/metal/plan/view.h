// Buffers of the forward pass: a name and a location. Only a buffer's owner knows its type.
#pragma once

#include <cstddef>

namespace metal_prefill::metal {

enum class BufferName {
#define BUFFER(name, label, host) name,
#include "buffers.inc"
#undef BUFFER
};
inline constexpr std::size_t kActivations = std::size_t(BufferName::kWeights);  // number of buffers before it

struct BufferTraits {
  const char* label;
  bool host;  // the host writes or reads it
};
inline constexpr BufferTraits kBufferTraits[] = {
#define BUFFER(name, label, host) {label, host},
#include "buffers.inc"
#undef BUFFER
};
constexpr const BufferTraits& traits_of(BufferName name) {
  return kBufferTraits[std::size_t(name)];
}

// A location in a buffer, without ownership. Views are copied for every dispatch and hold no reference.
struct View {
  void* buffer = nullptr;  // an id<MTLBuffer> on a GPU; any non-null pointer in a recording
  std::size_t offset = 0;  // bytes
  BufferName name = BufferName::kX;

  explicit operator bool() const { return buffer != nullptr; }
  // This view, or another one for a binding that must be set but is not read.
  const View& or_any(const View& other) const { return buffer ? *this : other; }
  View at(std::size_t bytes) const { return {buffer, offset + bytes, name}; }
  // Row `n` of an array of 4-byte elements.
  View row(std::size_t n, int columns) const { return at(n * std::size_t(columns) * sizeof(float)); }
};

// K and V of a layer.
struct LayerCache {
  View keys, values;
};

}  // namespace metal_prefill::metal
