// Dequantizers: they read rows of each tensor type.
//
// A row is read in items of 8 values. Item i has two groups of 4 adjacent columns, [first(i), first(i) + 4)
// and the same kSecond columns further on. Formats that keep two values 16 columns apart in one byte have
// kSecond = 16, so that each byte is read by one thread only; four successive items always cover 32 whole
// columns.
//
// Rows are aligned to two bytes only, so quants are read in units of two bytes. Rows of MXFP4 may begin at
// any address.
#pragma once

#include <metal_stdlib>

#include "grids.h"
#include "quants.h"

using namespace metal;

struct PairedItems {
  static constant constexpr ushort kSecond = 16;
  static uint first(uint i) { return (i >> 2) * 32 + (i & 3) * 4; }
};

struct PlainItems {
  static constant constexpr ushort kSecond = 4;
  static uint first(uint i) { return i * 8; }
};

// Low and high nibbles of the four bytes at an even address.
static inline void nibbles(device const u8_t* bytes, thread ushort4& low, thread ushort4& high) {
  device const ushort* pairs = (device const ushort*)bytes;
  const ushort p = pairs[0], q = pairs[1];
  low = ushort4(p & 0xF, (p >> 8) & 0xF, q & 0xF, (q >> 8) & 0xF);
  high = ushort4((p >> 4) & 0xF, p >> 12, (q >> 4) & 0xF, q >> 12);
}

// The bits that `mask` selects in each of the four bytes at an even address after a right shift by `shift`.
static inline ushort4 fields(device const u8_t* bytes, ushort shift, ushort mask) {
  device const ushort* pairs = (device const ushort*)bytes;
  const ushort p = pairs[0], q = pairs[1], high = shift + 8;
  return ushort4((p >> shift) & mask, (p >> high) & mask, (q >> shift) & mask, (q >> high) & mask);
}

// Bits 4 and up of four adjacent quants.
static inline ushort4 top_bits(device const u8_t* bytes, ushort shift, ushort mask) {
  return fields(bytes, shift, mask) << 4;
}

static inline uint word(device const u8_t* bytes) {
  device const ushort* pairs = (device const ushort*)bytes;
  return uint(pairs[0]) | (uint(pairs[1]) << 16);
}

// Nibbles of four bytes in the mantissas of halves, without conversions or, for the high ones, shifts. The
// lowest bit of the mantissa is worth 1 from 1024 to 2047, and 1/16 from 64 to 127, so the results exceed the
// nibbles by 1024 and 64.
static inline half4 low_and_1024(uint bytes) {
  return as_type<half4>((uint2(bytes, bytes >> 8) & uint2(0x000F000F)) | uint2(0x64006400)).xzyw;
}
static inline half4 high_and_64(uint bytes) {
  return as_type<half4>((uint2(bytes, bytes >> 8) & uint2(0x00F000F0)) | uint2(0x54005400)).xzyw;
}

// Nibbles of four bytes as halves.
static inline half4 low_nibbles(uint bytes) {
  return low_and_1024(bytes) - 1024.0h;
}
static inline half4 high_nibbles(uint bytes) {
  return high_and_64(bytes) - 64.0h;
}

// d * (nibble - 8), with one instruction each. Exact: d is a half with 11 bits, and its products and the sum
// fit the 24 bits of a float.
static inline void scaled_nibbles(uint bytes, float d, thread float4& low, thread float4& high) {
  low = fma(float4(low_and_1024(bytes)), float4(d), float4(-1032.0f * d));
  high = fma(float4(high_and_64(bytes)), float4(d), float4(-72.0f * d));
}

// Bit 4 of four adjacent quants, from the lowest four of `bits`.
static inline ushort4 fifth_bits(uint bits) {
  return ushort4((bits & 1) << 4, (bits & 2) << 3, (bits & 4) << 2, (bits & 8) << 1);
}

struct Q4_0 : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q4_0* block = (device const block_q4_0*)row + (i >> 2);
    scaled_nibbles(word(block->qs + (i & 3) * 4), float(block->d), a, b);
  }
};

struct Q4_1 : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q4_1* block = (device const block_q4_1*)row + (i >> 2);
    const float d = float(block->d), m = float(block->m);
    const uint bytes = word(block->qs + (i & 3) * 4);
    a = d * float4(low_nibbles(bytes)) + m;
    b = d * float4(high_nibbles(bytes)) + m;
  }
};

