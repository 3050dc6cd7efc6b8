// Intermediate results of a pass. One workspace serves all sessions of an engine.
#pragma once

#include <cstddef>

#include "buffer.h"
#include "kernels.h"
#include "weights.h"

namespace metal_prefill::cpu {

// One activation a row, in the forms that its readers need.
struct Activations {
  Forms forms;
  FloatRows f32;
  Int8Rows int8;
  PairRows bfloat16;
};

// Room for `rows` rows. Named as in the forward pass.
struct Workspace {
  FloatRows x;                 // [rows][dim]: the residual stream
  FloatRows block;             // [rows][dim]: a block's output where a norm follows it
  FloatRows q;                 // [rows][n_heads * key_dim]
  FloatRows k;                 // [rows][n_kv_heads * key_dim]
  FloatRows v;                 // [rows][n_kv_heads * value_dim]
  Activations normed;          // [rows][dim]
  Activations att;             // [rows][n_heads * value_dim]
  Activations ffn;             // [rows][ffn_dim]
  float* rotations = nullptr;  // [tables][rows][rope_dim] cosines and sines
  float* logits = nullptr;     // [logit_rows][vocab_size]

  // Makes room, in one allocation for the rows and one for the logits; does nothing where there is enough.
  // Throws DeviceError without a change.
  void reserve(const Config& config, const Weights& weights, std::size_t rope_tables, int rows,
               int logit_rows);
  std::size_t bytes() const { return memory_.bytes() + logits_memory_.bytes(); }

 private:
  int rows_ = 0;
  Buffer memory_, logits_memory_;
};

}  // namespace metal_prefill::cpu
