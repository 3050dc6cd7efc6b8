#include "weights.h"

#include <algorithm>

namespace metal_prefill::cpu {

Weights::Weights(const Model& model, Compute compute, Team& team) {
  layers.resize(model.layers.size());
  std::vector<Linear*> linears;
  const auto add = [&](Linear& linear, const Tensor& tensor, Forms& input) {
    linear.tensor = tensor;
    linear.packed = packed_matrix(tensor);
    if (compute != Compute::kInt8) linear.packed.packing = Packing::kNone;
    input.add(linear);
    if (!linear.int8()) max_float_cols = std::max(max_float_cols, tensor.cols);
    linears.push_back(&linear);
  };
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerWeights& from = model.layers[l];
    CpuLayer& to = layers[l];
    add(to.wq, from.wq, dim_input);
    add(to.wk, from.wk, dim_input);
    add(to.wv, from.wv, dim_input);
    add(to.wo, from.wo, attention_input);
    add(to.w_gate, from.w_gate, dim_input);
    add(to.w_up, from.w_up, dim_input);
    add(to.w_down, from.w_down, ffn_input);
  }
  add(output, model.output, dim_input);

  // In the order in which a token reads them: one linear stream, which the processor fetches ahead. Groups of
  // gate and up are multiplied in turns, and so they lie in turns.
  std::size_t bytes = 0;
  const auto place = [&](std::byte* base, std::initializer_list<Linear*> in_turns) {
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
  const auto lay_out = [&](std::byte* base) {
    bytes = 0;
    for (CpuLayer& layer : layers) {
      for (Linear* linear : {&layer.wq, &layer.wk, &layer.wv, &layer.wo}) place(base, {linear});
      place(base, {&layer.w_gate, &layer.w_up});
      place(base, {&layer.w_down});
    }
    place(base, {&output});
  };
  lay_out(nullptr);
  arena_ = Buffer(bytes, "packed weights");
  lay_out(arena_.data());

  // Items of several groups: large enough that claiming them costs nothing, small enough to share one matrix.
  constexpr int kGroupsPerItem = 16;
  struct Item {
    const Linear* linear;
    int first;
  };
  std::erase_if(linears, [](const Linear* linear) { return !linear->int8(); });
  std::vector<Item> items;
  for (const Linear* linear : linears)
    for (int group = 0; group < linear->packed.groups(); group += kGroupsPerItem)
      items.push_back({linear, group});
  team.run([&](Worker& worker) {
    worker.for_each(int(items.size()), [&](int i) {
      const auto& [linear, first] = items[std::size_t(i)];
      const int end = std::min(first + kGroupsPerItem, linear->packed.groups());
      for (int group = first; group < end; ++group)
        pack_group(linear->tensor, group, linear->packed.group(group));
      const std::byte* begin = linear->tensor.row(first * kGroupRows);
      const std::byte* rest = linear->tensor.data + linear->tensor.bytes;
      if (end * kGroupRows < linear->tensor.rows) rest = linear->tensor.row(end * kGroupRows);
      release_pages(begin, std::size_t(rest - begin));
    });
  });
}

}  // namespace metal_prefill::cpu