struct Q5_0 : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q5_0* block = (device const block_q5_0*)row + (i >> 2);
    const float d = float(block->d);
    const uint j = (i & 3) * 4, bits = word(block->qh) >> j;
    ushort4 low, high;
    nibbles(block->qs + j, low, high);
    a = d * (float4(low | fifth_bits(bits)) - 16.0f);
    b = d * (float4(high | fifth_bits(bits >> 16)) - 16.0f);
  }
};

struct Q5_1 : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q5_1* block = (device const block_q5_1*)row + (i >> 2);
    const float d = float(block->d), m = float(block->m);
    const uint j = (i & 3) * 4, bits = word(block->qh) >> j;
    ushort4 low, high;
    nibbles(block->qs + j, low, high);
    a = d * float4(low | fifth_bits(bits)) + m;
    b = d * float4(high | fifth_bits(bits >> 16)) + m;
  }
};

struct Q8_0 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q8_0* block = (device const block_q8_0*)row + (i >> 2);
    const float d = float(block->d);
    device const ushort* q = (device const ushort*)(block->qs + (i & 3) * 8);
    a = d * float4(float2(as_type<char2>(q[0])), float2(as_type<char2>(q[1])));
    b = d * float4(float2(as_type<char2>(q[2])), float2(as_type<char2>(q[3])));
  }
};

struct Q2_K : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q2_K* block = (device const block_q2_K*)row + (i >> 5);
    const ushort v = (i & 31) * 8, shift = ((v >> 5) & 3) * 2, scales = block->scales[v >> 4];
    const float d = float(block->d) * float(scales & 15), m = float(block->dmin) * float(scales >> 4);
    device const u8_t* qs = block->qs + (v >> 7) * 32 + (v & 31);
    a = d * float4(fields(qs, shift, 3)) - m;
    b = d * float4(fields(qs + 4, shift, 3)) - m;
  }
};

struct Q3_K : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q3_K* block = (device const block_q3_K*)row + (i >> 5);
    const ushort v = (i & 31) * 8, shift = ((v >> 5) & 3) * 2, span = v >> 5, group = v >> 4;
    const ushort low = (block->scales[group & 7] >> (group >> 3) * 4) & 15;
    const ushort high = (block->scales[8 + (group & 3)] >> (group >> 2) * 2) & 3;
    const float d = float(block->d) * (float(low | high << 4) - 32.0f);
    device const u8_t* qs = block->qs + (v >> 7) * 32 + (v & 31);
    device const u8_t* hmask = block->hmask + (v & 31);
    a = d * (float4(fields(qs, shift, 3) | fields(hmask, span, 1) << 2) - 4.0f);
    b = d * (float4(fields(qs + 4, shift, 3) | fields(hmask + 4, span, 1) << 2) - 4.0f);
  }
};

// Scale and minimum of group `g` of a Q4_K or Q5_K super-block: 6 bits each, packed in 12 bytes.
static inline float2 scale_and_min(device const u8_t* scales, ushort g) {
  if (g < 4) return float2(scales[g] & 63, scales[g + 4] & 63);
  return float2((scales[g + 4] & 0xF) | ((scales[g - 4] >> 6) << 4),
                (scales[g + 4] >> 4) | ((scales[g] >> 6) << 4));
}

struct Q4_K : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q4_K* block = (device const block_q4_K*)row + (i >> 5);
    const ushort v = (i & 31) * 8, group = v >> 5;
    const float2 s = scale_and_min(block->scales, group);
    const float d = float(block->d) * s.x, m = float(block->dmin) * s.y;
    device const u8_t* qs = block->qs + (v >> 6) * 32 + (v & 31);
    const ushort shift = (group & 1) * 4;
    a = d * float4(low_nibbles(word(qs) >> shift)) - m;
    b = d * float4(low_nibbles(word(qs + 4) >> shift)) - m;
  }
};

