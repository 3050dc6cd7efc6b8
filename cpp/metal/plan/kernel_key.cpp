#include "kernel_key.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace metal_prefill::metal {

namespace {

constexpr std::array kDecodeSizes = {32, 64, 96, 128, 256, 512};
constexpr std::array kPrefillSizes = {64, 128, 256, 512};
static_assert(kDecodeSizes.back() == kMostHeadDim && kPrefillSizes.back() == kMostHeadDim);

template <std::size_t N>
int smallest_holding(const std::array<int, N>& sizes, int head_dim) {
  return *std::find_if(sizes.begin(), sizes.end() - 1, [&](int s) { return s >= head_dim; });
}

std::string suffix_of(TensorType type) {
  std::string name(type_info(type).name);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return char(std::tolower(c)); });
  return name;
}

const char* type_of(KvType cache) {
  return cache == KvType::kF16 ? "f16" : "f32";
}

struct KernelName {
  const char* text;
  NamePart part;
};
constexpr KernelName kNames[] = {
#define METAL_PREFILL_KERNEL(kernel, name, part) {name, NamePart::part},
    METAL_PREFILL_EACH_KERNEL(METAL_PREFILL_KERNEL)
#undef METAL_PREFILL_KERNEL
};

std::string part_of(const KernelKey& key, KvType cache) {
  switch (kNames[std::size_t(key.kernel)].part) {
    case NamePart::kNothing:
      break;
    case NamePart::kTensorType:
    case NamePart::kResult:
      return suffix_of(key.type);
    case NamePart::kCacheType:
      return type_of(cache);
    case NamePart::kDecodeHeads:
    case NamePart::kPrefillHeads:
      return std::string(type_of(cache)) + "_" + std::to_string(key.heads);
  }
  return {};
}

}  // namespace

int decode_size(int head_dim) {
  return smallest_holding(kDecodeSizes, head_dim);
}

int prefill_size(int head_dim) {
  return smallest_holding(kPrefillSizes, head_dim);
}

std::string kernel_name(const KernelKey& key, KvType cache) {
  std::string name = kNames[std::size_t(key.kernel)].text;
  const auto place = name.find('%');
  return place == std::string::npos ? name : name.replace(place, 1, part_of(key, cache));
}

std::string variant_of(const KernelKey& key, KvType cache) {
  switch (kNames[std::size_t(key.kernel)].part) {
    case NamePart::kTensorType:
      return part_of(key, cache);
    case NamePart::kDecodeHeads:  // rope_attention_decode uses the same variants
      return "attention_decode_" + part_of(key, cache);
    case NamePart::kPrefillHeads:
      return kernel_name(key, cache);
    default:
      return {};
  }
}

}  // namespace metal_prefill::metal
