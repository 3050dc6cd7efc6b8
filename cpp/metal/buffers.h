// Buffers: the weights, where they lie in the mapped file, and the activations of a chunk, from a pool.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../../shaders/args.h"
#include "device.h"

namespace metal_prefill::metal {

// A place in a buffer that somebody else keeps: views are copied for every dispatch, and not counted.
struct View {
  __unsafe_unretained id<MTLBuffer> buffer = nil;
  std::size_t offset = 0;
};

// The weights as Metal buffers without a copy: views of the mapped file. A file that is larger than a buffer
// can be is covered by several views that overlap, so that every tensor lies within one. Only tensors that
// begin at an address that the kernels cannot read from are copied.
class WeightBuffers {
 public:
  WeightBuffers(const Device& device, const Model& model);

  View view(const Tensor& tensor) const;
  // The tensors as one stack of rows, and the binding that its offsets count from; nothing where they lie in
  // different buffers or differ in type or columns.
  struct Stack {
    View binding;
    StackedWeights weights;
  };
  std::optional<Stack> stack(std::span<const Tensor* const> tensors) const;
  // A new buffer with float32 vectors one behind the other; an absent one counts as `n` zeros.
  View concatenate(const char* label, std::span<const std::pair<const Tensor*, int>> vectors);

  std::size_t mapped_bytes() const { return mapped_bytes_; }
  std::size_t copied_bytes() const { return copied_bytes_; }

 private:
  struct FileView {
    id<MTLBuffer> buffer;
    std::size_t begin, end;  // in the file
  };
  void map_file(const Model& model, const std::vector<const Tensor*>& tensors);
  View copy(const char* label, std::span<const std::byte> bytes);
  std::size_t offset_in_file(const Tensor& tensor) const { return std::size_t(tensor.data - mapping_.data); }

  const Device& device_;
  Mapping mapping_;
  std::vector<FileView> files_;
  std::vector<id<MTLBuffer>> copied_;
  std::map<const std::byte*, View> copies_;  // by what they are copies of
  std::size_t mapped_bytes_ = 0, copied_bytes_ = 0;
};

// Every activation of a chunk. Named as in the forward pass; sizes are in docs/kernels.md.
enum class Name {
  kIds,         // [tokens] int32, from the host
  kX,           // [tokens][dim] f32: the residual stream
  kNormed,      // [tokens][dim] f16 or f32
  kQkv,         // [tokens][q | k | v] f32
  kPartial,     // attention_decode: what attention_combine joins
  kAtt,         // [tokens][n_heads * value_dim] f16 or f32
  kBlock,       // [tokens][dim] f32: a block's output where a norm follows it
  kGateUp,      // [tokens][2 * ffn_dim] f32
  kFfn,         // [tokens][ffn_dim] f16 or f32
  kLogits,      // [rows][vocab_size] f32
  kHostLogits,  // [vocab_size] f32, to the host
  kCandidates,  // argmax: one for each threadgroup
  kResult,      // one Candidate, to the host
  kTargets,     // [tokens] int32, from the host
  kLogProbs,    // [tokens] f32, to the host
  kCount,
};
const char* name_of(Name name);

// The activation buffers of one chunk in flight. Each is made when it is first needed and grows with the
// chunk.
class Batch {
 public:
  explicit Batch(const Device& device) : device_(device) {}

  // The buffer, at least `bytes` long. Its contents are lost when it grows.
  View get(Name name, std::size_t bytes, CallCounters& counters);
  // The buffer as it is; null when it was not needed yet.
  id<MTLBuffer> peek(Name name) const { return buffers_[std::size_t(name)]; }
  std::size_t bytes() const;

 private:
  const Device& device_;
  id<MTLBuffer> buffers_[std::size_t(Name::kCount)];
};

// Batches that no chunk uses now. A chunk takes one and brings it back: as many exist as chunks were ever in
// flight at the same time.
class BatchPool {
 public:
  explicit BatchPool(const Device& device) : device_(device) {}

  class Lease {
   public:
    Lease(BatchPool& pool, std::unique_ptr<Batch> batch) : pool_(pool), batch_(std::move(batch)) {}
    ~Lease() { pool_.put_back(std::move(batch_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Batch& operator*() const { return *batch_; }

   private:
    BatchPool& pool_;
    std::unique_ptr<Batch> batch_;
  };

  Lease take();
  void trim();                // frees the batches that no chunk uses
  std::size_t bytes() const;  // of those that no chunk uses

 private:
  void put_back(std::unique_ptr<Batch> batch);

  const Device& device_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Batch>> idle_;
};

}  // namespace metal_prefill::metal
