#include "weights.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "../base/release_pages.h"

namespace metal_prefill::cpu {

namespace {

struct LayerLinear {
  Tensor LayerWeights::* tensor;
  Linear CpuLayer::* linear;
  Extent rows, cols;
  // Routers are multiplied in float32, as small differences decide between experts.
  bool is_exact() const { return rows == Extent::kExperts; }
};
constexpr LayerLinear kLayerLinears[] = {
#define LAYER_MATRIX(member, name, rows, cols, presence) \
  {&LayerWeights::member, &CpuLayer::member, Extent::rows, Extent::cols},
#include "../model/tensors.inc"
};
struct LayerExperts {
  Tensor LayerWeights::* tensor;
  std::vector<Linear> CpuLayer::* linears;
  Extent cols;
};
constexpr LayerExperts kLayerExperts[] = {
#define LAYER_EXPERTS(member, name, rows, cols, presence) \
  {&LayerWeights::member, &CpuLayer::member, Extent::cols},
#include "../model/tensors.inc"
};

Tensor matrix_of_expert(const Tensor& all, int expert, int count) {
  Tensor matrix = all;
  matrix.rows /= count;
  matrix.bytes /= std::size_t(count);
  matrix.data += std::size_t(expert) * matrix.bytes;
  return matrix;
}

}  // namespace

Linear linear_of(const Tensor& tensor, Compute compute, const Kernels& kernels, bool keep_wide) {
  Linear linear{tensor, packed_matrix(tensor)};
  const bool wide = compute == Compute::kInt16 && kernels.rotate_wide;
  if ((wide || compute == Compute::kW8A8) && tensor.cols <= kMaxRotatedCols) {
    linear.packed.packing = wide ? Packing::kRotatedWide : Packing::kRotated;
    linear.packed.group_stride = linear.packed.group_bytes();
    return linear;
  }
  const bool is_quantized = linear.packed.packing != Packing::kNone;
  const bool may_round =
      compute == Compute::kBf16 || (compute == Compute::kInt8 && tensor.type == TensorType::kBF16);
  linear.pairs = may_round && kernels.multiply_pairs;
  if (linear.pairs) {
    if (keep_wide || !is_quantized) linear.packed.packing = Packing::kPairs;
  } else if (compute != Compute::kInt8 || !is_quantized) {
    linear.packed.packing = keep_wide ? Packing::kFloats : Packing::kNone;
  }
  linear.packed.group_stride = linear.packed.group_bytes();
  linear.super =
      compute == Compute::kInt8 && kernels.multiply_super && has_integer_scales(linear.packed.packing);
  return linear;
}

std::size_t scratch_bytes_of(const Linear& linear) {
  const PackedMatrix& packed = linear.packed;
  if (packed.packing == Packing::kNone)
    return kGroupRows * round_up(std::size_t(linear.tensor.cols), kFloatPad) * sizeof(float);
  if (linear.rotated()) return round_up(std::size_t(linear.tensor.cols), kRotatedCols) * sizeof(float);
  if (linear.ready_panels() || linear.super) return 0;
  const std::size_t wide = is_narrow(packed.packing) ? wide_group(packed, nullptr).group_bytes() : 0;
  return wide + (linear.pairs ? std::size_t(packed.cols / kBlockCols) * sizeof(PairBlock) : 0);
}

Buffer gather_vectors(Model& model) {
  std::vector<Tensor*> vectors;
#define MODEL_NORM(member, ...) vectors.push_back(&model.member);
#define MODEL_VECTOR MODEL_NORM
#include "../model/tensors.inc"
  for (LayerWeights& layer : model.layers) {
#define LAYER_NORM(member, ...) vectors.push_back(&layer.member);
#define LAYER_VECTOR LAYER_NORM
#define LAYER_FILTER LAYER_NORM
#include "../model/tensors.inc"
  }
  const auto room = [](const Tensor& vector) { return round_up(vector.bytes, std::size_t(64)); };
  std::size_t bytes = 0;
  for (const Tensor* vector : vectors) bytes += room(*vector);
  Buffer copies(bytes, "norms and biases");
  std::byte* next = copies.data();
  for (Tensor* vector : vectors) {
    if (!*vector) continue;
    std::memcpy(next, vector->data, vector->bytes);
    vector->data = next;
    next += room(*vector);
  }
  return copies;
}

bool rounds_coarsely(const Model& model, Compute compute) {
  if (compute != Compute::kInt8) return compute == Compute::kBf16 || compute == Compute::kW8A8;
  const auto packed = [](const Tensor& tensor) { return packing_of(tensor.type) != Packing::kNone; };
  const auto in_layer = [&](const LayerWeights& layer) {
    const auto is_packed = [&](const auto& of) { return packed(layer.*of.tensor); };
    return std::any_of(std::begin(kLayerLinears), std::end(kLayerLinears), is_packed) ||
           std::any_of(std::begin(kLayerExperts), std::end(kLayerExperts), is_packed);
  };
  return packed(model.output) || std::any_of(model.layers.begin(), model.layers.end(), in_layer);
}

namespace {

// Whether quantized weights are packed as pairs.
bool is_widened(const Linear& linear) {
  return linear.packed.packing == Packing::kPairs && packing_of(linear.tensor.type) != Packing::kNone;
}

// Packs a group of rotated rows; rows beyond the matrix are zero.
void pack_rotated(const Linear& linear, int group, const Kernels& kernels, std::byte* memory) {
  const Tensor& tensor = linear.tensor;
  const int first = group * kGroupRows, rows = std::min(kGroupRows, tensor.rows - first);
  const std::size_t cols = std::size_t(tensor.cols), padded = round_up(cols, kRotatedCols);
  float *values = reinterpret_cast<float*>(memory), *rotated = values + padded;
  auto* codes = reinterpret_cast<std::byte*>(rotated + padded);
  auto* blocks = reinterpret_cast<RotatedBlock*>(linear.packed.group(group));
  const int zero = linear.wide() ? 0 : kernels.rotated_zero;
  const auto rotate = linear.wide() ? kernels.rotate_wide : kernels.rotate;
  std::memset(blocks, zero, linear.packed.group_bytes());
  float* scales = linear.packed.scales(group);
  std::fill_n(scales, kGroupRows, 0.0f);
  for (int r = 0; r < rows; ++r) {
    RotatedRows::Terms terms;
    dequantize_row(tensor.type, tensor.row(first + r), values, cols);
    rotate(values, tensor.cols, rotated, codes, terms);
    scales[r] = terms.scale;
    const std::size_t bytes = std::size_t(linear.packed.blocks_per_row()) * kRotatedCols;
    for (std::size_t i = 0; i < bytes; i += 4) {
      std::uint8_t* out =
          blocks[i / kRotatedCols].codes[r / kPanelRows][i % kRotatedCols / 4][r % kPanelRows];
      for (std::size_t k = 0; k < 4; ++k) out[k] = std::uint8_t(int(codes[i + k]) + zero);
    }
  }
}

void pack_floats(const Linear& linear, int group, const Kernels& kernels) {
  // A multiple of the blocks of all types. A cache line between the rows avoids conflicts in the L1 cache.
  constexpr int kColumns = 256;
  const Tensor& tensor = linear.tensor;
  auto* out = reinterpret_cast<FloatBlock*>(linear.packed.group(group));
  alignas(64) float memory[kGroupRows][kColumns + kFloatPad];
  const FloatRows rows{memory[0], kColumns + kFloatPad};
  for (int col = 0; col < tensor.cols; col += kColumns) {
    const int n = std::min(kColumns, tensor.cols - col), padded = round_up(n, kFloatPad);
    for (int r = 0; r < kGroupRows; ++r) {
      const int row = group * kGroupRows + r, filled = row < tensor.rows ? n : 0;
      if (filled > 0)
        dequantize_row(tensor.type, tensor.row(row) + row_bytes(tensor.type, std::size_t(col)), rows.row(r),
                       std::size_t(n));
      std::fill(rows.row(r) + filled, rows.row(r) + padded, 0.0f);
    }
    kernels.to_blocks(rows, padded / kFloatPad, out + col / kFloatPad);
  }
}

}  // namespace

std::size_t packing_bytes_of(const Linear& linear) {
  if (linear.rotated())  // a row in float32, rotated, and rounded
    return round_up(std::size_t(linear.tensor.cols), kRotatedCols) *
           (2 * sizeof(float) + linear.code_bytes());
  if (!is_widened(linear)) return 0;
  const PackedMatrix own = packed_matrix(linear.tensor);
  return round_up(own.group_bytes(), std::size_t(64)) + scratch_bytes_of({linear.tensor, own, true});
}

const PairBlock* pairs_of_group(const Kernels& kernels, const PackedMatrix& weight, int group,
                                std::byte* scratch) {
  if (weight.packing == Packing::kPairs) return weight.pairs(group);
  auto* pairs = reinterpret_cast<PairBlock*>(scratch);
  if (is_narrow(weight.packing)) {
    std::byte* wide = scratch + std::size_t(weight.cols / kBlockCols) * sizeof(PairBlock);
    kernels.widen(weight, group, wide);
    kernels.widen_to_pairs(wide_group(weight, wide), 0, pairs);
  } else {
    kernels.widen_to_pairs(weight, group, pairs);
  }
  return pairs;
}

void pack(const Linear& linear, int group, const Kernels& kernels, std::byte* memory) {
  if (linear.rotated()) return pack_rotated(linear, group, kernels, memory);
  if (linear.floats()) return pack_floats(linear, group, kernels);
  if (!is_widened(linear)) return pack_group(linear.tensor, group, linear.packed.group(group));
  PackedMatrix own = packed_matrix(linear.tensor);
  const std::size_t bytes = round_up(own.group_bytes(), std::size_t(64));
  std::memset(memory, 0, bytes);
  own.blocks = memory;
  own.group_stride = 0;  // reuses the same memory for every group
  pack_group(linear.tensor, group, own.blocks);
  std::memcpy(linear.packed.group(group), pairs_of_group(kernels, own, group, memory + bytes),
              linear.packed.group_bytes());
}

Forms& Weights::input_of(Extent cols) {
  if (cols == Extent::kDim) return dim_input;
  if (cols == Extent::kAttention) return attention_input;
  if (cols == Extent::kFfn || cols == Extent::kSharedFfn) return ffn_input;
  if (cols == Extent::kLayerInput) return layer_input;
  if (cols == Extent::kChannels) return conv_input;
  if (cols == Extent::kScanDim) return scan_input;
  throw std::logic_error("no step computes the input of a matrix");
}

// Places matrices in the order in which a token reads them: one linear stream, which the processor
// prefetches. Groups of gate and up alternate, as they are multiplied.
std::size_t Weights::lay_out(std::byte* base) {
  std::size_t bytes = 0;
  const auto place = [&](std::initializer_list<Linear*> in_turns) {
    std::size_t stride = 0;
    for (const Linear* linear : in_turns) stride += linear->packed.group_bytes();
    std::size_t offset = bytes;
    for (Linear* linear : in_turns) {
      linear->packed.blocks = base ? base + offset : nullptr;
      linear->packed.group_stride = stride;
      offset += linear->packed.group_bytes();
    }
    bytes += stride * std::size_t((*in_turns.begin())->packed.groups());
  };
  for (CpuLayer& layer : layers) {
    for (const LayerLinear& of : kLayerLinears) {
      const bool gated = bool(layer.w_gate.tensor);
      if (gated && of.linear == &CpuLayer::w_up) continue;  // placed together with the gate
      if (gated && of.linear == &CpuLayer::w_gate)
        place({&layer.w_gate, &layer.w_up});
      else
        place({&(layer.*of.linear)});
    }
    for (std::size_t expert = 0; expert < layer.up_experts.size(); ++expert) {
      if (layer.gate_experts.empty())
        place({&layer.up_experts[expert]});
      else
        place({&layer.gate_experts[expert], &layer.up_experts[expert]});
    }
    for (Linear& linear : layer.down_experts) place({&linear});
  }
  place({&output});
  place({&per_layer_projection});
  place({&embedding_projection});
  return bytes;
}

void Weights::settle(Team& team) {
  if (!were_packed_ || arena_.bytes() > 0) return;
  Buffer arena(packed_bytes_, "packed weights");
  constexpr std::size_t kPiece = std::size_t(2) << 20;  // a huge page
  team.run([&](Worker& worker) {
    worker.for_each(int(ceil_div(packed_bytes_, kPiece)), [&](int i) {
      const std::size_t begin = std::size_t(i) * kPiece, bytes = std::min(kPiece, packed_bytes_ - begin);
      std::memcpy(arena.data() + begin, given_.data + begin, bytes);
      release_pages(given_.data + begin, bytes);
    });
  });
  arena_ = std::move(arena);
  lay_out(arena_.data());
}

Weights::Weights(const Model& model, Compute compute, const Kernels& kernels, Team& team)
    : given_(model.packed) {
  const int distinct = model.config.distinct_layers;
  layers.resize(distinct > 0 ? std::size_t(distinct) : model.layers.size());
  // Encoders never decode, so that larger weights are never read for a single token.
  const bool keep_wide = !model.config.causal;
  std::vector<Linear*> linears;
  const auto add = [&](Linear& linear, const Tensor& tensor, Forms& input, bool is_exact) {
    linear = linear_of(tensor, is_exact ? Compute::kF32 : compute, kernels, keep_wide);
    input.add(linear);
    input.rests |= linear.rotated() && !linear.wide() && kernels.limit_pairs;
    widens |= linear.pairs && linear.packed.packing != Packing::kPairs;
    scratch_bytes = std::max(scratch_bytes, scratch_bytes_of(linear));
    linears.push_back(&linear);
  };
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (const LayerLinear& of : kLayerLinears)
      if (const Tensor& tensor = model.layers[l].*of.tensor)
        add(layers[l].*of.linear, tensor, input_of(of.cols), of.is_exact());
    const int experts = model.config.n_experts;
    for (const auto& [tensor, linears, cols] : kLayerExperts) {
      if (!(model.layers[l].*tensor)) continue;
      (layers[l].*linears).resize(std::size_t(experts));
      for (int expert = 0; expert < experts; ++expert)
        add((layers[l].*linears)[std::size_t(expert)],
            matrix_of_expert(model.layers[l].*tensor, expert, experts), input_of_experts(cols), false);
    }
  }
  if (model.output) add(output, model.output, dim_input, false);
  if (const Tensor& projection = model.per_layer_projection)
    add(per_layer_projection, projection, dim_input, false);
  Forms embedded;
  if (const Tensor& projection = model.embedding_projection)
    add(embedding_projection, projection, embedded, true);

