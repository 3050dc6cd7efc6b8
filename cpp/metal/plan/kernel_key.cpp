#include "kernel_key.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace metal_prefill::metal {

namespace {

constexpr std::array kDecodeSizes = {32, 64, 96, 128, 256};
constexpr std::array kPrefillSizes = {64, 128, 256};

template <std::size_t N>
int smallest_holding(const std::array<int, N>& sizes, int head_dim) {
  const auto size = std::find_if(sizes.begin(), sizes.end(), [&](int s) { return s >= head_dim; });
  if (size == sizes.end())
    throw UnsupportedModelError("attention heads of " + std::to_string(head_dim) +
                                " dimensions: the Metal engine does at most " + std::to_string(sizes.back()));
  return *size;
}

std::string suffix_of(TensorType type) {
  std::string name(type_info(type).name);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return char(std::tolower(c)); });
  return name;
}

const char* type_of(const CacheShape& cache) {
  return cache.type == KvType::kF16 ? "f16" : "f32";
}

}  // namespace

int CacheShape::decode_size() const {
  return smallest_holding(kDecodeSizes, head_dim);
}

int CacheShape::prefill_size() const {
  return smallest_holding(kPrefillSizes, head_dim);
}

std::string kernel_name(const KernelKey& key, const CacheShape& cache) {
  const auto typed = [&](const char* stem) { return stem + suffix_of(key.type); };
  const auto cached = [&](const char* stem) { return std::string(stem) + type_of(cache); };
  switch (key.kernel) {
    case Kernel::kEmbed:
      return typed("embed_");
    case Kernel::kMatvec:
      return typed("matvec_");
    case Kernel::kMatvecRows2:
      return typed("matvec_") + "_rows2";
    case Kernel::kMatvecRows4:
      return typed("matvec_") + "_rows4";
    case Kernel::kMatvecSwiglu:
      return typed("matvec_swiglu_");
    case Kernel::kMatmulNarrow:
      return typed("matmul_") + "_narrow";
    case Kernel::kMatmulWide:
      return typed("matmul_") + "_wide";
    case Kernel::kMatmulSplit:
      return typed("matmul_") + "_split";
    case Kernel::kMatmulSwigluNarrow:
      return typed("matmul_swiglu_") + "_narrow";
    case Kernel::kMatmulSwigluWide:
      return typed("matmul_swiglu_") + "_wide";
    case Kernel::kMatmulTensorNarrow:
      return typed("matmul_tensor_") + "_narrow";
    case Kernel::kMatmulTensorWide:
      return typed("matmul_tensor_") + "_wide";
    case Kernel::kMatmulTensorTall:
      return typed("matmul_tensor_") + "_tall";
    case Kernel::kMatmulTensorSwigluNarrow:
      return typed("matmul_tensor_swiglu_") + "_narrow";
    case Kernel::kMatmulTensorSwigluWide:
      return typed("matmul_tensor_swiglu_") + "_wide";
    case Kernel::kMatmulTensorSwigluTall:
      return typed("matmul_tensor_swiglu_") + "_tall";
    case Kernel::kMultiTokenMatvec:
      return typed("multi_token_matvec_");
    case Kernel::kMultiTokenMatvecAccumulate:
      return typed("multi_token_matvec_") + "_accumulate";
    case Kernel::kMultiTokenMatvecSwiglu:
      return typed("multi_token_matvec_swiglu_");
    case Kernel::kRmsnormMatvec:
      return typed("rmsnorm_matvec_");
    case Kernel::kRmsnormMatvecSwiglu:
      return typed("rmsnorm_matvec_swiglu_");
    case Kernel::kRmsnormF32:
      return "rmsnorm_f32";
    case Kernel::kRmsnormF16:
      return "rmsnorm_f16";
    case Kernel::kRmsnormAdd:
      return "rmsnorm_add";
    case Kernel::kRmsnormInPlace:
      return "rmsnorm_in_place";
    case Kernel::kLayernormF32:
      return "layernorm_f32";
    case Kernel::kLayernormF16:
      return "layernorm_f16";
    case Kernel::kLayernormStream:
      return "layernorm_stream";
    case Kernel::kLayernormInPlace:
      return "layernorm_in_place";
    case Kernel::kLayernormTwice:
      return "layernorm_twice";
    case Kernel::kAddBias:
      return "add_bias";
    case Kernel::kRopeAppend:
      return cached("rope_append_");
    case Kernel::kRopeAppendConv:
      return cached("rope_append_conv_");
    case Kernel::kRopeAttentionDecode:
      return cached("rope_attention_decode_") + "_" + std::to_string(cache.decode_size());
    case Kernel::kAttentionDecode:
      return cached("attention_decode_") + "_" + std::to_string(cache.decode_size());
    case Kernel::kAttentionCombine:
      return "attention_combine";
    case Kernel::kAttentionPrefill:
      return cached("attention_prefill_") + "_" + std::to_string(cache.prefill_size());
    case Kernel::kAttentionTensor:
      return cached("attention_tensor_") + "_" + std::to_string(cache.prefill_size());
    case Kernel::kGateHeadsF32:
      return "gate_heads_f32";
    case Kernel::kGateHeadsF16:
      return "gate_heads_f16";
    case Kernel::kSwigluF32:
      return "swiglu_f32";
    case Kernel::kSwigluF16:
      return "swiglu_f16";
    case Kernel::kCausalConvF32:
      return "causal_conv_f32";
    case Kernel::kCausalConvF16:
      return "causal_conv_f16";
    case Kernel::kScanF32Rows128:
      return "scan_f32_128";
    case Kernel::kScanF32Rows256:
      return "scan_f32_256";
    case Kernel::kScanF16Rows128:
      return "scan_f16_128";
    case Kernel::kScanF16Rows256:
      return "scan_f16_256";
    case Kernel::kScanNormF32:
      return "scan_norm_f32";
    case Kernel::kScanNormF16:
      return "scan_norm_f16";
    case Kernel::kGatedDelta:
      return "gated_delta";
    case Kernel::kGatedNormF32:
      return "gated_norm_f32";
    case Kernel::kGatedNormF16:
      return "gated_norm_f16";
    case Kernel::kArgmaxStage1:
      return "argmax_stage1";
    case Kernel::kArgmaxStage2:
      return "argmax_stage2";
    case Kernel::kLogProb:
      return "log_prob";
    case Kernel::kCount:
      break;
  }
  throw std::logic_error("there is no kernel " + std::to_string(int(key.kernel)));
}

std::string variant_of(const KernelKey& key, const CacheShape& cache) {
  if (key.kernel <= Kernel::kLastTyped) return suffix_of(key.type);
  const auto attention = [&](const char* stem, int size) {
    return std::string(stem) + type_of(cache) + "_" + std::to_string(size);
  };
  if (key.kernel == Kernel::kAttentionDecode || key.kernel == Kernel::kRopeAttentionDecode)
    return attention("attention_decode_", cache.decode_size());
  if (key.kernel == Kernel::kAttentionPrefill) return attention("attention_prefill_", cache.prefill_size());
  if (key.kernel == Kernel::kAttentionTensor) return attention("attention_tensor_", cache.prefill_size());
  return {};
}

}  // namespace metal_prefill::metal
