#include "buffers.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>

#include "../../base/rounding.h"
#include "../../model/tensors.h"

namespace metal_prefill::metal {

namespace {

// Views that would fill the GPU's working set. A residency set has one or several: see Residency.
constexpr std::size_t kViewsOfDevice = 20;

// The kernels read weights in units of up to four floats.
constexpr std::size_t kAlignment = 16;

// Identifies a layer, which stays in one view, since stacked products need their matrices in one buffer.
std::string_view layer_of(const Tensor& tensor) {
  const std::string_view name = tensor.name;
  return name.starts_with("blk.") ? name.substr(0, name.find('.', 4)) : name;
}

// The tensors that kernels read, by address; the host reads rows of the embedding of layer inputs.
std::vector<const Tensor*> bound_tensors(const Model& model) {
  std::vector<const Tensor*> tensors;
  for_each_tensor(model, [&](const TensorRow&, const Tensor& t, int) {
    if (t && &t != &model.per_layer_embedding) tensors.push_back(&t);
  });
  std::sort(tensors.begin(), tensors.end(),
            [](const Tensor* a, const Tensor* b) { return a->data < b->data; });
  return tensors;
}

}  // namespace

WeightBuffers::WeightBuffers(const Device& device, const Model& model)
    : device_(device), mapping_(model.mapping) {
  const std::vector<const Tensor*> tensors = bound_tensors(model);
  map_file(model, tensors);
  if (mapped_bytes_ > 0 && mapped_bytes_ <= device.mtl().recommendedMaxWorkingSetSize) {
    std::vector<std::span<const std::byte>> parts;
    for (const FileView& file : files_)
      parts.emplace_back(mapping_.data + file.begin, std::min(file.end, mapping_.bytes) - file.begin);
    read_ahead_ = std::make_unique<ReadAhead>(std::move(parts));
  }
  for (const Tensor* t : tensors)
    if (offset_in_file(*t) % kAlignment != 0 && !copies_.contains(t->data))
      copies_[t->data] = view_of(copy(t->name, {t->data, t->bytes}), BufferName::kWeights);
}

void WeightBuffers::map_file(const Model& model, const std::vector<const Tensor*>& tensors) {
  const auto page = std::size_t(getpagesize());
  if (reinterpret_cast<std::uintptr_t>(model.mapping.data) % page != 0)
    throw std::invalid_argument("the model's mapping does not begin at a page");
  // A mapping consists of whole pages: the rest of the last page is readable.
  const std::size_t file_end = round_up(model.mapping.bytes, page);
  const std::size_t most = device_.mtl().maxBufferLength / page * page;
  const std::size_t working_set = device_.mtl().recommendedMaxWorkingSetSize;  // 0: unknown
  const std::size_t usual = working_set > 0 ? std::min(working_set / kViewsOfDevice, most) : most;
  const std::byte* left_out = model.per_layer_embedding.data;  // may be null
  for (auto tensor = tensors.begin(); tensor != tensors.end(); ++tensor) {
    const Tensor* t = *tensor;
    const std::size_t begin = offset_in_file(*t), end = begin + t->bytes;
    if (!files_.empty() && end <= files_.back().end) continue;
    FileView file;
    file.begin = begin / page * page;
    file.end = std::min(round_up(end, page), file.begin + most);
    for (auto next = tensor + 1; next != tensors.end(); ++next) {
      if ((*std::prev(next))->data < left_out && left_out < (*next)->data) break;
      const std::size_t further = round_up(offset_in_file(**next) + (*next)->bytes, page);
      if (further - file.begin > (layer_of(**next) == layer_of(**std::prev(next)) ? most : usual)) break;
      file.end = std::max(file.end, further);
    }
    file.end = std::min(file.end, file_end);
    if (end > file.end)
      throw DeviceError("the tensor '" + t->name + "' of " + std::to_string(t->bytes) +
                        " bytes is larger than a buffer of this GPU can be (" + std::to_string(most) + ")");
    void* start = const_cast<std::byte*>(model.mapping.data) + file.begin;
    if (device_.is_native())
      file.buffer = [device_.mtl()
          newBufferWithBytesNoCopy:start
                            length:file.end - file.begin
                           options:MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked
                       deallocator:nil];
    if (file.buffer) {
      file.buffer.label = to_ns(traits_of(BufferName::kWeights).label);
      mapped_bytes_ += file.end - file.begin;
    } else {  // Metal refuses this in some virtual machines
      mapping_refused_ = true;
      file.end = std::min(file.end, model.mapping.bytes);
      const std::span bytes(model.mapping.data + file.begin, file.end - file.begin);
      file.buffer = copy(traits_of(BufferName::kWeights).label, bytes);
    }
    files_.push_back(file);
  }
}

id<MTLBuffer> WeightBuffers::copy(const std::string& label, std::span<const std::byte> bytes) {
  id<MTLBuffer> buffer = device_.allocate(label, bytes.size(), Access::kHost);
  std::memcpy(buffer.contents, bytes.data(), bytes.size());
  copied_bytes_ += bytes.size();
  copied_.push_back(buffer);
  return buffer;
}

std::vector<id<MTLBuffer>> WeightBuffers::buffers() const {
  std::vector<id<MTLBuffer>> all = copied_;  // including the file, if it was copied
  for (const FileView& file : files_)
    if (std::find(all.begin(), all.end(), file.buffer) == all.end()) all.push_back(file.buffer);
  return all;
}

View WeightBuffers::view(const Tensor& tensor) const {
  if (const auto copied = copies_.find(tensor.data); copied != copies_.end()) return copied->second;
  const std::size_t begin = offset_in_file(tensor), end = begin + tensor.bytes;
  for (const FileView& file : files_)
    if (file.begin <= begin && end <= file.end)
      return view_of(file.buffer, BufferName::kWeights, begin - file.begin);
  throw std::logic_error("the tensor '" + tensor.name + "' is in no buffer");
}

View WeightBuffers::concatenate(BufferName name, std::span<const std::pair<const Tensor*, int>> vectors,
                                float factor) {
  std::vector<float> all;
  for (const auto& [tensor, n] : vectors) {
    const std::size_t begin = all.size();
    all.resize(begin + std::size_t(n), 0.0f);
    if (*tensor) dequantize_row(tensor->type, tensor->data, all.data() + begin, std::size_t(n));
  }
  for (float& value : all) value *= factor;
  return view_of(copy(traits_of(name).label, std::as_bytes(std::span(all))), name);
}

View PassMemory::get(const Device& device, BufferName name, std::size_t bytes) {
  id<MTLBuffer> __strong& buffer = buffers_[std::size_t(name)];
  if (!buffer || buffer.length < bytes) {
    const BufferTraits& traits = traits_of(name);
    buffer = nil;  // freed before the larger one is allocated, so that memory need not hold both
    buffer = device.allocate(traits.label, bytes, traits.host ? Access::kHost : Access::kGpu);
  }
  return view_of(buffer, name);
}

std::size_t PassMemory::bytes() const {
  std::size_t sum = 0;
  for (id<MTLBuffer> buffer : buffers_) sum += buffer.length;
  return sum;
}

std::shared_ptr<PassMemory> PassMemoryPool::take() {
  std::unique_ptr<PassMemory> memory;
  {
    const std::scoped_lock lock(mutex_);
    if (!idle_.empty()) {
      memory = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!memory) memory = std::make_unique<PassMemory>();
  return {memory.release(), [this](PassMemory* used) {
            const std::scoped_lock lock(mutex_);
            idle_.emplace_back(used);
          }};
}

void PassMemoryPool::trim() {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  idle_.clear();
}

std::size_t PassMemoryPool::bytes() const {
  const AutoreleasePool pool;
  const std::scoped_lock lock(mutex_);
  std::size_t sum = 0;
  for (const auto& memory : idle_) sum += memory->bytes();
  return sum;
}

}  // namespace metal_prefill::metal
