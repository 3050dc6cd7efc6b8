// Shared by shaders compiled for NVIDIA GPUs and the CUDA executor. Only plain types, without headers of the
// standard library.
//
// A kernel has one structure as its parameter, passed by value: a slot for each buffer or threadgroup
// argument in order of declaration, then the bytes of `constant` references. A slot is an address, or an
// offset into threadgroup memory. Every kernel is compiled twice: one entry takes its `constant` references
// by value, as set by setBytes, the other takes their addresses.
#pragma once

namespace metal_emulator::cuda {

struct Vec3 {
  unsigned x, y, z;
};

inline constexpr unsigned kSlotBytes = 8;
inline constexpr unsigned kInlineAlignment = 16;
inline constexpr unsigned kMaxInlineBytes = 1024;  // per reference; larger ones are passed by address

constexpr unsigned align_up(unsigned value) {
  return (value + kInlineAlignment - 1) / kInlineAlignment * kInlineAlignment;
}
// Whether an argument is passed by value in the entry that takes values.
constexpr bool is_inline(bool constant, bool reference, unsigned long bytes) {
  return constant && reference && bytes <= kMaxInlineBytes;
}

// The kind of an argument of a kernel.
struct Form {
  bool has_slot, has_value;
  unsigned long bytes;  // of the value
};
// Offsets of an argument in the parameters.
struct Place {
  unsigned slot, value;  // value is 0 if there is none
};
// Sets the places of all arguments, and returns the size of the parameters in bytes.
constexpr unsigned lay_out(const Form* arguments, unsigned count, Place* places) {
  unsigned end = 0;
  for (unsigned i = 0; i < count; ++i) {
    places[i] = {end, 0};
    if (arguments[i].has_slot) end += kSlotBytes;
  }
  end = align_up(end);
  for (unsigned i = 0; i < count; ++i) {
    if (!arguments[i].has_value) continue;
    places[i].value = end;
    end = align_up(end + static_cast<unsigned>(arguments[i].bytes));
  }
  return end;
}

}  // namespace metal_emulator::cuda
