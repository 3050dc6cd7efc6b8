// One function for each kernel: what it reads and writes, and, in the source file, its dispatch geometry.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "../../shaders/args.h"
#include "buffers.h"
#include "kernels.h"

namespace metal_prefill::metal {

// A compute encoder on which dispatches run in order, but for those of an Overlap, which may run at the same
// time.
class Encoder {
 public:
  Encoder(id<MTLCommandBuffer> commands, const Kernels& kernels, const Tuning& tuning,
          CallCounters& counters);
  // Notes every dispatch in `trace`. With `run` each has a command buffer of its own, which is waited for;
  // without, nothing reaches the GPU.
  Encoder(const Device& device, const Kernels& kernels, CallCounters& counters, std::vector<Dispatch>& trace,
          bool run);
  ~Encoder();  // ends the encoding, also when an exception passes
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // The dispatches in its scope do not depend on each other.
  class Overlap {
   public:
    explicit Overlap(Encoder& encoder);
    ~Overlap();
    Overlap(const Overlap&) = delete;
    Overlap& operator=(const Overlap&) = delete;

   private:
    Encoder& encoder_;
  };

  struct Grid {
    std::size_t x, y = 1, z = 1;  // threadgroups
    std::size_t threads;          // of a threadgroup
    std::size_t threadgroup_bytes = 0;
  };
  template <typename Args>
  void dispatch(const id<MTLComputePipelineState>& pipeline, std::initializer_list<View> buffers,
                const Args& args, const Grid& grid) {
    dispatch(pipeline, buffers, &args, sizeof(Args), grid);
  }

  // What the following dispatches are part of, for the trace.
  void enter_layer(int layer) { layer_ = layer; }
  void leave_layers() { layer_ = -1; }

  const Kernels& kernels() const { return kernels_; }
  const Tuning& tuning() const { return tuning_; }

 private:
  void dispatch(const id<MTLComputePipelineState>& pipeline, std::initializer_list<View> buffers,
                const void* args, std::size_t args_bytes, const Grid& grid);
  void note(id<MTLComputePipelineState> pipeline, std::initializer_list<View> buffers, const void* args,
            std::size_t args_bytes, const Grid& grid, bool after_barrier);

  id<MTLComputeCommandEncoder> encoder_;  // null when tracing
  const Kernels& kernels_;
  const Tuning& tuning_;
  CallCounters& counters_;
  const Device* run_on_ = nullptr;          // when tracing: where each dispatch runs alone; null: nowhere
  std::vector<Dispatch>* trace_ = nullptr;  // null: not tracing
  int layer_ = -1;
  bool overlap_ = false;        // in the scope of an Overlap
  bool needs_barrier_ = false;  // before the next dispatch
};

// Weights of one dispatch: up to three matrices whose rows are stacked.
struct Projection {
  View weights;
  StackedWeights stack;
  TensorType type;
  int in_dim;
  int out_dim;     // rows of all matrices
  int column = 0;  // of the output where its rows begin
};

namespace ops {

void embed(Encoder& e, const Projection& table, const View& ids, const View& x, int tokens, float scale);

// y in half precision where `half_out`.
void rmsnorm(Encoder& e, const View& weight, const View& x, const View& y, int dim, float eps, int tokens,
             bool half_out);
void rmsnorm_add(Encoder& e, const View& weight, const View& x, const View& y, int dim, float eps,
                 int tokens);

// Products with the weights; y has rows of `out_stride` floats. x is float32, but float16 for matmul.
void matvec(Encoder& e, const Projection& w, const View& x, const View& y, bool accumulate);
void matvec_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, u32_t activation);
void rmsnorm_matvec(Encoder& e, const Projection& w, const View& norm, const View& x, const View& y,
                    float eps);
void silu_matvec_q4_0_accumulate(Encoder& e, const Projection& w, const View& gate_up, const View& y,
                                 u32_t activation);
void multi_token_matvec_q4_0(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                             int out_stride, bool accumulate);
void matmul(Encoder& e, const Projection& w, const View& x, const View& y, int tokens, int out_stride,
            bool accumulate);
void matmul_swiglu(Encoder& e, const Projection& w, const View& x, const View& y, int tokens,
                   u32_t activation);
// Whether matmul and matmul_swiglu use their wide tiles.
bool uses_wide_tiles(const Tuning& tuning, int rows, int tokens);

void rope_append(Encoder& e, const View& bias, const View& q_norm, const View& k_norm, const View& table,
                 const View& qkv, const View& k_cache, const View& v_cache, const RopeArgs& args, int tokens);

// Threadgroups that share the keys of a head in attention_decode, and the bytes that they exchange.
struct DecodeSplits {
  int count;
  int keys;  // of each
};
DecodeSplits decode_splits(const Tuning& tuning, int tokens, int position);
std::size_t decode_partial_bytes(const AttentionArgs& args);
// `args` says how the keys are split. With one split `partial` is not used.
void attention_decode(Encoder& e, const View& q, const View& k, const View& v, const View& partial,
                      const View& out, const AttentionArgs& args);
// rope_append and attention_decode of one token.
void rope_attention_decode(Encoder& e, const View& bias, const View& q_norm, const View& k_norm,
                           const View& table, const View& qkv, const View& k_cache, const View& v_cache,
                           const View& partial, const View& out, const RopeAttentionArgs& args);
void attention_prefill(Encoder& e, const View& q, const View& k, const View& v, const View& out,
                       const AttentionArgs& args);

void swiglu(Encoder& e, const View& gate_up, const View& out, int ffn_dim, int tokens, u32_t activation,
            bool half_out);

// Both stages; `candidates` holds candidates_bytes.
std::size_t candidates_bytes(const Tuning& tuning);
void argmax(Encoder& e, const View& logits, const View& candidates, const View& result, int n);
void log_prob(Encoder& e, const View& logits, const View& targets, const View& out, int vocab_size,
              int tokens);

}  // namespace ops
}  // namespace metal_prefill::metal
