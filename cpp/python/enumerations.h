// Enumerations that are strings in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>

#include "../engine/engine.h"

namespace nanobind::detail {

template <std::size_t kSize>
struct Name {
  char text[kSize] = {};
  constexpr Name(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }
};

// kNames are the strings for the values from 0 on.
template <typename Enum, Name... kNames>
struct StringCaster {
  NB_TYPE_CASTER(Enum, const_name("typing.Literal[") +
                           concat((const_name("'") + const_name(kNames.text) + const_name("'"))...) +
                           const_name("]"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    if (!PyUnicode_Check(source.ptr())) return false;
    int i = 0;
    const auto is = [&](const char* name) {
      value = Enum(i++);
      return PyUnicode_CompareWithASCIIString(source.ptr(), name) == 0;
    };
    return (is(kNames.text) || ...);
  }

  static handle from_cpp(Enum source, rv_policy, cleanup_list*) noexcept {
    static constexpr const char* kStrings[] = {kNames.text...};
    return PyUnicode_InternFromString(kStrings[std::size_t(source)]);
  }
};

#define ENUM_STRINGS(Enum, ...) \
  template <>                   \
  struct type_caster<metal_prefill::Enum> : StringCaster<metal_prefill::Enum, __VA_ARGS__> {}
ENUM_STRINGS(RopeStyle, "interleaved", "neox");
ENUM_STRINGS(RopeScaling, "none", "linear", "yarn");
ENUM_STRINGS(Activation, "silu", "gelu", "gelu_erf", "relu", "clamped_silu");
ENUM_STRINGS(NormKind, "rms", "layer");
ENUM_STRINGS(QkNormPlace, "heads", "rotated_heads", "rows");
ENUM_STRINGS(LayerKind, "attention", "short_conv", "state_space", "attention_and_state_space", "gated_delta");
ENUM_STRINGS(FeedForwardKind, "none", "dense", "experts");
ENUM_STRINGS(RouterScore, "softmax", "sigmoid");
ENUM_STRINGS(Compute, "int8", "f32", "bf16", "w8a8", "int16");
#undef ENUM_STRINGS

}  // namespace nanobind::detail
