// Buffers: views of the weights in the mapped file, and pooled activations of a pass.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../../base/read_ahead.h"
#include "../plan/forward_pass.h"
#include "device.h"

namespace metal_prefill::metal {

// The weights as Metal buffers without a copy: views of the mapped file, each a small part of the GPU's
// memory, since macOS evicts and restores whole buffers. Each tensor is inside one view; views may share
// pages. Copies only tensors at addresses that kernels cannot read from, or the whole file if the GPU is not
// native (see Device) or Metal refuses to map it.
class WeightBuffers final : public WeightViews {
 public:
  WeightBuffers(const Device& device, const Model& model);

  View view(const Tensor& tensor) const override;
  View concatenate(BufferName name, std::span<const std::pair<const Tensor*, int>> vectors,
                   float factor) override;

  std::vector<id<MTLBuffer>> buffers() const;
  std::size_t mapped_bytes() const { return mapped_bytes_; }
  std::size_t copied_bytes() const { return copied_bytes_; }
  // Whether the file was copied, as Metal refused to map it.
  bool mapping_refused() const { return mapping_refused_; }
  // Waits until the mapped file is in memory. Does nothing if the file exceeds the GPU's working set.
  void wait_until_read() const {
    if (read_ahead_) read_ahead_->wait();
  }

 private:
  struct FileView {
    id<MTLBuffer> buffer;
    std::size_t begin, end;  // in the file
  };
  void map_file(const Model& model, const std::vector<const Tensor*>& tensors);
  id<MTLBuffer> copy(const std::string& label, std::span<const std::byte> bytes);
  std::size_t offset_in_file(const Tensor& tensor) const { return std::size_t(tensor.data - mapping_.data); }

  const Device& device_;
  Mapping mapping_;
  std::vector<FileView> files_;
  std::vector<id<MTLBuffer>> copied_;
  std::map<const std::byte*, View> copies_;  // by the address of the original in the mapping
  std::size_t mapped_bytes_ = 0, copied_bytes_ = 0;
  bool mapping_refused_ = false;
  std::unique_ptr<ReadAhead> read_ahead_;
};

// The activation buffers of one pass in flight. Each is allocated when first needed, and grows.
class PassMemory {
 public:
  // Returns the buffer, with at least `bytes` bytes. Its contents are lost when it grows.
  View get(const Device& device, BufferName name, std::size_t bytes);
  // Returns the buffer for the host to read; null if it has not been needed yet.
  id<MTLBuffer> peek(BufferName name) const { return buffers_[std::size_t(name)]; }
  std::size_t bytes() const;

 private:
  id<MTLBuffer> buffers_[kActivations];
};

// The PassMemory objects that no pass is using: at most as many as passes were in flight at the same time.
class PassMemoryPool {
 public:
  // Takes an object, which returns to the pool when released. The pool must outlive it.
  std::shared_ptr<PassMemory> take();
  void trim();                // frees the memory of unused objects
  std::size_t bytes() const;  // of unused objects

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<PassMemory>> idle_;
};

}  // namespace metal_prefill::metal
