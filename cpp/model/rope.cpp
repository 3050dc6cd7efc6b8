#include "rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <utility>

namespace metal_prefill {

namespace {

// Dimension of a rotated pair that turns `rotations` times within the original context (YaRN,
// arXiv:2309.00071, section 3.2).
float yarn_dimension(const Config& c, float base, float rotations) {
  return float(c.rope_dim) *
         std::log(float(c.rope_original_context) / (rotations * 2.0f * std::numbers::pi_v<float>)) /
         (2.0f * std::log(base));
}

// Divisors of the frequencies; an absent tensor if the model has none.
const Tensor& factors_of(const Model& model, int layer) {
  static const Tensor kNone;
  const std::vector<std::uint8_t>& divided = model.config.layer_rope_freqs;
  if (!divided.empty() && !divided[std::size_t(layer)]) return kNone;
  if (model.rope_freqs) return model.rope_freqs;
  return model.config.rope_long ? model.rope_long : model.rope_short;
}

// The rope of a layer with scaling and factors applied. `c` has the dimensions of the layer.
Rope rope_of(const Model& model, const Config& c, int layer) {
  const float base = c.layer_rope_base.empty() ? c.rope_base : c.layer_rope_base[std::size_t(layer)];
  const float factor = c.layer_rope_factor.empty() ? c.rope_factor : c.layer_rope_factor[std::size_t(layer)];
  const bool yarn = c.rope_scaling == RopeScaling::kYarn && factor != 1.0f;
  float low = 0, high = 0;
  if (yarn) {
    low = std::max(0.0f, std::floor(yarn_dimension(c, base, c.rope_beta_fast)));
    high = std::min(float(c.rope_dim - 1), std::ceil(yarn_dimension(c, base, c.rope_beta_slow)));
  }
  const Tensor& factors = factors_of(model, layer);
  const auto* values = reinterpret_cast<const float*>(factors.data);

  for (std::size_t i = 0; values && i < std::size_t(factors.cols); ++i)
    if (const bool usable = values[i] > 0 && std::isfinite(values[i]); !usable)
      throw std::invalid_argument("tensor " + factors.name + " has the value " + std::to_string(values[i]) +
                                  " at index " + std::to_string(i) + ", it must be positive and finite");

  Rope rope;
  rope.frequencies.resize(std::size_t(c.rope_dim / 2));
  for (std::size_t i = 0; i < rope.frequencies.size(); ++i) {
    double frequency = std::pow(double(base), -2.0 * double(i) / double(c.rope_dim));
    if (values) frequency /= double(values[i]);
    if (yarn) {
      // Fast dimensions keep their frequency, slow ones are interpolated, those between are blended.
      const double ramp = std::clamp((double(i) - low) / std::max(0.001, double(high) - low), 0.0, 1.0);
      frequency = frequency * (1.0 - ramp) + frequency / double(factor) * ramp;
    } else if (c.rope_scaling == RopeScaling::kLinear) {
      frequency /= double(factor);
    }
    rope.frequencies[i] = float(frequency);
  }
  const bool finite = std::all_of(rope.frequencies.begin(), rope.frequencies.end(),
                                  [](float frequency) { return std::isfinite(frequency); });
  if (!finite)
    throw std::invalid_argument("the rotary frequencies of layer " + std::to_string(layer) +
                                " are not all finite: base " + std::to_string(base) + ", factor " +
                                std::to_string(factor));
  rope.magnitude = yarn ? c.rope_attn_factor * (1.0f + 0.1f * std::log(factor)) : c.rope_attn_factor;
  return rope;
}

}  // namespace

Rotation Rope::at(std::size_t position, std::size_t pair) const {
  const double angle = double(position) * double(frequencies[pair]);
  return {float(std::cos(angle)) * magnitude, float(std::sin(angle)) * magnitude};
}

Ropes::Ropes(const Model& model) {
  const LayerConfigs configs(model.config);
  for (int layer = 0; layer < model.config.n_layers; ++layer) {
    Rope rope = model.config.uses_rope(layer) ? rope_of(model, configs[layer], layer) : Rope{};
    const auto same = std::find(ropes.begin(), ropes.end(), rope);
    of_layer.push_back(std::size_t(same - ropes.begin()));
    if (same == ropes.end()) ropes.push_back(std::move(rope));
  }
}

}  // namespace metal_prefill