struct Q5_K : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q5_K* block = (device const block_q5_K*)row + (i >> 5);
    const ushort v = (i & 31) * 8, group = v >> 5;
    const float2 s = scale_and_min(block->scales, group);
    const float d = float(block->d) * s.x, m = float(block->dmin) * s.y;
    device const u8_t* qs = block->qs + (v >> 6) * 32 + (v & 31);
    device const u8_t* qh = block->qh + (v & 31);
    ushort4 low, high;
    nibbles(qs, low, high);
    a = d * float4((group & 1 ? high : low) | top_bits(qh, group, 1)) - m;
    nibbles(qs + 4, low, high);
    b = d * float4((group & 1 ? high : low) | top_bits(qh + 4, group, 1)) - m;
  }
};

struct Q6_K : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q6_K* block = (device const block_q6_K*)row + (i >> 5);
    const ushort v = (i & 31) * 8, quarter = (v & 127) >> 5;  // quarter of its half of the super-block
    const float d = float(block->d) * float(block->scales[v >> 4]);
    device const u8_t* ql = block->ql + (v >> 7) * 64 + (quarter & 1) * 32 + (v & 31);
    device const u8_t* qh = block->qh + (v >> 7) * 32 + (v & 31);
    ushort4 low, high;
    nibbles(ql, low, high);
    a = d * (float4((quarter & 2 ? high : low) | top_bits(qh, quarter * 2, 3)) - 32.0f);
    nibbles(ql + 4, low, high);
    b = d * (float4((quarter & 2 ? high : low) | top_bits(qh + 4, quarter * 2, 3)) - 32.0f);
  }
};

static constant constexpr float kIQ4_values[16] = {IQ4_VALUES};
static constant constexpr float kMXFP4_values[16] = {MXFP4_VALUES};
static constant constexpr float kIQ2_magnitudes[4] = {IQ2_MAGNITUDES};
static constant constexpr float kIQ3_XXS_magnitudes[8] = {IQ3_XXS_MAGNITUDES};
static constant constexpr float kIQ3_S_magnitudes[8] = {IQ3_S_MAGNITUDES};

static inline float4 look_up(constant float* values, ushort4 index) {
  return float4(values[index.x], values[index.y], values[index.z], values[index.w]);
}

// Four values with levels of kBits bits each, negative if the bit of `signs` is set.
template <ushort kBits>
static inline float4 signed_values(constant float* magnitudes, uint levels, uint signs) {
  const ushort mask = (1 << kBits) - 1;
  const ushort4 level(levels & mask, (levels >> kBits) & mask, (levels >> 2 * kBits) & mask,
                      (levels >> 3 * kBits) & mask);
  const float4 sign(signs & 1 ? -1.0f : 1.0f, signs & 2 ? -1.0f : 1.0f, signs & 4 ? -1.0f : 1.0f,
                    signs & 8 ? -1.0f : 1.0f);
  return sign * look_up(magnitudes, level);
}

// Adds to seven sign bits the eighth, which makes the number of negative values even.
static inline uint even_signs(uint bits) {
  bits &= 127;
  uint parity = bits ^ (bits >> 4);
  parity ^= parity >> 2;
  return bits | ((parity ^ (parity >> 1)) & 1) << 7;
}

static inline float odd_scale(ushort s) {
  return float(2 * s + 1);
}

// Eight values of IQ2_XXS, IQ2_XS and IQ2_S: levels of 2 bits.
static inline void load_iq2(float d, uint levels, uint signs, thread float4& a, thread float4& b) {
  a = d * signed_values<2>(kIQ2_magnitudes, levels, signs);
  b = d * signed_values<2>(kIQ2_magnitudes, levels >> 8, signs >> 4);
}

struct IQ2_XXS : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq2_xxs* block = (device const block_iq2_xxs*)row + (i >> 5);
    device const u16_t* qs = block->qs + ((i & 31) >> 2) * 4;
    const ushort part = i & 3;  // index in the group
    const uint bits = uint(qs[2]) | uint(qs[3]) << 16;
    const float d = float(block->d) * 0.125f * odd_scale(bits >> 28);
    const ushort index = (qs[part >> 1] >> (part & 1) * 8) & 255;
    load_iq2(d, kIQ2_XXS_grid[index], even_signs(bits >> 7 * part), a, b);
  }
};

struct IQ2_XS : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq2_xs* block = (device const block_iq2_xs*)row + (i >> 5);
    const ushort item = i & 31, q = block->qs[item];
    const float d =
        float(block->d) * 0.125f * odd_scale((block->scales[item >> 2] >> ((item >> 1) & 1) * 4) & 15);
    load_iq2(d, kIQ2_XS_grid[q & 511], even_signs(q >> 9), a, b);
  }
};

