// Buffers as the forward pass sees them: a name and a location. Only their owner knows their type.
#pragma once

#include <cstddef>

namespace metal_prefill::metal {

// docs/kernels.md lists the sizes of the activation buffers.
enum class BufferName {
  kIds,         // [tokens] int32, from the host
  kTypes,       // [tokens] int32, from the host
  kRows,        // [tokens] PassRow, from the host
  kTiles,       // [tiles] AttentionTile, from the host
  kPages,       // block tables, int32, from the host
  kStateRows,   // [tokens + chunks] StateRow, from the host
  kLayerRows,   // [tokens][n_layers][per_layer_dim] f32, from the host: rows of an embedding
  kX,           // [tokens][dim] f32: the residual stream
  kEmbedded,    // [tokens][embedding_dim] f32: before the projection
  kNormed,      // [tokens][dim] f16 or f32
  kProjected,   // [tokens][projected_columns()] f32: q, k and v, and the projections of a state
  kPartial,     // attention_decode: the splits that attention_combine joins
  kRelative,    // [tokens][n_heads][keys] f32: what relative positions add to scores
  kAtt,         // [tokens][n_heads * value_dim] f16 or f32
  kBlock,       // [tokens][dim] f32: a block's output if a norm follows it
  kGateUp,      // [tokens][2 * ffn_dim] f32
  kFfn,         // [tokens][ffn_dim] f16 or f32; also of the shared expert
  kRoutes,      // [tokens][experts_used] Route
  kRouteRows,   // [tokens * experts_used] u32: the row at each place
  kRouteTiles,  // [tiles] ExpertTile
  kExpertFfn,   // [tokens * experts_used][expert_dim] f16 or f32
  kExpertOut,   // [tokens * experts_used][dim] f32
  kConv,        // [tokens][dim] f16 or f32: output of a short convolution
  kConvolved,   // [tokens][scan_channels()] f32: keys, queries and values of a recurrence
  kScanned,     // [tokens][scan_dim()] f32: its output
  kScanOut,     // [tokens][scan_dim()] f16 or f32: gated and normed
  kInputs,      // [tokens][n_layers][per_layer_dim] f32: of each layer, from the token itself
  kLogits,      // [rows][vocab_size] f32
  kHostLogits,  // [rows][vocab_size] f32, to the host
  kCandidates,  // argmax: [rows], one for each threadgroup
  kResult,      // [rows] Candidate, to the host
  kTargets,     // [rows] int32, from the host
  kLogProbs,    // [rows] f32, to the host
  kHidden,      // [rows][dim] f32, to the host: normed rows, then rows of the residual stream
  kActivationCount,

  kWeights = kActivationCount,  // of the file
  kQkvBias,
  kFfnBias,      // of gate and up
  kExpertsBias,  // the same of all experts
  kPositionBias,
  kHeadNorm,  // weights of the output norm, times the scale of the logits
  kKeys,      // pages of the pool, from the keys of a layer in the first one on
  kValues,
  kStates,     // slots of the pool, from the state of a layer in the first one on
  kRopeTable,  // [position][rope_dim / 2] pairs
};
struct BufferTraits {
  const char* label;
  bool host;  // the host writes or reads it
};
BufferTraits traits_of(BufferName name);

// A place in a buffer, without ownership. Views are copied for every dispatch and hold no reference.
struct View {
  void* buffer = nullptr;  // on a GPU an id<MTLBuffer>; in a recording any pointer that is not null
  std::size_t offset = 0;  // bytes
  BufferName name = BufferName::kX;

  explicit operator bool() const { return buffer != nullptr; }
  View at(std::size_t bytes) const { return {buffer, offset + bytes, name}; }
  // Row `n` of an array of 4-byte elements.
  View row(std::size_t n, int columns) const { return at(n * std::size_t(columns) * sizeof(float)); }
};

// K and V of a layer.
struct LayerCache {
  View keys, values;
};

}  // namespace metal_prefill::metal
