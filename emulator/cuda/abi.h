// Shared by shaders compiled for NVIDIA GPUs and the CUDA executor: plain types, without any header of the
// standard library.
//
// A kernel takes one structure by value: a slot for each buffer or threadgroup argument in the order of its
// declaration, then the bytes of `constant` references. A slot is an address, or an offset into threadgroup
// memory. Every kernel is compiled twice: an entry that
// takes its `constant` references by value, as setBytes gives them, and one that takes the address of each.
#pragma once

namespace metal_emulator::cuda {

struct Vec3 {
  unsigned x, y, z;
};

inline constexpr unsigned kSlotBytes = 8;
inline constexpr unsigned kInlineAlignment = 16;
inline constexpr unsigned kMaxInlineBytes = 1024;  // of one reference; larger ones are passed by address

constexpr unsigned align_up(unsigned value) {
  return (value + kInlineAlignment - 1) / kInlineAlignment * kInlineAlignment;
}
// Whether an argument is passed by value in the entry that has values.
constexpr bool is_inline(bool constant, bool reference, unsigned long bytes) {
  return constant && reference && bytes <= kMaxInlineBytes;
}
constexpr unsigned slot_offset(unsigned position) {
  return position * kSlotBytes;
}
// Where the values begin.
constexpr unsigned first_inline_offset(unsigned slots) {
  return align_up(slot_offset(slots));
}

}  // namespace metal_emulator::cuda