struct IQ2_S : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq2_s* block = (device const block_iq2_s*)row + (i >> 5);
    const ushort item = i & 31;
    const float d =
        float(block->d) * 0.125f * odd_scale((block->scales[item >> 2] >> ((item >> 1) & 1) * 4) & 15);
    const ushort index = block->qs[item] | ((block->qh[item >> 2] >> (item & 3) * 2) & 3) << 8;
    load_iq2(d, kIQ2_S_grid[index], block->signs[item], a, b);
  }
};

struct IQ3_XXS : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq3_xxs* block = (device const block_iq3_xxs*)row + (i >> 5);
    const ushort item = i & 31;
    const uint bits = word(block->signs + (item >> 2) * 4), signs = even_signs(bits >> 7 * (item & 3));
    const float d = float(block->d) * 0.25f * odd_scale(bits >> 28);
    a = d * signed_values<3>(kIQ3_XXS_magnitudes, kIQ3_XXS_grid[block->qs[2 * item]], signs);
    b = d * signed_values<3>(kIQ3_XXS_magnitudes, kIQ3_XXS_grid[block->qs[2 * item + 1]], signs >> 4);
  }
};

struct IQ3_S : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq3_s* block = (device const block_iq3_s*)row + (i >> 5);
    const ushort item = i & 31, group = item >> 2, high = block->qh[group] >> (item & 3) * 2;
    const float d = float(block->d) * odd_scale((block->scales[group >> 1] >> (group & 1) * 4) & 15);
    const ushort first = block->qs[2 * item] | (high & 1) << 8;
    const ushort second = block->qs[2 * item + 1] | (high & 2) << 7;
    const uint signs = block->signs[item];
    a = d * signed_values<3>(kIQ3_S_magnitudes, kIQ3_S_grid[first], signs);
    b = d * signed_values<3>(kIQ3_S_magnitudes, kIQ3_S_grid[second], signs >> 4);
  }
};

struct IQ4_NL : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq4_nl* block = (device const block_iq4_nl*)row + (i >> 2);
    const float d = float(block->d);
    ushort4 low, high;
    nibbles(block->qs + (i & 3) * 4, low, high);
    a = d * look_up(kIQ4_values, low);
    b = d * look_up(kIQ4_values, high);
  }
};

struct IQ4_XS : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_iq4_xs* block = (device const block_iq4_xs*)row + (i >> 5);
    const ushort v = (i & 31) * 8, span = v >> 5, shift = ((v >> 4) & 1) * 4;
    const ushort low = (block->scales_l[span >> 1] >> (span & 1) * 4) & 15,
                 high = (block->scales_h >> 2 * span) & 3;
    const float d = float(block->d) * (float(low | high << 4) - 32.0f);
    device const u8_t* qs = block->qs + span * 16 + (v & 15);
    a = d * look_up(kIQ4_values, fields(qs, shift, 15));
    b = d * look_up(kIQ4_values, fields(qs + 4, shift, 15));
  }
};

static constant constexpr ushort kPowersOf3[5] = {1, 3, 9, 27, 81};

// Base-3 digits of four adjacent bytes: byte / 256 is a fraction, and multiplying by a power of 3 moves a
// digit to the integer part.
static inline float4 ternary_digits(device const u8_t* bytes, ushort power) {
  const ushort4 shifted = ushort4(bytes[0], bytes[1], bytes[2], bytes[3]) * power & ushort(255);
  return float4(shifted * ushort(3) >> 8) - 1.0f;
}

struct TQ1_0 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_tq1_0* block = (device const block_tq1_0*)row + (i >> 5);
    const ushort v = (i & 31) * 8;
    const float d = float(block->d);
    // Columns in order: five digits of 32 bytes, five of 16, and four of 4.
    device const u8_t* first = v < 160   ? block->qs + (v & 31)
                               : v < 240 ? block->qs + 32 + (v & 15)
                                         : block->qh;
    device const u8_t* second = v < 240 ? first + 4 : first;
    const ushort digit = v < 160 ? v >> 5 : v < 240 ? (v - 160) >> 4 : (v - 240) >> 2;
    a = d * ternary_digits(first, kPowersOf3[digit]);
    b = d * ternary_digits(second, kPowersOf3[v < 240 ? digit : digit + 1]);
  }
};

