// Staging of a matmul's operands in threadgroup memory, in half precision.
#pragma once

#include <metal_stdlib>

#include "args.h"
#include "dequant.h"
#include "projection.h"

using namespace metal;

// Weights are loaded into registers and stored from there to threadgroup memory, so that the loads of a step
// are in flight while the simdgroups multiply the previous one. A tile of kRows rows is kRows * 4 items of 8
// columns for 128 threads. Rows and tokens beyond the end repeat the last one; their results are not stored.
// If the length of a row is not a multiple of MATMUL_K, tokens are padded with zeros, and the weights there
// may have any value.
template <typename W, ushort kRows, ushort kStagedRow>
struct WeightTile {
  static constant constexpr ushort kItems = kRows * 4 / MATMUL_THREADS;
  device const uchar* row[kItems];
  Held<W> items[kItems];

  // Sets rows of the stacked matrices from `first` on, among the args.out_dim rows after row `base`.
  template <typename Args>
  void begin(device const uchar* w, constant Args& args, uint first, ushort thread_index, uint base = 0) {
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) {
      const uint r = first + thread_index / 4 + i * (MATMUL_THREADS / 4);
      row[i] = stacked_row(w, args.weights, base + min(r, args.out_dim - 1));
    }
  }

  // Sets these rows of gate and up, in alternating blocks of 8: kRows / 2 of each.
  template <typename Args>
  void begin_gated(device const uchar* w, constant Args& args, uint first, ushort thread_index,
                   uint base = 0) {
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) {
      const ushort r = thread_index / 4 + i * (MATMUL_THREADS / 4), block = r / 8;
      const uint out = min(first + block / 2 * 8 + r % 8, args.out_dim - 1);
      row[i] = half_row(w, args.weights, block % 2, base + out);
    }
  }

  void load(ushort thread_index, uint k, uint in_dim) {
    const uint item = min(k / 8 + thread_index % 4, in_dim / 8 - 1);
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) items[i].load(row[i], item);
  }

  void store(threadgroup half* staged, ushort thread_index) const {
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) {
      const ushort r = thread_index / 4 + i * (MATMUL_THREADS / 4);
      threadgroup half4* out = (threadgroup half4*)(staged + r * kStagedRow + W::first(thread_index % 4));
      half4 first, second;
      items[i].unpack(first, second);
      out[0] = first;
      out[W::kSecond / 4] = second;
    }
  }
};

template <ushort kRows, ushort kStagedRow>
struct TokenTile {
  static constant constexpr ushort kItems = kRows * 4 / MATMUL_THREADS;
  device const half* row[kItems];
  half4 values[kItems][2];

  void begin(device const half* x, constant MatmulArgs& args, uint first, ushort thread_index) {
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) {
      const uint t = first + thread_index / 4 + i * (MATMUL_THREADS / 4);
      row[i] = x + min(t, args.tokens - 1) * args.in_dim;
    }
  }

  void load(ushort thread_index, uint k, uint in_dim) {
    k += thread_index % 4 * 8;
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) {
      if (k < in_dim) {
        device const half4* in = (device const half4*)(row[i] + k);
        values[i][0] = in[0];
        values[i][1] = in[1];
      } else {
        values[i][0] = values[i][1] = 0.0h;
      }
    }
  }

  void store(threadgroup half* staged, ushort thread_index) const {
    FOR_UNROLL (ushort i = 0; i < kItems; ++i) {
      const ushort r = thread_index / 4 + i * (MATMUL_THREADS / 4);
      threadgroup half4* out = (threadgroup half4*)(staged + r * kStagedRow + thread_index % 4 * 8);
      out[0] = values[i][0];
      out[1] = values[i][1];
    }
  }
};

// The steps of a product over all columns, MATMUL_K at a time for each group of threads:
//
//   stage.begin(staged);
//   for (uint k = 0; k < stage.in_dim; k += stage.kStep) {
//     const bool more = stage.load_after(k);
//     // multiply stage.tokens_staged() by stage.weights_staged()
//     if (more) stage.store_next();
//   }
//
// After the loop no simdgroup reads stage.next.
//
// With kParts, as many groups of MATMUL_THREADS threads alternate in the steps, each with its own Stage and
// staging memory. A step then overwrites the previous one, since other groups can run meanwhile. All groups
// run the same number of iterations; a step beyond the last column consists of zeros.
template <typename W, ushort kTokens, ushort kRows, ushort kStagedRow, ushort kParts = 1>
struct Stage {
  static constant constexpr ushort kBuffers = kParts == 1 ? 2 : 1;
  static constant constexpr uint kStep = kParts * MATMUL_K;                 // columns per step of all groups
  static constant constexpr uint kHalves = (kTokens + kRows) * kStagedRow;  // per step
  WeightTile<W, kRows, kStagedRow> weights;
  TokenTile<kTokens, kStagedRow> tokens;
  threadgroup half* current;  // the step that is being multiplied
  threadgroup half* next;     // the step that is written meanwhile
  uint in_dim;
  ushort thread_index;  // in the group
  ushort part = 0;      // index of the group

  threadgroup half* tokens_staged() const { return current; }  // [kTokens][kStagedRow]
  threadgroup half* weights_staged() const { return current + kTokens * kStagedRow; }

  void load(uint k) {
    tokens.load(thread_index, k, in_dim);
    weights.load(thread_index, k, in_dim);
  }
  void store(threadgroup half* staged) const {
    tokens.store(staged, thread_index);
    weights.store(staged + kTokens * kStagedRow, thread_index);
  }

  // `staged` has room for kBuffers steps.
  void begin(threadgroup half* staged) {
    current = staged;
    next = staged + (kBuffers - 1) * kHalves;
    load(part * MATMUL_K);
    store(current);
  }
  // Starts the loads of the step after that of column k, if there is one; returns whether there is.
  bool load_after(uint k) {
    // All threads have stored `current` and have read the old contents of `next`.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool more = k + kStep < in_dim;
    if (more) load(k + kStep + part * MATMUL_K);
    return more;
  }
  void store_next() {
    if (kBuffers == 1) threadgroup_barrier(mem_flags::mem_threadgroup);  // all threads have read it
    store(next);
    threadgroup half* swap = current;
    current = next;
    next = swap;
  }
};
