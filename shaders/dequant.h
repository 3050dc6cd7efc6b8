// Dequantizers: how a kernel reads a row of any tensor type.
//
// A row is read in items of 8 values. Item i holds two groups of 4 adjacent columns, [first(i), first(i) + 4)
// and the same kSecond columns further on. Formats that keep two values 16 columns apart in one byte have
// kSecond = 16, so that each byte is read by one thread only; four successive items always cover 32 whole
// columns.
//
// Rows are aligned to two bytes, not to more: quants are read in units of two bytes.
#pragma once

#include <metal_stdlib>

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

// Low and high nibbles of four bytes, given as two pairs.
static inline void nibbles(ushort p, ushort q, thread ushort4& low, thread ushort4& high) {
  low = ushort4(p & 0xF, (p >> 8) & 0xF, q & 0xF, (q >> 8) & 0xF);
  high = ushort4((p >> 4) & 0xF, p >> 12, (q >> 4) & 0xF, q >> 12);
}

// The same of the four bytes at an even address.
static inline void nibbles(device const u8_t* bytes, thread ushort4& low, thread ushort4& high) {
  device const ushort* pairs = (device const ushort*)bytes;
  nibbles(pairs[0], pairs[1], low, high);
}

// Bits 4 and up of four adjacent quants: for each, those that `mask` selects from bit `shift` of a byte on.
static inline ushort4 top_bits(device const u8_t* bytes, ushort shift, ushort mask) {
  device const ushort* pairs = (device const ushort*)bytes;
  const ushort p = pairs[0], q = pairs[1], high = shift + 8;
  return ushort4(((p >> shift) & mask) << 4, ((p >> high) & mask) << 4, ((q >> shift) & mask) << 4,
                 ((q >> high) & mask) << 4);
}

static inline uint word(device const u8_t* bytes) {
  device const ushort* pairs = (device const ushort*)bytes;
  return uint(pairs[0]) | (uint(pairs[1]) << 16);
}

// Bit 4 of four adjacent quants, whose fifth bits are the lowest four of `bits`.
static inline ushort4 fifth_bits(uint bits) {
  return ushort4((bits & 1) << 4, (bits & 2) << 3, (bits & 4) << 2, (bits & 8) << 1);
}

struct Q4_0 : PairedItems {
  // An item as it is in memory, for kernels that load it before they need it.
  struct Packed {
    ushort p, q;
    fp16_t d;
  };
  static Packed fetch(device const uchar* row, uint i) {
    device const block_q4_0* block = (device const block_q4_0*)row + (i >> 2);
    device const ushort* pairs = (device const ushort*)(block->qs + (i & 3) * 4);
    return {pairs[0], pairs[1], block->d};
  }
  static void unpack(Packed item, thread float4& a, thread float4& b) {
    const float d = float(item.d);
    ushort4 low, high;
    nibbles(item.p, item.q, low, high);
    a = d * (float4(low) - 8.0f);
    b = d * (float4(high) - 8.0f);
  }
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    unpack(fetch(row, i), a, b);
  }
};

struct Q4_1 : PairedItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const block_q4_1* block = (device const block_q4_1*)row + (i >> 2);
    const float d = float(block->d), m = float(block->m);
    ushort4 low, high;
    nibbles(block->qs + (i & 3) * 4, low, high);
    a = d * float4(low) + m;
    b = d * float4(high) + m;
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
    ushort4 low, high;
    nibbles(qs, low, high);
    a = d * float4(group & 1 ? high : low) - m;
    nibbles(qs + 4, low, high);
    b = d * float4(group & 1 ? high : low) - m;
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
    const ushort v = (i & 31) * 8, quarter = (v & 127) >> 5;  // of its half of the super-block
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

// Widened by hand: the type bfloat needs Metal 3.1, and these kernels run on every version of Metal 3.
struct BF16 : PlainItems {
  static void load(device const uchar* row, uint i, thread float4& a, thread float4& b) {
    device const ushort4* values = (device const ushort4*)row + i * 2;
    a = as_type<float4>(uint4(values[0]) << 16);
    b = as_type<float4>(uint4(values[1]) << 16);
  }
};