  for (const LayerWeights& layer : model.layers) {
    has_conv = has_conv || layer.conv;
    has_scan = has_scan || layer.scan_conv;
    const Tensor& conv = conv_filter(layer);
    std::vector<float>& filter = filters_.emplace_back(conv.bytes / sizeof(float));
    const auto* values = reinterpret_cast<const float*>(conv.data);
    for (int channel = 0; channel < conv.rows; ++channel)
      for (int tap = 0; tap < conv.cols; ++tap)
        filter[std::size_t(tap) * std::size_t(conv.rows) + std::size_t(channel)] = *values++;
  }

  packed_bytes_ = lay_out(nullptr);
  were_packed_ = packed_bytes_ > 0 && given_.bytes == packed_bytes_;
  if (were_packed_) {
    lay_out(const_cast<std::byte*>(given_.data));  // never written to
    return;
  }
  arena_ = Buffer(packed_bytes_, "packed weights");
  lay_out(arena_.data());

  // Items of several groups: large enough that claiming them costs nothing, small enough to share one matrix.
  constexpr int kGroupsPerItem = 16;
  struct Item {
    const Linear* linear;
    int first;
  };
  std::erase_if(linears, [](const Linear* linear) { return linear->packed.packing == Packing::kNone; });
  std::vector<Item> items;
  for (const Linear* linear : linears)
    for (int group = 0; group < linear->packed.groups(); group += kGroupsPerItem)
      items.push_back({linear, group});
  std::size_t bytes = 0;
  for (const Linear* linear : linears) bytes = std::max(bytes, packing_bytes_of(*linear));
  std::vector<Buffer> memory(std::size_t(team.size()));
  if (bytes > 0)
    for (Buffer& of_thread : memory) of_thread = Buffer(bytes, "weights while they are packed");
  team.run([&](Worker& worker) {
    worker.for_each(int(items.size()), [&](int i) {
      const auto& [linear, first] = items[std::size_t(i)];
      const int end = std::min(first + kGroupsPerItem, linear->packed.groups());
      for (int group = first; group < end; ++group)
        pack(*linear, group, kernels, memory[std::size_t(worker.index())].data());
      const std::byte* begin = linear->tensor.row(first * kGroupRows);
      const std::byte* rest = linear->tensor.data + linear->tensor.bytes;
      if (end * kGroupRows < linear->tensor.rows) rest = linear->tensor.row(end * kGroupRows);
      release_pages(begin, std::size_t(rest - begin));
    });
  });
}

}  // namespace metal_prefill::cpu
