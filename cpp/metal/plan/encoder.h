// Destination of the dispatches of a forward pass: a GPU, or a list.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <utility>

#include "args_layout.h"
#include "kernel_key.h"
#include "pass_rows.h"
#include "tuning.h"
#include "view.h"

namespace metal_prefill::metal {

struct Grid {
  std::size_t x, y = 1, z = 1;  // threadgroups
  std::size_t threads;          // of a threadgroup
  std::size_t threadgroup_bytes = 0;
  double work = 0;  // approximate multiply-adds, for kernels with many
};

// One dispatch, as passed to an encoder. Valid for the duration of the call.
struct Step {
  KernelKey kernel;
  std::span<const View> buffers;  // by binding; the arguments come after them
  const void* args;
  const ArgsLayout& layout;  // of the arguments
  const Grid& grid;
  bool after_barrier;            // waits for the previous dispatches
  int layer;                     // -1: before the layers or after them
  std::span<const RowRun> runs;  // the rows, if a kernel reads or writes the cache
};

inline constexpr std::size_t kMaxThreads = 1024;

// Encodes dispatches, which run in order, except for those of an Overlap, which may run concurrently.
class Encoder {
 public:
  Encoder(const Tuning& tuning, KvType cache) : tuning_(tuning), cache_(cache) {}
  virtual ~Encoder() = default;
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Declares that the dispatches in its scope do not depend on each other.
  class Overlap {
   public:
    explicit Overlap(Encoder& encoder) : encoder_(encoder) { encoder_.overlap_ = true; }
    ~Overlap() {
      encoder_.overlap_ = false;
      encoder_.needs_barrier_ = true;
    }
    Overlap(const Overlap&) = delete;
    Overlap& operator=(const Overlap&) = delete;

   private:
    Encoder& encoder_;
  };

  template <typename Args>
  void dispatch(const KernelKey& kernel, std::initializer_list<View> buffers, const Args& args,
                const Grid& grid, std::span<const RowRun> runs = {}) {
    const bool barrier = std::exchange(needs_barrier_, !overlap_);
    encode({kernel,
            {buffers.begin(), buffers.size()},
            &args,
            ArgsTable<Args>::kLayout,
            grid,
            barrier,
            layer_,
            runs});
  }

  // Sets the layer of the following dispatches.
  void enter_layer(int layer) { layer_ = layer; }
  void leave_layers() { layer_ = -1; }

  const Tuning& tuning() const { return tuning_; }
  // Maximum threads in a threadgroup of the kernel: kMaxThreads, unless its pipeline allows fewer.
  virtual std::size_t max_threads(const KernelKey&) const { return kMaxThreads; }
  KvType cache() const { return cache_; }

 protected:
  virtual void encode(const Step& step) = 0;

 private:
  const Tuning& tuning_;
  const KvType cache_;
  int layer_ = -1;
  bool overlap_ = false;        // in the scope of an Overlap
  bool needs_barrier_ = false;  // whether the next dispatch needs one
};

}  // namespace metal_prefill::metal