struct TQ2_0 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_tq2_0* block = (device const block_tq2_0*)row + (i >> 5);
    const ushort v = (i & 31) * 8, shift = ((v >> 5) & 3) * 2;
    const float d = float(block->d);
    device const u8_t* qs = block->qs + (v >> 7) * 32 + (v & 31);
    a = d * (float4(fields(qs, shift, 3)) - 1.0f);
    b = d * (float4(fields(qs + 4, shift, 3)) - 1.0f);
  }
};

struct MXFP4 : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_mxfp4* block = (device const block_mxfp4*)row + (i >> 2);
    const uint e = block->e;
    const float d = as_type<float>(e < 2 ? 0x200000u << e : (e - 1) << 23);
    device const u8_t* qs = block->qs + (i & 3) * 4;
    const ushort4 q(qs[0], qs[1], qs[2], qs[3]);
    a = d * look_up(kMXFP4_values, q & ushort(15));
    b = d * look_up(kMXFP4_values, q >> 4);
  }
};

struct NVFP4 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_nvfp4* block = (device const block_nvfp4*)row + (i >> 3);
    const ushort group = (i & 7) >> 1, bits = block->d[group], shift = (i & 1) * 4;
    // Read as half, the exponent is too small by 8; the values have another factor of 1/2. 0x7F is NaN.
    const float d = bits == 0x7F ? 0.0f : 128.0f * float(as_type<half>(ushort((bits & 0x7F) << 7)));
    device const u8_t* qs = block->qs + group * 8;
    a = d * look_up(kMXFP4_values, fields(qs, shift, 15));
    b = d * look_up(kMXFP4_values, fields(qs + 4, shift, 15));
  }
};

struct F32 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const float4* values = (device const float4*)row + i * 2;
    a = values[0];
    b = values[1];
  }
};

struct F16 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const half4* values = (device const half4*)row + i * 2;
    a = float4(values[0]);
    b = float4(values[1]);
  }
};

// Widened explicitly: the type bfloat requires Metal 3.1, and these kernels run on every version of Metal 3.
struct BF16 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const ushort4* values = (device const ushort4*)row + i * 2;
    a = as_type<float4>(uint4(values[0]) << 16);
    b = as_type<float4>(uint4(values[1]) << 16);
  }
};

// An item that a matmul has loaded and not yet stored, during the products of the previous step. By default
// it is dequantized before these products begin.
template <typename W>
struct Held {
  float4 a, b;
  void load(device const uchar* row, uint i) { W::load(row, i, a, b); }
  void unpack(thread half4& first, thread half4& second) const {
    first = half4(a);
    second = half4(b);
  }
};

// Keeps the item quantized, which takes fewer registers and delays the wait for the load until the store.
// Multiplies in float, since a GPU may flush half operands below 6e-5 to zero, as scales often are.
template <>
struct Held<Q4_0> {
  ushort2 pairs;
  fp16_t d;
  void load(device const uchar* row, uint i) {
    device const block_q4_0* block = (device const block_q4_0*)row + (i >> 2);
    device const ushort* in = (device const ushort*)(block->qs + (i & 3) * 4);
    pairs = ushort2(in[0], in[1]);
    d = block->d;
  }
  void unpack(thread half4& first, thread half4& second) const {
    float4 a, b;
    scaled_nibbles(as_type<uint>(pairs), float(d), a, b);
    first = half4(a);
    second = half4(b);
  }
};

template <>
struct Held<Q8_0> {
  ushort4 pairs;
  fp16_t d;
  void load(device const uchar* row, uint i) {
    device const block_q8_0* block = (device const block_q8_0*)row + (i >> 2);
    device const ushort* in = (device const ushort*)(block->qs + (i & 3) * 8);
    pairs = ushort4(in[0], in[1], in[2], in[3]);
    d = block->d;
  }
  void unpack(thread half4& first, thread half4& second) const {
    first = half4(float(d) * float4(float2(as_type<char2>(pairs.x)), float2(as_type<char2>(pairs.y))));
    second = half4(float(d) * float4(float2(as_type<char2>(pairs.z)), float2(as_type<char2>(pairs.w))));
  }
};
